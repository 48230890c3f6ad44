"""Carry out the commands `reproduce`, `run`, `figures` and `paper`. Each returns the exit code.

0: everything was done and every claim agrees; 1: a claim disagrees; 3: an experiment, a figure or the paper failed
(the others were still made); 130: interrupted, everything finished is kept. A question wrongly put raises UsageError.
"""

import io
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kltest.errors import INTERRUPTED, KltestError, UsageError
from kltest.files import as_csv, as_json, as_markdown, held, relative, writable, write
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import LEFT_OUT, Claim, score
from kltest.reproduce.experiment import Computed, Experiment, Request
from kltest.reproduce.typesetting import draw, sources, typeset
from kltest.reproduce.unchanged import Unchanged
from kltest.sweeps.run import connect, spread, title
from kltest.sweeps.store import Failure

# Claims that disagree come first in the summary, then those that were not run.
ORDER = {False: 0, None: 1, True: 2}
Result = TypeVar("Result")


def reproduce(*, only: Sequence[str] = (), output: Path | str | None = None, request: Request = Request()) -> int:  # noqa: B008
    """Every experiment (or those in `only`), then the figures, then the paper, then the summary."""
    checkout, folder, started = *_prepare(output, request), time.monotonic()
    chosen = _chosen(checkout, only)
    unchanged = Unchanged(checkout, folder, (chosen, replace(request, workers=None, cluster=None)))
    with _kept(folder, "reproduce"), held(folder):
        if unchanged.holds():
            claims = [Claim(**row) for row in json.loads((folder / "summary.json").read_text(encoding="utf-8"))]
            _say(summary(claims, _width(), fold=True))
            _say(f"Nothing has changed since {folder} was made, and nothing was made again.")
            return int(any(claim.agrees is False for claim in claims))
        claims, failed = _experiments(checkout, chosen, folder, request, recorded=True)
        absent = [name for name in checkout.experiments() if not (folder / name / "numbers.json").is_file()]
        failed |= _figures(checkout, folder, left_out=absent if only else (), request=request)
        pdf = None
        if only and absent:
            _say(f"paper: not built, for want of {', '.join(absent)}; without --only it is")
        elif pdf := _attempt("paper", typeset, checkout, folder):
            _say(f"paper: {pdf}")
        else:
            failed = True
        skipped = [name for name in checkout.experiments() if name not in chosen]
        claims += [Claim(name, "all of its claims", "", "", LEFT_OUT, None) for name in skipped]
        _conclude(claims, folder)
        if not failed:
            unchanged.record()
        _say(f"Every claim is in {folder / 'summary.md'}, the paper {f'is {pdf}' if pdf else 'was not built'}.")
        _say(f"Results and figures are in {folder} ({time.monotonic() - started:.0f} s).")
        return 3 if failed else int(any(claim.agrees is False for claim in claims))
    return INTERRUPTED


def run(name: str, *, output: Path | str | None = None, request: Request = Request()) -> int:  # noqa: B008
    """One experiment and its part of the summary."""
    checkout, folder = _prepare(output, request)
    Experiment.find(checkout, name).configurations(request)  # what cannot be is said before any work
    with _kept(folder, f"run {name}"), held(folder, shared=True):
        claims, failed = _experiments(checkout, [name], folder, request)
        if not request.variation:
            _say(summary(claims, _width()))
            _say(f"Results are in {folder / name}.")
        else:
            own = folder / f"{name}@{request.variation}"
            files = sorted(path.name for path in own.glob("*") if path.is_file())
            _say(f"Results are in {own}: {', '.join(files) or 'none'}.")
            _say(summary(claims, _width(), decided=True))
        return 3 if failed else int(any(claim.agrees is False for claim in claims))
    return INTERRUPTED


def figures(*, output: Path | str | None = None) -> int:
    """Draw every figure from the results that are there."""
    checkout, folder = _prepare(output)
    with _kept(folder, "figures"):
        return 3 if _figures(checkout, folder) else 0
    return INTERRUPTED


def paper(*, output: Path | str | None = None) -> int:
    """Typeset the paper from the results that are there."""
    checkout, folder = _prepare(output)
    with _kept(folder, "paper"):
        _say(str(typeset(checkout, folder)))
        return 0
    return INTERRUPTED


def _prepare(output: Path | str | None, request: Request | None = None) -> tuple[Checkout, Path]:
    checkout = Checkout.find()
    folder = Path(relative(writable(Path(output) if output is not None else checkout.root / "results"), Path.cwd()))
    if request is not None and request.cluster is not None:
        connect(request.cluster)
    return checkout, folder


def _chosen(checkout: Checkout, only: Sequence[str]) -> list[str]:
    names = [Experiment.find(checkout, name).name for name in only] or checkout.experiments()
    if not names:
        raise UsageError(f"{checkout.root / 'experiments'} has no experiments")
    return list(dict.fromkeys(names))


def _experiments(
    checkout: Checkout, names: Sequence[str], folder: Path, request: Request, *, recorded: bool = False
) -> tuple[list[Claim], bool]:
    """Run experiments; with `recorded`, the quick scale of those whose full one is kept in the repository."""
    claims: list[Claim] = []
    failed = False
    for place, name in enumerate(names, 1):
        label = f"{place} of {len(names)} {name}" if len(names) > 1 else name
        outcome = _attempt(name, _run, Experiment(checkout, name), folder, request, recorded, label)
        if outcome is None:
            failed = True
            claims.append(Claim(name, "all of its claims", "", "", "the experiment failed", None))
            continue
        claims += outcome.claims
        failed |= bool(outcome.failures)
        for note in outcome.notes:
            _warn(f"{name}: {note}")
        _tell(name, outcome.failures)
    return claims, failed


def _run(experiment: Experiment, folder: Path, request: Request, recorded: bool, label: str) -> Computed:
    if recorded and request.scale != "quick" and experiment.settings.recorded:
        request = replace(request, scale="quick")
    return experiment.run(folder, request, label)


def _tell(name: str, failures: Sequence[Failure]) -> None:
    """Each reason once, with the configurations that it stopped and one traceback."""
    reasons: dict[str, list[Failure]] = {}
    for failure in failures:
        reasons.setdefault(failure.reason, []).append(failure)
    for reason, same in reasons.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        _warn(f"{name}: {title(same[0].configuration)}{more} failed: {reason}\n{same[0].traceback}")
    if failures:
        _warn(f"{name}: failures are kept as they are; `--retry-failed` tries them again")


def _figures(
    checkout: Checkout,
    folder: Path,
    left_out: Sequence[str] = (),
    request: Request = Request(),  # noqa: B008
) -> bool:
    """Draw what can be drawn; a figure that reads an experiment which was left out on purpose is no failure."""
    names = {name: [one for one in left_out if one in sources(checkout, name)] for name in checkout.figures()}
    for name, missing in names.items():
        if missing:
            _say(f"figure: {name} is not drawn, for want of {', '.join(missing)}")
    drawing, failed = partial(_drawn, checkout, folder), False
    chosen = [name for name, missing in names.items() if not missing]
    for drawn, why in spread(drawing, chosen, workers=request.workers):
        if drawn:
            _say(f"figure: {drawn[0].with_suffix('.{pdf,svg,png}')}")
        else:
            _warn(why)
            failed = True
    return failed


def _drawn(checkout: Checkout, folder: Path, name: str) -> tuple[list[Path] | None, str]:
    return _tried(f"figure {name}", draw, checkout, name, folder)


def _attempt(what: str, work: Callable[..., Result], *arguments: Any) -> Result | None:
    """Return what the work gives; None if it failed, which has then been said."""
    result, why = _tried(what, work, *arguments)
    if why:
        _warn(why)
    return result


def _tried(what: str, work: Callable[..., Result], *arguments: Any) -> tuple[Result | None, str]:
    """Return what the work gives, or None and why it failed."""
    try:
        return work(*arguments), ""
    except KltestError as error:
        return None, f"{what} failed: {error}"
    except Exception as error:
        return None, f"{what} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"


def _conclude(claims: Sequence[Claim], folder: Path) -> None:
    rows = [asdict(claim) for claim in claims]
    write(folder / "summary.json", as_json(rows))
    write(folder / "summary.csv", as_csv(rows))
    write(folder / "summary.md", as_markdown(rows))
    _say(summary(claims, _width(), fold=True))


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
    """Replace what a terminal cannot show (∇ on an ASCII one) by a question mark, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(claims: Sequence[Claim], width: int, *, fold: bool = False, decided: bool = False) -> str:
    """Return the table in lines of at most `width` columns.

    With `fold` agreeing claims are a count an experiment; with `decided` those that were not run are only counted.
    """
    shown = [claim for claim in claims if not ((fold and claim.agrees) or (decided and claim.agrees is None))]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("agrees", no_wrap=True)
    for name, ratio in (("claim", 4), ("expected", 3), ("found", 3)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for claim in sorted(shown, key=lambda claim: ORDER[claim.agrees]):
        about = [f"source: {claim.source}"] if claim.source and not claim.agrees else []
        limit = [f"tolerance: {claim.tolerance}"] if claim.tolerance and not claim.agrees else []
        cells = ([f"{claim.experiment}: {claim.claim}", *about], [claim.expected, *limit], [claim.found])
        table.add_row(claim.verdict, *(Text("\n".join(cell)) for cell in cells))
    file = io.StringIO()
    console = Console(file=file, width=max(width, 60), color_system=None, highlight=False, legacy_windows=False)
    if shown:
        console.print(table)
    if fold:
        console.print(_counts(claims))
    agreed, wrong, unknown = (sum(claim.agrees is verdict for claim in claims) for verdict in (True, False, None))
    left_out = sum(claim.found == LEFT_OUT for claim in claims)
    asked = f" ({left_out} of these not asked for)" * bool(left_out)
    console.print(f"{agreed} of {len(claims)} claims agree, {wrong} disagree, {unknown} not run{asked}.")
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _counts(claims: Sequence[Claim]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("experiment", "agree", "of", "score"):
        table.add_column(name, justify="left" if name == "experiment" else "right")
    for name in dict.fromkeys(claim.experiment for claim in claims):
        mine = [claim for claim in claims if claim.experiment == name]
        value = score(mine)
        agreed = sum(claim.agrees is True for claim in mine)
        table.add_row(name, str(agreed), str(len(mine)), "–" if value is None else f"{value:.2f}")
    return table
