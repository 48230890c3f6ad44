"""Gradients that past releases of libraries followed, measured release by release and recorded a row a line.

Each release is installed with the dependencies of its day in an environment that is deleted afterwards. A release that
is recorded is not measured again, so that the same command goes on where it was interrupted.
"""

import shutil
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kltest.adapters import find
from kltest.files import writable
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import borrows
from kltest.scoreboard.measurement import FOLDER, Measurement, check_checkout, code, log, measured, requested
from kltest.scoreboard.releases import minors
from kltest.scoreboard.rows import BoardRow, matches
from kltest.sweeps.store import Store

PATH = Path(__file__).parent / "history.jsonl"
# The one check on extreme input that compares releases: a clamp came or went.
DEAD_ZONE = "KL504"


def history(names: Sequence[str], request: Measurement, output: str | None = None, *, record: bool = False) -> int:
    """Measure the defaults and main settings of the releases of libraries (`NAME`, or `NAME==VERSION` for one)."""
    folder = writable(Path(output or FOLDER))
    path = PATH if record else folder / PATH.name
    if record:
        check_checkout()
    within, ungraded = folder / "environments", False
    for name, version in requested(names):
        library = find(name)
        releases = minors(library.distribution, library.since, first=borrows(library))
        for each in [version] if version else half_years_first(releases):
            of_release = (
                row for row in recorded.read(path) if (row["library"], row["version"]) == (library.name, each)
            )
            there = [row["setting"] for row in of_release]
            known = there and all(any(matches(one, [pattern]) for one in there) for pattern in request.settings)
            if known and not request.again:
                continue
            try:
                with Store(folder / "runs.jsonl", code()) as store:
                    rows = measured((name, each), store, request, within)
            finally:
                shutil.rmtree(within, ignore_errors=True)
            # Programs belong to the newest release alone.
            usual = {"program": "", "program_of_adapter": True}
            usual |= {"released": f"{releases[each]:%Y-%m-%d}"} if each in releases else {}
            recorded.record([{**row, **usual} for row in rows if not row["error"]], path, whole=False)
            for row in rows:
                if row["error"]:
                    log(f"{library.name} {each} {row['setting']}: {row['error']}")
                    ungraded = True
    return 3 if ungraded else 0


def half_years_first(releases: dict[str, datetime]) -> list[str]:
    """Return releases newest first, but the last of each half-year before all others."""
    last = {(uploaded.year, uploaded.month > 6): version for version, uploaded in releases.items()}
    newest = list(reversed(releases))
    return sorted(newest, key=lambda version: version not in last.values())


def changed(rows: Sequence[BoardRow]) -> list[tuple[BoardRow, BoardRow]]:
    """Return pairs of rows of a setting, of a release and of the next one measured, whose gradients differ."""
    found = []
    for line in lines(rows).values():
        found += [pair for pair in pairwise(line) if followed(pair[0]) != followed(pair[1])]
    return found


def lines(rows: Sequence[BoardRow]) -> dict[tuple[str, str], list[BoardRow]]:
    """Return the rows of each library and setting, oldest release first."""
    found: dict[tuple[str, str], list[BoardRow]] = {}
    for row in reversed(rows):
        found.setdefault((row["library"], row["setting"]), []).append(row)
    return found


def followed(row: BoardRow) -> dict[str, Any]:
    """Return the gradient of a row in each environment, coefficients to three digits, and its dead zone if any."""
    zone = [each["code"] for each in row["failed"] if each["code"] == DEAD_ZONE]
    return {"dead zone": zone} | {
        f"{each['environment']}, {each['sampler']}, {min(each['batch'], 2)}": each["identified"]
        and {name: float(f"{value:.3g}") for name, value in each["identified"].items()}
        for each in row["gradients"]
    }
