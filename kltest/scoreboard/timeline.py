"""The page and the figure of past releases: a time line for each default of a library, a colour for each class."""

from collections.abc import Sequence
from datetime import date
from typing import Any

from kltest.adapters import NAMES, before, find
from kltest.scoreboard import recorded
from kltest.scoreboard.classes import CLASSES, class_of
from kltest.scoreboard.history import DEAD_ZONE, PATH, changed, followed, lines
from kltest.scoreboard.rows import BoardRow, summary
from kltest.scoreboard.templating import template

# Blues follow ∇KL(π‖ref), at least its next-token part; they are apart from the others in lightness too.
COLOURS = {
    **{"whole": "#08306b", "on-policy": "#2171b5", "scaled": "#4292c6", "part": "#9ecae1", "other": "#e6550d"},
    **{"none": "#636363", "length": "#dd3497", "mixed": "#756bb1", "another": "#8c510a"},
    **{"unnamed": "#bdbdbd", "open": "#f0f0f0"},
}
# Pixels of the figure, of the names on its left, of its right margin, and of the text of a version.
WIDTH, LEFT, RIGHT, APART = 860, 180, 40, 42


def files(rows: Sequence[BoardRow] | None = None) -> dict[str, str]:
    """Return the page `history.md` and its figure `history.svg` by name; rows: those that are recorded."""
    rows = recorded.read(PATH) if rows is None else rows
    order = sorted(lines(rows).items(), key=lambda each: (NAMES.index(each[0][0]), each[0]))
    shown = {name: line for name, line in order if is_default(*name)}
    return {"history.md": _page(rows), "history.svg": figure(shown)}


def is_default(library: str, name: str) -> bool:
    """True for what happens if nothing but the KL term is set, as the history or else the settings say."""
    known = find(library)
    families = {each.name.partition("/")[0] for each in known.history if each.default}
    setting = next((each for each in (*known.history, *known.settings) if each.name == name), None)
    own = setting in known.history
    return bool(setting and setting.default and (own or name.partition("/")[0] not in families))


def _page(rows: Sequence[BoardRow]) -> str:
    moved = [(after, earlier, _followed(earlier, after), _followed(after, earlier)) for earlier, after in changed(rows)]
    moved.sort(key=lambda each: each[0].get("released", ""), reverse=True)
    # Versions as keys: in order, each once.
    measured: dict[str, dict[str, None]] = {}
    for row in reversed(rows):
        measured.setdefault(row["library"], {})[row["version"]] = None
    return template("history.md.j2").render(changes=moved, measured=measured, reason=_reason)


def _followed(row: BoardRow, other: BoardRow) -> str:
    """The class of a row and its dead zone, or, if the other's are the same, the gradients that differ."""
    zones = [any(each["code"] == DEAD_ZONE for each in one["failed"]) for one in (row, other)]
    if (class_of(row), zones[0]) != (class_of(other), zones[1]):
        return CLASSES[class_of(row)].words + (f", and a dead zone ({DEAD_ZONE})" if zones[0] else "")
    mine, yours = followed(row), followed(other)
    differs = {key.partition(",")[0] for key in mine if mine[key] != yours.get(key)}
    return summary({**row, "gradients": [each for each in row["gradients"] if each["environment"] in differs]})


def _reason(earlier: BoardRow, after: BoardRow) -> tuple[str, str]:
    """Notes on a release after the earlier one, up to the later one, and its link."""
    noted = find(after["library"]).changed.items()
    old, new = earlier["version"], after["version"]
    later = (words for version, words in noted if before(old, version) and not before(new, version))
    return next(later, ("", ""))


def figure(shown: dict[tuple[str, str], list[BoardRow]]) -> str:
    """Return the figure as SVG: a bar for each setting, from release to release in the colour of its class."""
    released = [date.fromisoformat(row["released"]) for line in shown.values() for row in line]
    first, newest = min(released).replace(day=1), max(released)

    def at(day: date) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (day - first).days / max((newest - first).days, 1)

    bars: dict[str, list[dict[str, Any]]] = {}
    for (library, setting), line in shown.items():
        starts, labelled = [at(date.fromisoformat(row["released"])) for row in line], float("-inf")
        parts = bars.setdefault(f"{library} {setting}", [])
        for row, last, start, end in zip(line, [None, *line[:-1]], starts, [*starts[1:], WIDTH - RIGHT], strict=True):
            turned = last is not None and followed(row) != followed(last)
            label = row["version"] if (turned or last is None) and start - labelled >= APART else ""
            labelled = start if label else labelled
            kind = class_of(row)
            words = f"{library} {row['version']}: {CLASSES[kind].words}; {summary(row)}"
            fields = {"x": start, "width": max(end - start, 3), "colour": COLOURS[kind]}
            parts.append({**fields, "label": label, "turned": turned, "words": words})
    months = [date(year, month, 1) for year in range(first.year, newest.year + 1) for month in (1, 7)]
    there = {class_of(row) for line in shown.values() for row in line}
    return template("history.svg.j2").render(
        width=WIDTH,
        left=LEFT,
        bars=bars,
        ticks=[(at(each), f"{each:%b %Y}") for each in months if first <= each <= newest],
        legend=[(COLOURS[kind], CLASSES[kind].words) for kind in CLASSES if kind in there],
    )
