"""The way of a loss from `grade` to its verdict: few modules receive it. docs/way-of-a-loss.md describes them."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weekly import first

import kltest
from kltest.loss.calling import Loss

PACKAGE = Path(kltest.__file__).parent
PAGE = PACKAGE.parent / "docs" / "way-of-a-loss.md"
# The same tracer counted 20, 21 and 22 modules for these losses before results and measuring were split.
MOST = 15


def penalty(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp) * mask
    return (log_ratio.neg().exp() - 1 + log_ratio).sum(-1)


def token_mean(logp, ref_logp, mask):
    return ((logp - ref_logp).square() * mask).sum() / 2 / mask.sum()


def of_groups(logp, ref_logp, mask, reward, group, beta):
    cost = beta * ((logp - ref_logp) * mask).sum(-1).detach() - reward
    same = (group[:, None] == group[None, :]).double()
    return ((cost - same @ cost / same.sum(1)) * (logp * mask).sum(-1)).mean()


@contextmanager
def traced() -> Iterator[set[str]]:
    """Modules in which a bound loss is an argument or a local variable, `self` included."""
    receivers: set[str] = set()
    found: set[str] = set()
    folder = f"{PACKAGE}{os.sep}"

    def look(frame, event, argument):
        file = frame.f_code.co_filename
        if event not in ("call", "return") or file in found or not file.startswith(folder):
            return
        # A copy: reading the locals of a frame can itself call something.
        if any(isinstance(value, Loss) for value in list(frame.f_locals.values())):
            found.add(file)
            receivers.add(Path(file).relative_to(PACKAGE).as_posix())

    sys.setprofile(look)
    try:
        yield receivers
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("loss", first(1, [penalty, token_mean, of_groups]))
def test_few_modules_receive_a_loss(loss):
    with traced() as receivers:
        report = kltest.grade(loss)
    assert report.verdict == "refuted"
    assert "moments/differentiate.py" in receivers
    assert len(receivers) <= MOST, sorted(receivers)
    unknown = {name for name in receivers if name not in PAGE.read_text(encoding="utf-8")}
    assert not unknown, f"docs/way-of-a-loss.md does not name {sorted(unknown)}"


def test_the_page_is_short_and_names_modules_that_exist():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 20
    named = re.findall(r"`(\w+/\w+\.py)`", text)
    assert len(named) >= 12
    assert [name for name in named if not (PACKAGE / name).is_file() and not name.startswith("tests/")] == []
