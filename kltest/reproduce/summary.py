"""The table that closes a run: every claim whole, the worst first."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kltest.reproduce.claims import Claim, score

# What disagrees comes first, then what was not run.
ORDER = {False: 0, None: 1, True: 2}


def summary(claims: Sequence[Claim], width: int, *, fold: bool = False) -> str:
    """Return the table in lines of at most `width` columns; with `fold` agreeing claims are a count an experiment."""
    shown = [claim for claim in claims if not (fold and claim.agrees)]
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
    console.print(f"{agreed} of {len(claims)} claims agree, {wrong} disagree, {unknown} not run.")
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
