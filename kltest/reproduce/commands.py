"""What the commands `reproduce`, `run`, `figures` and `paper` do. Each returns the exit code.

0: everything was done and every claim agrees; 1: a claim disagrees; 3: an experiment, a figure or the paper failed
(the others were still made); 130: interrupted, everything finished is kept. A question wrongly put raises UsageError.
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from kltest.errors import KltestError, UsageError
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import Claim, summary
from kltest.reproduce.drawing import draw
from kltest.reproduce.experiment import Experiment, Scale
from kltest.reproduce.files import as_csv, as_json, as_markdown, writable, write
from kltest.reproduce.typesetting import typeset
from kltest.sweeps.run import Failure

INTERRUPTED = 130


def reproduce(*, scale: str = "quick", only: Sequence[str] = (), output: Path | str | None = None) -> int:
    """Every experiment (or those in `only`), then the figures, then the paper, then the summary."""
    checkout, folder, started = *_prepare(scale, output), time.monotonic()
    chosen = _chosen(checkout, only)
    with _kept(folder, "reproduce"):
        claims, failed = _experiments(checkout, chosen, folder, scale)
        failed |= _figures(checkout, folder)
        failed |= _attempt("paper", lambda: _say(f"paper: {typeset(checkout, folder)}"))
        skipped = [name for name in checkout.experiments() if name not in chosen]
        claims += [Claim(name, "all of its claims", "", "", "left out by --only", None) for name in skipped]
        _conclude(claims, folder)
        _say(f"Results, figures and paper are in {folder} ({time.monotonic() - started:.0f} s).")
        return 3 if failed else _exit_code(claims)
    return INTERRUPTED


def run(name: str, *, scale: str = "quick", output: Path | str | None = None) -> int:
    """One experiment and its part of the summary."""
    checkout, folder = _prepare(scale, output)
    chosen = _chosen(checkout, [name])
    with _kept(folder, f"run {name}"):
        claims, failed = _experiments(checkout, chosen, folder, scale)
        _say(summary(claims, _width()))
        _say(f"Results are in {folder / name}.")
        return 3 if failed else _exit_code(claims)
    return INTERRUPTED


def figures(*, output: Path | str | None = None) -> int:
    """Draw every figure from the results that are there."""
    checkout, folder = _prepare("quick", output)
    with _kept(folder, "figures"):
        return 3 if _figures(checkout, folder) else 0
    return INTERRUPTED


def paper(*, output: Path | str | None = None) -> int:
    """Typeset the paper from the results that are there."""
    checkout, folder = _prepare("quick", output)
    with _kept(folder, "paper"):
        _say(str(typeset(checkout, folder)))
        return 0
    return INTERRUPTED


def _prepare(scale: str, output: Path | str | None) -> tuple[Checkout, Path]:
    if scale not in get_args(Scale):
        raise UsageError(f"there is no scale {scale!r}; there are: {', '.join(get_args(Scale))}")
    checkout = Checkout.find()
    return checkout, writable(Path(output) if output is not None else checkout.root / "results")


def _chosen(checkout: Checkout, only: Sequence[str]) -> list[str]:
    names = [Experiment.find(checkout, name).name for name in only] or checkout.experiments()
    if not names:
        raise UsageError(f"{checkout.root / 'experiments'} has no experiments")
    return list(dict.fromkeys(names))


def _experiments(checkout: Checkout, names: Sequence[str], folder: Path, scale: str) -> tuple[list[Claim], bool]:
    claims: list[Claim] = []
    failed = False
    for name in names:

        def once(name: str = name) -> None:
            nonlocal failed
            outcome = Experiment(checkout, name).run(folder, "full" if scale == "full" else "quick")
            claims.extend(outcome.claims)
            for note in outcome.notes:
                _warn(f"{name}: {note}")
            failed |= bool(outcome.failures)
            _tell(name, outcome.failures)

        if _attempt(name, once):
            failed = True
            claims.append(Claim(name, "all of its claims", "", "", "the experiment failed", None))
    return claims, failed


def _tell(name: str, failures: Sequence[Failure]) -> None:
    """Each reason once, with the configurations that it stopped and one traceback."""
    reasons: dict[str, list[Failure]] = {}
    for failure in failures:
        reasons.setdefault(failure.reason, []).append(failure)
    for reason, same in reasons.items():
        titles = ", ".join(failure.title for failure in same)
        _warn(f"{name}: {titles} failed: {reason}\n{same[0].traceback}")


def _figures(checkout: Checkout, folder: Path) -> bool:
    def once(name: str) -> Callable[[], None]:
        return lambda: _say(f"figure: {draw(checkout, name, folder)[0].with_suffix('.{pdf,svg,png}')}")

    return any([_attempt(f"figure {name}", once(name)) for name in checkout.figures()])


def _attempt(what: str, work: Callable[[], None]) -> bool:
    """Do it; True if it failed, which has then been said. A question wrongly put is not a failure of the work."""
    try:
        work()
    except KltestError as error:
        _warn(f"{what} failed: {error}")
    except Exception as error:
        _warn(f"{what} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    else:
        return False
    return True


def _conclude(claims: Sequence[Claim], folder: Path) -> None:
    rows = [claim.row() for claim in claims]
    write(folder / "summary.json", as_json(rows))
    write(folder / "summary.csv", as_csv(rows))
    write(folder / "summary.md", as_markdown(rows))
    _say(summary(claims, _width()))


def _exit_code(claims: Sequence[Claim]) -> int:
    return 1 if any(claim.agrees is False for claim in claims) else 0


@contextmanager
def _kept(folder: Path, command: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _warn(
            f"\nInterrupted. Everything that was finished is kept in {folder}; "
            f"`kltest {command}` with the same options goes on from there."
        )


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _say(text: str) -> None:
    """What a terminal cannot show (∇ on an ASCII one) is a question mark there, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
