"""The report of a scan for people, as text and Markdown, and the table of all formats."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, zip_longest

from kltest.files import as_json, as_markdown
from kltest.render.tables import PLAIN, Terminal, paint, wrap
from kltest.render.words import one_line, visible
from kltest.scanning.annotations import github, sarif
from kltest.scanning.rows import Row, Scan

STYLES = {"finding": "red", "passed": "green"}
BY_HAND = "To grade what is not run, write it as a function of log-probs: `kltest grade FILE.py:FUNCTION`."


def text(scan: Scan, terminal: Terminal = PLAIN) -> str:
    """Return a table of the terms, then each finding in a sentence, what was not read, and one line that counts.

    A term has a line with its place, and two for each variant. With `verbose` what was lifted is shown as well.
    """
    lines = list(_table(scan, terminal)) if scan.rows else []
    for row in scan.rows:
        details = [f"{code}: {row.messages.get(code, '')}" for code in row.codes] if row.status == "finding" else []
        if details or (terminal.verbose and row.source):
            lines += ["", one_line(f"{row.spot}: {row.title}")]
        for words in details:
            lines += wrap(visible(words), terminal, indent="    ", first="  ")
        if terminal.verbose and row.source:
            lines += [f"    {line}" for line in visible(row.source).split("\n")]
            lines += [f"    # {one_line(note)}" for note in row.notes]
    reasons: dict[str, dict[str, None]] = {}
    for row in scan.rows:
        if row.why:
            reasons.setdefault(f"{row.status}: {row.why.splitlines()[0]}", {})[one_line(f"{row.spot}: {row.title}")] = (
                None
            )
    for why, spots in reasons.items():
        lines += ["", *wrap(visible(why), terminal, indent="    ", first=""), *(f"  {spot}" for spot in spots)]
    if any(row.status == "not run" for row in scan.rows):
        lines += ["", *wrap(BY_HAND, terminal)]
    if more := sum(row.runs_more and row.status == "not run" for row in scan.rows):
        lines += ["", f"{more} not run for being more than arithmetic; --run imports the tree and runs them."]
    for kind, said in (("not read", scan.left_out), ("note", scan.notes)):
        lines += ["", *(f"{kind}: {one_line(words)}" for words in said)] if said else []
    if scan.findings:
        lines += ["", "`kltest explain CODE` says what each code means; --verbose shows what was cut out and graded."]
    return "\n".join([*lines, *([""] if lines else []), summary(scan)]) + "\n"


def _table(scan: Scan, terminal: Terminal) -> Iterator[str]:
    heads = ("on-policy", "off-policy", "findings")
    cells = [(*row.follows, row.remarks) for row in scan.rows]
    room = terminal.width - 8
    columns = list(zip(heads, *cells, strict=True))
    widths = [max(min(max(map(len, column)), room // 3), *map(len, " ".join(column).split())) for column in columns]
    widths[2] = max(room - widths[0] - widths[1], 20)

    def shown(texts: Sequence[str]) -> Iterator[str]:
        columns = [textwrap.wrap(one_line(text), width) for text, width in zip(texts, widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue=""):
            yield "    " + "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()

    yield from ("file:line  function", "  its place [configuration]: formula", *shown(heads), "")
    for spot, rows in groupby(
        zip(scan.rows, cells, strict=True), key=lambda each: f"{each[0].spot}  {each[0].function}"
    ):
        yield _short(visible(spot), max(terminal.width, spot.index("  ")))
        for row, texts in rows:
            yield "  " + _short(one_line(_term(row)), terminal.width - 2)
            style = STYLES.get(row.status)
            yield from (paint(line, style, terminal) if style else line for line in shown(texts))


def summary(scan: Scan) -> str:
    """Return one line: how many terms of how many files, and what became of them."""
    told = ", ".join(f"{number} {status}" for status, number in Counter(row.status for row in scan.rows).items())
    terms, files = len({(row.file, row.spot) for row in scan.rows}), scan.files
    counted = f"{terms or 'no'} KL term{'s' * (terms > 1)} in {files} file{'s' * (files != 1)} ({scan.lines:,} lines)"
    return f"{counted}; variants: {told}" if told else counted


def markdown(scan: Scan) -> str:
    """Return a Markdown table and the line that counts."""
    heads = ("where", "term", "on-policy", "off-policy", "findings")
    cells = [
        (f"`{row.spot}` {row.title}", f"{row.place}: `{_short(row.formula, 120)}`", *row.follows, row.remarks)
        for row in scan.rows
    ]
    said = [f"- not read: {line}\n" for line in scan.left_out] + [f"- {line}\n" for line in scan.notes]
    table = as_markdown([dict(zip(heads, map(visible, row), strict=True)) for row in cells])
    return "".join([table, "\n" * bool(table), f"{summary(scan)}\n", "\n" * bool(said), *said])


def _term(row: Row) -> str:
    return f"{row.place} [{row.variant}]: {row.formula}" if row.variant else f"{row.place}: {row.formula}"


def _short(formula: str, most: int) -> str:
    return formula if len(formula) <= most else f"{formula[: most - 1]}…"


FORMATS: dict[str, Callable[[Scan], str]] = {
    "text": text,
    "json": lambda scan: as_json(scan.to_dict()),
    "markdown": markdown,
    "github": github,
    "sarif": sarif,
}
