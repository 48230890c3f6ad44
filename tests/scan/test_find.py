"""Finding KL terms: every form, and beside each the one that looks like it and is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scan.reading import cases, found, sections

from kltest.estimators import registry
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store

SECTIONS = {name: (text, place) for name, place, text in sections("found.md")}
TERMS = {name: found for name, found in SECTIONS.items() if found[1] != "nothing"}
NONE = {name: text for name, (text, place) in SECTIONS.items() if place == "nothing"}
TERMS_NOT_YET = {
    "stored, and subtracted from the reward elsewhere": "a field that another function stores",
}
NONE_NOT_YET = {
    "a distance of logits": "logits that are not normalised are taken to be log-probs",
    "a reward that is only logged": "a variable called reward counts, whatever becomes of it",
    "a reward that all callers put into a preference": "a helper is not told by its callers",
    "a log-ratio to the sampler that nobody here calls": "a helper whose name says KL",
}


@pytest.mark.parametrize("name", cases(TERMS, TERMS_NOT_YET))
def test_a_term_is_found_once_with_its_place(name: str, tmp_path: Path) -> None:
    text, place = TERMS[name]
    terms = found(tmp_path, text)
    assert [{one.place for one in its if one.called} for _, its in terms] == [{place}]


@pytest.mark.parametrize("name", cases(NONE, NONE_NOT_YET))
def test_what_looks_like_a_term_is_not_found(name: str, tmp_path: Path) -> None:
    assert [(find.lines, [one.formula for one in its]) for find, its in found(tmp_path, NONE[name])] == []


def test_lines_are_those_of_the_expression(tmp_path: Path) -> None:
    ((find, _),) = found(tmp_path, TERMS["k3 in the loss"][0])
    lines = (tmp_path / "code.py").read_text().splitlines()
    assert [lines[line - 1].strip().partition(" = ")[0] for line in find.lines] == ["kl"]


def test_nothing_of_the_tree_is_executed_while_looking(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"open({str(mark)!r}, 'w').close()\n" + TERMS["a helper"][0]
    assert len(found(tmp_path, text)) == 1
    assert not mark.exists()


PACKAGE = Path(__file__).parents[2] / "kltest"
LISTED = """
import sys
from pathlib import Path
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store
print([(row.to_dict(), row.against) for row in Search(list(contents(map(Path, sys.argv[1:]), [])), Store(None))])
"""


@pytest.mark.scheduled
def test_our_own_estimators_are_found() -> None:
    """All but those that weigh a rollout's score by its worth in its group, have a tail bucket, or call full-loss."""
    rows = Search(list(contents([PACKAGE / "estimators"], [])), Store(None))
    known = {row.function.replace("_", "-") for row in rows}
    assert set(registry()) - known == {
        *("group-mean", "group-std", "leave-one-out"),
        *("forward-kl-topk-tail", "reverse-kl-topk-tail", "full-reward", "rao-blackwell"),
    }


OF_THREE = """
def loss(logp, ref_logp, mask, weight=0.0, scale=0.0, offset=0.0):
    log_ratio = logp - ref_logp
    kl = log_ratio.square() if weight + scale + offset > 1 else log_ratio.exp() - log_ratio
    return (kl * mask).sum(-1).mean()
"""


@pytest.mark.scheduled
def test_what_is_found_does_not_depend_on_how_words_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(OF_THREE, encoding="utf-8")
    folders = (PACKAGE / "checks" / "sequences", PACKAGE / "adapters" / "trl", tmp_path)
    command = [sys.executable, "-c", LISTED, *map(str, folders)]
    told = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert told.pop().count(b"'function'") >= 5
