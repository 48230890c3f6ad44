"""JSON (schema kltest.grade/1): one object for one target, an array for several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from kltest.render import PLAIN, Terminal
from kltest.report import Report


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    if len(reports) == 1:
        return _encodable(reports[0].to_json())
    dictionaries = [report.to_dict() for report in reports]
    return _encodable(json.dumps(dictionaries, indent=2, ensure_ascii=False, allow_nan=False))


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of what is rendered here."""
    return json.loads(resources.files("kltest.render").joinpath("grade-1.schema.json").read_text(encoding="utf-8"))


def _encodable(text: str) -> str:
    """Lone surrogates, from a name in bytes that are not UTF-8, as escapes of JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
