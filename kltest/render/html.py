"""HTML: one self-contained page with pictures, nothing loaded from elsewhere, readable on a phone and in the dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from kltest.render import PLAIN, Terminal
from kltest.render.pictures import bars, differ, tree
from kltest.render.words import (
    COLUMNS,
    excuses,
    headline,
    is_warning,
    one_line,
    remedy,
    rows,
    settings,
    skipped,
    value_rows,
    visible,
)
from kltest.report import CheckResult, CounterExample, Report

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --faint: #57606a; --box: #f6f8fa;
  --confirmed: #116329; --refuted: #b3261e; --inconclusive: #7d4e00; --error: #b3261e;
  --truth: #0b5cad; --found: #b4540a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; --faint: #9da7b3;
  --box: #161b22; --confirmed: #56d364; --refuted: #ff938a; --inconclusive: #e3b341; --error: #ff938a;
  --truth: #79b8ff; --found: #ffab70; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { margin: 2.5rem 0 .25rem; font-size: 1.2rem; }
h3 { margin: 1.5rem 0 .25rem; font-size: 1.05rem; }
p { margin: .25rem 0; } .lead { font-size: 1.1rem; } .faint { color: var(--faint); }
.badge { padding: .1rem .5rem; border: 2px solid; border-radius: .4rem; text-transform: uppercase; font-size: .95rem; }
.confirmed { color: var(--confirmed); } .refuted { color: var(--refuted); }
.inconclusive, .warning { color: var(--inconclusive); } .error { color: var(--error); }
.table { overflow-x: auto; margin: .75rem 0; } table { border-collapse: collapse; min-width: 100%; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { white-space: normal; overflow-wrap: normal; vertical-align: bottom; }
@media (max-width: 40rem) { th, td { padding: .25rem; font-size: .8rem; } }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.note { white-space: normal; min-width: 12rem; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); background: var(--box); font-size: .85rem;
  overflow-wrap: normal; tab-size: 4; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
figure { flex: 1 1 20rem; max-width: 27rem; min-width: 0; margin: .5rem 0; }
figcaption { margin-bottom: .25rem; } svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .faint { fill: var(--faint); }
svg .prefix { font-weight: 600; } .branch, .axis { fill: none; stroke: var(--line); stroke-width: 1.5; }
.node { fill: var(--box); stroke: var(--faint); } .root { fill: var(--faint); }
svg .truth { fill: var(--truth); } svg .found { fill: var(--found); }
svg .differs { fill: var(--refuted); font-size: 15px; font-weight: 700; }
.whisker { fill: none; stroke: var(--ink); stroke-width: 1.2; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.key.truth { background: var(--truth); } .key.found { background: var(--found); } .legend { margin-right: 1em; }
details { margin: .75rem 0; } summary { cursor: pointer; }
.differs td:nth-last-child(-n+2) { color: var(--refuted); font-weight: 600; }
""".strip()
AGREES = {
    True: ("confirmed", "agrees"),
    False: ("refuted", "differs"),
    None: ("inconclusive", "not judged"),
}
NUMERIC = {"relative bias", "cosine", "relative variance"}
INTRODUCTION = (
    "kltest called each loss on every rollout of small worlds, added up its gradients with their exact probabilities, "
    "and compared the sum with the gradient that the loss is meant to follow."
)
KEYS = (("truth", "true gradient"), ("found", "expected gradient of the loss"))
# So many rows of numbers are shown at once; more are folded away.
FEW_ROWS = 6
DERIVATIVES = "Derivatives with respect to each action's logit, ≠ where the two differ."
TREE = "Every rollout, choice by choice: the action in the circle, its probabilities on the branch"


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    body = "\n".join(line for report in reports for line in _section(report))
    contents = "\n".join(_contents(reports)) if len(reports) > 1 else ""
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
<p class="faint">{INTRODUCTION}</p>
{contents}
{body}
</body>
</html>
"""


def _contents(reports: Sequence[Report]) -> Iterator[str]:
    """All targets with their verdicts, where there are several."""
    yield "<ul>"
    for report in reports:
        codes = ", ".join(check.code for check in (*report.failed, *report.stale))
        verdict = f'<span class="{report.verdict}">{report.verdict}</span>'
        yield f"<li>{verdict} <code>{_text(report.target)}</code> {_text(codes)}</li>"
    yield "</ul>"


def _section(report: Report) -> Iterator[str]:
    yield "<section>"
    yield f'<h2><span class="badge {report.verdict}">{report.verdict}</span> <code>{_text(report.target)}</code></h2>'
    yield f'<p class="lead">{_text(_sentence(headline(report)))}</p>'
    yield f'<p class="faint">declared {_text(report.expect)} · {_text(" · ".join(settings(report)))}</p>'
    if report.error:
        first, _, rest = report.error.partition("\n")
        yield f'<p class="error">{_text(first)}</p>'
        if rest.strip():
            yield f"<pre>{_text(rest)}</pre>"
    if report.traceback:
        yield f"<pre>{_text(report.traceback)}</pre>"
    for check in (*report.failed, *report.stale):
        yield from _check(check)
    if report.smallest is not None:
        yield from _worked(report.smallest, "The smallest world in which it fails")
    elif report.example is not None:
        yield from _worked(report.example, "What it follows in a small world")
    if report.gradients:
        yield from _table(report)
    yield from _notes(report)
    yield "</section>"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _check(check: CheckResult) -> Iterator[str]:
    style = "warning" if is_warning(check) else "refuted"
    words, code = remedy(check)
    yield f'<h3 class="{style}">{_text(check.code)} {_text(check.name)}</h3><p>{_text(check.message)}</p>'
    if words:
        yield f"<p><strong>Fix:</strong> {_text(words)}</p>"
    if code:
        yield f"<pre>{_text(code)}</pre>"


def _worked(example: CounterExample, title: str) -> Iterator[str]:
    yield f"<h3>{title}</h3>"
    yield f'<p class="faint">{_text(_sentence(example.setting))}</p>'
    keys = "".join(f'<span class="legend"><span class="key {kind}"></span>{words}</span>' for kind, words in KEYS)
    one = "batch" if example.batch > 1 else "rollout"
    spread = f"The thin line is ± one standard deviation from {one} to {one}."
    yield '<div class="pictures">'
    yield f"<figure><figcaption>{TREE}</figcaption>{tree(example)}</figure>"
    yield f"<figure><figcaption>{keys}<br>{DERIVATIVES} {spread}</figcaption>{bars(example)}</figure>"
    yield "</div>"
    yield from _numbers(example)
    if example.code:
        yield "<details open><summary>The same without kltest: prints both gradients, a row a prefix</summary>"
        yield f"<pre>{_text(example.code)}</pre></details>"
    elif example.note:
        yield f'<p class="faint">{_text(_sentence(example.note))}</p>'


def _numbers(example: CounterExample) -> Iterator[str]:
    """The table that a person can work through with a pencil."""
    head, *found = example.table()
    values = [pair for place in example.contexts for pair in zip(place.truth, place.found, strict=True)]
    heads = "".join(f"<th{_kind(column > 1)}>{_text(cell)}</th>" for column, cell in enumerate(head))
    opened = " open" if len(found) <= FEW_ROWS else ""
    yield f"<details{opened}><summary>The numbers, to be redone with pencil and paper</summary>"
    yield f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>'
    for row, (truth, expected) in zip(found, values, strict=True):
        cells = "".join(f"<td{_kind(column > 1)}>{_text(cell)}</td>" for column, cell in enumerate(row))
        differs = ' class="differs"' if differ(truth, expected) else ""
        yield f"<tr{differs}>{cells}</tr>"
    yield "</tbody></table></div></details>"


def _table(report: Report) -> Iterator[str]:
    heads = "".join(f"<th{_kind(column in NUMERIC)}>{column}</th>" for column in COLUMNS)
    yield "<h3>In every world that was graded</h3>"
    yield f'<div class="table"><table><thead><tr>{heads}<th>verdict</th></tr></thead><tbody>'
    for row in rows(report):
        pairs = zip(COLUMNS, row.cells, strict=True)
        cells = "".join(f"<td{_kind(column in NUMERIC)}>{_text(cell)}</td>" for column, cell in pairs)
        style, word = ("warning", f"excused: {', '.join(row.excused)}") if row.excused else AGREES[row.agrees]
        note = f'<div class="note faint">{_text(row.note)}</div>' if row.note else ""
        yield f'<tr>{cells}<td><span class="{style}">{_text(word)}</span>{note}</td></tr>'
    yield "</tbody></table></div>"


def _kind(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _notes(report: Report) -> Iterator[str]:
    passed = [check.code for check in report.checks if check.status == "pass" and not check.stale]
    notes = [f"Expected failure: {line}" for line in excuses(report)]
    notes += [f"Logged value: {line}" for line in value_rows(report)]
    notes += [one_line(note) for note in report.notes]
    notes += [f"Passed: {', '.join(passed)}"] if passed else []
    notes += [f"Skipped {', '.join(codes)}: {why}" for why, codes in skipped(report).items()]
    if notes:
        items = "".join(f"<li>{_text(note)}</li>" for note in notes)
        yield f'<ul class="faint">{items}</ul>'


def _text(text: str) -> str:
    return html.escape(visible(text, keep="\n"))
