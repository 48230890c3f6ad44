"""The scoreboard as one self-contained page: sorted and filtered in the browser, whole without any script."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence

from kltest.render.html import STYLE as BASE
from kltest.scoreboard.guide import INTRODUCTION, KINDS, advice, names
from kltest.scoreboard.markdown import PROGRAMS
from kltest.scoreboard.rows import Row
from kltest.scoreboard.table import COLUMNS, Line, lines

STYLE = """
body { max-width: 90rem; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; margin: 1rem 0; }
.controls[hidden] { display: none; }
.controls input, .controls select { font: inherit; padding: .25rem .5rem; border: 1px solid var(--line);
  border-radius: .3rem; background: var(--paper); color: var(--ink); }
.board td, .board th { white-space: normal; vertical-align: top; overflow-wrap: break-word; }
.board code { overflow-wrap: anywhere; } .board th:nth-child(2) { min-width: 12rem; }
.board th button { all: unset; cursor: pointer; font-weight: 700; }
.board th button:focus-visible { outline: 2px solid var(--truth); }
.board th[aria-sort="ascending"] button::after { content: " ▲"; }
.board th[aria-sort="descending"] button::after { content: " ▼"; }
.mark { font-size: .8rem; border: 1px solid var(--line); border-radius: .3rem; padding: 0 .3rem; white-space: nowrap; }
.kind-reverse td:first-child { box-shadow: inset .3rem 0 var(--confirmed); }
.kind-part td:first-child { box-shadow: inset .3rem 0 var(--inconclusive); }
.kind-other td:first-child { box-shadow: inset .3rem 0 var(--refuted); }
.board td:first-child { padding-left: .8rem; } .board tbody[hidden] { display: none; }
.kind { display: inline-block; font-size: .8rem; }
.kind-reverse .kind { color: var(--confirmed); } .kind-part .kind { color: var(--inconclusive); }
.kind-other .kind { color: var(--refuted); }
.board tr:first-child td { border-bottom: 0; padding-bottom: 0; }
.board .more { max-width: 0; padding-top: 0; font-size: .9rem; } .board details { margin: 0; }
.board summary { color: var(--faint); }
@media (max-width: 60rem) {
  .board, .board tbody, .board tr, .board td { display: block; } .board thead { display: none; }
  .board tbody { border: 1px solid var(--line); border-radius: .4rem; margin: .75rem 0; padding: .25rem 0; }
  .board .more { max-width: none; }
  .board td { border: 0; padding: .15rem .8rem; font-size: .95rem; }
  .board td:empty { display: none; }
  .board td[data-column]::before { content: attr(data-column) ": "; color: var(--faint); }
}
""".strip()
SCRIPT = """
(function () {
  var table = document.querySelector(".board");
  var rows = Array.prototype.slice.call(table.tBodies);
  var controls = document.querySelector(".controls"), count = document.getElementById("count");
  var text = document.getElementById("text"), library = document.getElementById("library");
  var kind = document.getElementById("kind"), marked = document.getElementById("marked");
  controls.hidden = false;
  function filter() {
    var words = text.value.toLowerCase().split(/\\s+/), shown = 0;
    rows.forEach(function (row) {
      var said = row.textContent.toLowerCase();
      var fits = words.every(function (word) { return said.indexOf(word) >= 0; })
        && (!library.value || row.dataset.library === library.value)
        && (!kind.value || row.dataset.kind === kind.value)
        && (!marked.value || row.dataset.mark === marked.value);
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    count.textContent = shown + " of " + rows.length;
  }
  [text, library, kind, marked].forEach(function (control) { control.addEventListener("input", filter); });
  var heads = Array.prototype.slice.call(table.tHead.rows[0].cells);
  function said(row, place) { return row.rows[0].cells[place].textContent; }
  heads.forEach(function (head, place) {
    var button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.textContent = "";
    head.appendChild(button);
    button.addEventListener("click", function () {
      var down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort(function (one, other) {
        var order = said(one, place).localeCompare(said(other, place), "en", {numeric: true});
        return (order || one.dataset.place - other.dataset.place) * (down ? -1 : 1);
      });
      rows.forEach(function (row) { table.appendChild(row); });
    });
  });
  filter();
})();
""".strip()
SHORT = 4_000
"""Programs of up to so many characters are shown on the page itself."""
TITLE = "Which KL gradient do the libraries follow?"


def render(rows: Sequence[Row]) -> str:
    """The whole page; nothing is loaded from elsewhere and only its own script may run."""
    found = lines(rows)
    digest = base64.b64encode(hashlib.sha256(f"\n{SCRIPT}\n".encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    body = "\n".join([*_introduction(), *_guide(found), *_controls(found), *_board(found)])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>kltest: {TITLE}</title>
<style>
{BASE}
{STYLE}
</style>
</head>
<body>
<h1>{TITLE}</h1>
{body}
<script>
{SCRIPT}
</script>
</body>
</html>
"""


def _introduction() -> Iterator[str]:
    yield f"<p>{_text(INTRODUCTION)}</p>"
    yield "<dl>"
    for name, meaning in names().items():
        yield f"<dt><strong>{_text(name)}</strong></dt><dd>{_text(meaning)}</dd>"
    yield "</dl>"


def _guide(found: Sequence[Line]) -> Iterator[str]:
    yield "<h2>What to set</h2>"
    yield "<p>For the true gradient of KL(π‖ref), library by library, and what it costs.</p>"
    for each in advice(found):
        yield f"<h3>{_text(each.library)}</h3>"
        yield "<ul>"
        for line in each.defaults[:3]:
            yield f"<li>By default, <code>{_text(line.setting)}</code>: {_text(line.in_short)}</li>"
        for line in each.settings:
            yield f"<li>As it is, {line.where}: <code>{_text(line.setting)}</code></li>"
        for line in each.recipes:
            yield f"<li>Recipe, {line.where}: <code>{_text(line.setting)}</code>. {_text(line.row['note'])}</li>"
        if not (each.settings or each.recipes):
            yield "<li>No setting was found that follows it.</li>"
        yield "</ul>"


def _controls(found: Sequence[Line]) -> Iterator[str]:
    yield "<h2>The scoreboard</h2>"
    yield '<div class="controls" hidden>'
    yield '<label>Search <input id="text" type="search"></label>'
    names = {line.library: line.library for line in found}
    yield _choice("library", "Library", {"": "all", **names})
    yield _choice("kind", "Gradient", {"": "all", **KINDS})
    yield _choice("marked", "Settings", {"": "all", "default": "documented defaults", "recipe": "recipes"})
    yield '<span class="faint" id="count"></span></div>'


def _choice(name: str, label: str, options: Mapping[str, str]) -> str:
    inner = "".join(f'<option value="{_text(value)}">{_text(words)}</option>' for value, words in options.items())
    return f'<label>{label} <select id="{name}">{inner}</select></label>'


def _board(found: Sequence[Line]) -> Iterator[str]:
    yield '<table class="board">'
    heads = "".join(f'<th scope="col">{_text(column)}</th>' for column in COLUMNS)
    yield f"<thead><tr>{heads}</tr></thead>"
    for place, line in enumerate(found):
        mark = "default" if line.default else "recipe" if line.recipe else ""
        yield (
            f'<tbody class="kind-{line.kind}" data-kind="{line.kind}" data-library="{_text(line.library)}" '
            f'data-mark="{mark}" data-place="{place}"><tr>'
        )
        for column in COLUMNS:
            yield f'<td data-column="{column}">{_cell(line, column)}</td>' if line.cells[column] else "<td></td>"
        yield f'</tr><tr><td class="more" colspan="{len(COLUMNS)}">{"".join(_details(line))}</td></tr></tbody>'
    yield "</table>"


def _cell(line: Line, column: str) -> str:
    words = _text(line.cells[column])
    if column != "setting":
        return words
    mark = "default" if line.default else "recipe" if line.recipe else ""
    marked = f' <span class="mark">{mark}</span>' if mark else ""
    return f'<code>{words}</code>{marked}<br><span class="kind">{_text(KINDS[line.kind])}</span>'


def _details(line: Line) -> Iterator[str]:
    row = line.row
    yield "<details><summary>details</summary>"
    if row["error"]:
        yield f"<p>{_text(row['error'])}</p>"
    if row.get("note"):
        yield f"<p>{_text(row['note'])}</p>"
    if str(row.get("source", "")).startswith("https://"):
        yield f'<p><a href="{_text(row["source"])}" rel="noreferrer">what the library says</a></p>'
    for check in row["failed"]:
        yield f"<p><strong>{_text(check['code'])}</strong> {_text(check['message'])}</p>"
    for note in row.get("notes", ()):
        yield f'<p class="faint">{_text(note)}</p>'
    if versions := row.get("versions"):
        yield f'<p class="faint">{_text(", ".join(f"{name} {found}" for name, found in versions.items()))}</p>'
    yield f"<p>Again:</p><pre>{_text(line.command)}</pre>"
    if line.file:
        link = f'<a href="{PROGRAMS}/{_text(line.file)}">{_text(line.file)}</a>'
        shown = f"<pre>{_text(line.program)}</pre>" if len(line.program) <= SHORT else ""
        yield f"<p>The same with the library alone: {link}</p>{shown}"
    yield "</details>"


def _text(value: object) -> str:
    return html.escape(str(value))
