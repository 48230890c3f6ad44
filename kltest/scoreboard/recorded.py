"""The results that kltest ships with: what each library was last found to do, by whom nothing has to be installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kltest.adapters import NAMES
from kltest.files import as_json, write
from kltest.scoreboard.rows import Row, key

PATH = Path(__file__).parent / "recorded.json"


def read(path: Path = PATH) -> list[Row]:
    """All recorded rows, by library, version and setting; none if nothing was recorded yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def record(rows: Sequence[Row], path: Path = PATH, *, whole: bool = True) -> None:
    """Replace what is recorded of these libraries in these versions, or, not `whole`, of these settings alone.

    Rows of libraries that failed are left out, and what is recorded of them stays.
    """
    new = {key(each): each for each in rows if each["setting"]}
    failed = {each["library"] for each in rows if not each["setting"]}
    replaced = {(library, version) for library, version, _ in new if whole and library not in failed}
    kept = {key(each): each for each in read(path) if (each["library"], each["version"]) not in replaced}
    order = sorted((kept | new).values(), key=lambda each: (_place(each["library"]), _numbers(each["version"])))
    write(path, as_json([{name: value for name, value in each.items() if name != "seconds"} for each in order]))


def _place(library: str) -> tuple[int, str]:
    return (NAMES.index(library) if library in NAMES else len(NAMES), library)


def _numbers(version: str) -> list[int]:
    return [-int(part) for part in version.split(".") if part.isdigit()]
