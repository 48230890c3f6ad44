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

from kltest.adapters import Adapter, find
from kltest.files import writable
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import borrows
from kltest.scoreboard.measurement import CHECKOUT, FOLDER, Measurement, code, environment, log, measured, requested
from kltest.scoreboard.releases import minors
from kltest.scoreboard.rows import BoardRow, matches
from kltest.sweeps.store import Store

PATH = Path(__file__).parent / "history.jsonl"
NAME = PATH.name
# The one check on extreme input that compares releases: a clamp came or went.
DEAD_ZONE = "KL504"


def history(names: Sequence[str], request: Measurement, output: str | None = None, *, record: bool = False) -> int:
    """Measure the defaults and main settings of the releases of libraries (`NAME`, or `NAME==VERSION` for one)."""
    folder = writable(Path(output or FOLDER))
    path = recorded.checked(PATH, CHECKOUT) if record else folder / NAME
    failed = 0
    for name, version in requested(names):
        library = find(name)
        releases = minors(library.distribution, library.since, first=borrows(library))
        chosen = [version] if version else half_years_first(releases)
        for each in chosen:
            if request.again or not _known(library, each, request.settings, path):
                failed += not _recorded(name, each, releases.get(each), request, folder, path)
    return 3 if failed else 0


def _recorded(
    name: str, version: str, uploaded: datetime | None, request: Measurement, folder: Path, path: Path
) -> bool:
    """Measure a release and add its rows to the table; return False if something was not graded."""
    library, within = find(name), folder / "environments"
    try:
        _, there = environment((name, version), request, within)
        with Store(folder / "runs.jsonl", code()) as store:
            rows = measured(name, version, there, store, request)
    finally:
        shutil.rmtree(within, ignore_errors=True)
    released = {"released": uploaded.date().isoformat()} if uploaded else {}
    # Programs belong to the newest release alone.
    kept = [{**each, **released, "program": "", "program_of_adapter": True} for each in rows if not each["error"]]
    recorded.record(kept, path, whole=False)
    for each in rows:
        if each["error"]:
            log(f"{library.name} {version} {each['setting']}: {each['error']}")
    return len(kept) == len(rows)


def half_years_first(releases: dict[str, datetime]) -> list[str]:
    """Return releases newest first, but the last of each half-year before all others."""
    last = {(uploaded.year, uploaded.month > 6): version for version, uploaded in releases.items()}
    newest = list(reversed(releases))
    return sorted(newest, key=lambda version: version not in last.values())


def _known(library: Adapter, version: str, settings: Sequence[str], path: Path) -> bool:
    """Return True if the table has the release, with each of the settings that are wanted."""
    there = [
        row["setting"] for row in recorded.read(path) if (row["library"], row["version"]) == (library.name, version)
    ]
    return bool(there) and all(any(matches(one, [pattern]) for one in there) for pattern in settings)


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
