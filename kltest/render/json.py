"""JSON (schema kltest.grade/2, in grade-2.schema.json): one object for one target, an array for several."""

import json
from collections.abc import Sequence

from kltest.render import PLAIN, Terminal
from kltest.report import Report


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as JSON: an object for one, an array for several."""
    found = [report.to_dict() for report in reports]
    text = json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False, allow_nan=False)
    # Lone surrogates, from a name in bytes that are not UTF-8, become escapes of JSON.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
