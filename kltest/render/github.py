"""GitHub Actions annotations: `::error` for a failed check, `::warning` for a warning, `::notice` for the rest."""

from collections.abc import Sequence
from pathlib import Path

from kltest.render import PLAIN, Terminal
from kltest.render.sarif import VERDICTS, Finding, findings, in_checkout
from kltest.render.words import visible
from kltest.report import Report

DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
PROPERTY = {**DATA, **str.maketrans({":": "%3A", ",": "%2C"})}


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as workflow commands of GitHub, a line each, which become annotations."""
    return "\n".join(_annotation(found) for report in reports for found in findings(report))


def _annotation(found: Finding) -> str:
    # An inconclusive verdict is an error too: the exit code is not 0.
    level = "error" if found.code in VERDICTS else found.level.replace("note", "notice")
    place = ""
    # GitHub knows a file by its path from the root of the checkout.
    if found.file and not Path(path := in_checkout(found.file)).is_absolute():
        place = f"file={_escaped(path, PROPERTY)}," + (f"line={found.first}," if found.first else "")
    return f"::{level} {place}title={_escaped(found.title, PROPERTY)}::{_escaped(found.text, DATA)}"


def _escaped(text: str, table: dict[int, str]) -> str:
    return visible(text, keep="\r\n").translate(table)
