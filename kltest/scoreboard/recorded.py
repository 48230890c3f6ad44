"""The results that kltest ships with: the last measurement of each library, readable without installing any.

`recorded.jsonl` has a line for each library and version, with the versions of the packages beside it, and below it a
line for each setting and part of its loss, with numbers and codes alone. How a setting is called stands in its adapter,
what a check means in the check; both are filled in when the file is read.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from kltest.adapters import NAMES, find
from kltest.files import write
from kltest.scoreboard.rows import (
    DESCRIBED,
    GRADIENT,
    LEAKED,
    LIMIT,
    LOOKED_AT,
    PARTS,
    VALUE,
    BoardRow,
    described,
    leaked,
    part_of,
)

PATH = Path(__file__).parent / "recorded.jsonl"
# Fields that are written only if they are otherwise.
USUAL: Mapping[str, Any] = {
    "part": "kl",
    "expect": "reverse_kl",
    "placement": "loss",
    "credit": None,
    "inconclusive": [],
    "error": "",
    "program": "",
    **LOOKED_AT,
}
METHOD = "exact"
HEAD = ("library", "version", "released", "versions")
# The one note that is stored: the function was lifted out of a file that cannot be imported.
LIFTED = "lifted"


def read(path: Path | None = None, *, parts: Sequence[str] = ("kl",)) -> list[BoardRow]:
    """Return recorded rows of these parts, by library, version and setting; none if nothing was recorded yet."""
    path = path or PATH
    rows: list[BoardRow] = []
    head: BoardRow = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        found = json.loads(line)
        if "library" in found:
            head = found
        else:
            rows.append(_expanded(found, head))
    return [each for each in rows if each["part"] in parts]


def record(rows: Sequence[BoardRow], path: Path | None = None, *, whole: bool = True) -> None:
    """Replace what is recorded of these parts of these libraries in these versions, or, not `whole`, of these settings.

    Left out are rows of libraries that failed, of settings that were not finished, and of those that now fail and did
    not before; what is recorded of them stays.
    """
    known = read(path, parts=PARTS)
    there = {_key(each) for each in known if not each["error"]}
    done = [each for each in rows if each["setting"] and not each.get("unfinished")]
    new = {_key(each): each for each in done if not (each["error"] and _key(each) in there)}
    failed = {each["library"] for each in rows if _key(each) not in new}
    replaced = {(*key[:2], key[-1]) for key in new if whole and key[0] not in failed}
    kept = {key: each for each in known for key in [_key(each)] if (*key[:2], key[-1]) not in replaced}
    order = sorted((kept | new).values(), key=_place)
    lines: list[BoardRow] = []
    for _, group in groupby(order, key=itemgetter("library", "version")):
        first, *others = group
        head = {name: first[name] for name in HEAD if name in first}
        lines += [head, *(_shortened(each, head) for each in (first, *others))]
    text = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    write(path or PATH, "".join(text))


def _key(row: BoardRow) -> tuple[str, str, str, str]:
    return row["library"], row["version"], row["setting"], part_of(row)


def _place(row: BoardRow) -> tuple[Any, ...]:
    """Libraries in the order of their adapters, then others; newest versions first; KL terms before policy parts."""
    library, version = row["library"], row["version"].split(".")
    order = NAMES.index(library) if library in NAMES else len(NAMES)
    return order, library, [-int(part) for part in version if part.isdigit()], PARTS.index(part_of(row))


def _shortened(row: BoardRow, head: BoardRow) -> BoardRow:
    """The fields of a row that cannot be filled in again."""
    usual = _usual(row, head)
    row = {**row, "limits": [[each.get(name) for name in LIMIT] for each in row.get("limits", ())]}
    return {
        **{name: row[name] for name in ("setting", "verdict", "reduction", "dtype")},
        "gradients": [
            [each[name] for name in GRADIENT if (name, each[name]) != ("method", METHOD)] for each in row["gradients"]
        ],
        "value": [[each[name] for name in VALUE] for each in row["value"]],
        "failed": [each["code"] for each in row["failed"]],
        **({LIFTED: True} if any(LIFTED in note for note in row["notes"]) else {}),
        **{name: row[name] for name in (*DESCRIBED, *usual) if name not in usual or row[name] != usual[name]},
    }


def _expanded(line: BoardRow, head: BoardRow) -> BoardRow:
    """A row with everything but messages and notes."""
    found = {**_usual(line, head), **head, **line, "notes": ["lifted out of its file"] if line.get(LIFTED) else []}
    found["gradients"] = [dict(zip(GRADIENT, [*each, METHOD], strict=False)) for each in line["gradients"]]
    found["limits"] = [dict(zip(LIMIT, each, strict=True)) for each in found["limits"]]
    found["value"] = [dict(zip(VALUE, each, strict=True)) for each in line["value"]]
    leak = leaked(found["leak"]) if found["leak"] else ""
    found["failed"] = [{"code": code, "message": leak if code == LEAKED else ""} for code in line["failed"]]
    found.pop(LIFTED, None)
    return found


def _usual(row: BoardRow, head: BoardRow) -> BoardRow:
    """Defaults of a row; if the adapter knows the setting, they say how it is called as well."""
    known = find(head["library"]).known.get(row["setting"]) if head["library"] in NAMES else None
    part = part_of(row)
    usual = {**USUAL, **(described(known.for_part(part)) if known else {}), "versions": head["versions"], "known": True}
    return {**usual, "program_of_adapter": bool(row["gradients"]) and part == "kl"}
