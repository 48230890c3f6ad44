"""HTML: one self-contained page, nothing loaded from elsewhere, readable on a phone and in the dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from kltest.grading.report import CheckResult, Report
from kltest.outputs import PLAIN, Terminal
from kltest.outputs._words import COLUMNS, headline, is_warning, one_line, rows, settings, skipped, value_rows, visible

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --faint: #57606a;
  --confirmed: #116329; --refuted: #b3261e; --inconclusive: #7d4e00; --error: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; --faint: #9da7b3;
  --confirmed: #56d364; --refuted: #ff938a; --inconclusive: #e3b341; --error: #ff938a; } }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .25rem; font-size: 1.2rem; } h3 { margin: 1rem 0 .25rem; font-size: 1rem; }
p { margin: .25rem 0; } .faint { color: var(--faint); }
.confirmed { color: var(--confirmed); } .refuted { color: var(--refuted); }
.inconclusive, .warning { color: var(--inconclusive); } .error { color: var(--error); }
.table { overflow-x: auto; margin: .75rem 0; } table { border-collapse: collapse; min-width: 100%; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.note { white-space: normal; min-width: 12rem; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); }
""".strip()
AGREES = {
    True: ("confirmed", "agrees"),
    False: ("refuted", "differs"),
    None: ("inconclusive", "not judged"),
}
NUMERIC = {"relative bias", "cosine", "relative variance"}


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    body = "\n".join(line for report in reports for line in _section(report))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>kltest: which gradient does the KL follow?</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>Which gradient does the KL follow?</h1>
{body}
</body>
</html>
"""


def _section(report: Report) -> Iterator[str]:
    yield "<section>"
    yield f'<h2><span class="{report.verdict}">{report.verdict}</span> <code>{_text(report.target)}</code></h2>'
    yield f"<p>{_text(headline(report))}</p>"
    yield f'<p class="faint">declared {_text(report.expect)} · {_text(" · ".join(settings(report)))}</p>'
    if report.gradients:
        yield from _table(report)
    for check in report.failed:
        yield from _check(check)
    if report.error:
        yield f'<p class="error">{_text(report.error)}</p>'
    if report.traceback:
        yield f"<pre>{_text(report.traceback)}</pre>"
    yield from _notes(report)
    yield "</section>"


def _table(report: Report) -> Iterator[str]:
    kinds = [' class="number"' if column in NUMERIC else "" for column in COLUMNS]
    heads = "".join(f"<th{kind}>{column}</th>" for kind, column in zip(kinds, COLUMNS, strict=True))
    yield f'<div class="table"><table><thead><tr>{heads}<th>verdict</th></tr></thead><tbody>'
    for row in rows(report):
        cells = "".join(f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(kinds, row.cells, strict=True))
        style, word = AGREES[row.agrees]
        note = f'<div class="note faint">{_text(row.note)}</div>' if row.note else ""
        yield f'<tr>{cells}<td><span class="{style}">{word}</span>{note}</td></tr>'
    yield "</tbody></table></div>"


def _check(check: CheckResult) -> Iterator[str]:
    style = "warning" if is_warning(check) else "refuted"
    yield f'<h3 class="{style}">{_text(check.code)} {_text(check.name)}</h3><p>{_text(check.message)}</p>'
    if check.fix:
        yield f"<p><strong>Fix:</strong> {_text(check.fix)}</p>"


def _notes(report: Report) -> Iterator[str]:
    notes = [f"Logged value: {line}" for line in value_rows(report)]
    notes += [one_line(note) for note in report.notes]
    notes += [f"Skipped {', '.join(codes)}: {why}" for why, codes in skipped(report).items()]
    if notes:
        items = "".join(f"<li>{_text(note)}</li>" for note in notes)
        yield f'<ul class="faint">{items}</ul>'


def _text(text: str) -> str:
    return html.escape(visible(text, keep="\n"))
