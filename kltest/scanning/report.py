"""The report of a scan for people, as text and Markdown, and the table of all formats."""

import math
import shlex
import textwrap
from collections.abc import Callable, Iterable
from pathlib import PurePath

from kltest.checks import CHECKS
from kltest.files import as_json, as_markdown
from kltest.render import fixes
from kltest.render.tables import PLAIN, Terminal, paint, wrap
from kltest.render.words import one_line, visible
from kltest.scanning.annotations import github, sarif
from kltest.scanning.rows import Row, Scan, counted
from kltest.truth import parse, render

MOST = 20
"""Lines of the first screen of up to ten terms; each further term has two."""
STYLES = {"finding": "red", "passed": "green"}
RANKS = {"finding": 1, "unnamed": 2, "inconclusive": 2, "known": 3, "note": 3, "passed": 4}
"""What to look at first, after findings in losses; what was not run is last."""
HIDDEN_FIRST = ("not graded", "passed", "note", "known", "inconclusive", "unnamed")
"""What the first screen may have no room for; findings, and the reasons of what was not run, it always shows."""
TESTS = frozenset({"test", "tests", "benchmark", "benchmarks"})
"""Folders of what is not trained with."""
OTHER_WAY = "the other direction, KL(ref‖π)"
FOLLOWS = {
    "reverse_kl": "∇KL(π‖ref)",
    "local_reverse_kl": "next-token part of ∇KL(π‖ref)",
    "forward_kl": OTHER_WAY,
    "local_forward_kl": OTHER_WAY,
    "zero": "no gradient",
}
"""Words for gradients that have some; others are told by their formulas."""
NEXT = "Next: `kltest explain {code}`, `kltest scan {spot} --fix`."
BY_HAND = "Not run? Write it as a function of log-probs: `kltest grade FILE.py:FUNCTION`."


def text(scan: Scan, terminal: Terminal = PLAIN) -> str:
    """Return what terms follow, in the order of what to look at first, then what was not read, and lines that count.

    What is true of several terms is said once, with their places; what the first screen has no room for is counted,
    but no finding and no reason why something was not run.
    With `verbose` there is everything, and how each variant was graded.
    """
    tail = [f"not read: {one_line(line)}" for line in scan.left_out]
    tail += [f"note: {one_line(line)}" for line in scan.notes]
    if names := one_line(", ".join(scan.unread)):
        names = names if terminal.verbose else textwrap.shorten(names, terminal.width, placeholder=" … (--verbose)")
        tail += wrap(f"named KL and not recognised: {names}", terminal)
    hints = wrap(BY_HAND, terminal) if any(row.status == "not run" for row in scan.rows) else []
    blocks = _blocks(scan, terminal, whole=True)
    if scan.findings and not terminal.verbose:
        first = blocks[0][0][0]
        tail += wrap(NEXT.format(code=first.codes[0], spot=shlex.quote(f"{first.file}:{first.line}")), terminal)
    else:  # what was not run is what is to be done next
        tail, hints = [*tail, *hints], []
    tail += scan.summary
    most = max(MOST, 2 * len({row.spot for row in scan.rows}))
    room = math.inf if terminal.verbose else max(most - len(tail), most // 2)
    if sum(len(lines) for _, lines in blocks) + len(hints) > room:
        blocks, hints = _blocks(scan, terminal, whole=False), []
    unshown: list[Row] = []
    giving_way = [one for one in HIDDEN_FIRST for rows, _ in blocks if rows[0].status == one]
    for status in giving_way:
        if len(blocks) == 1 or sum(len(lines) for _, lines in blocks) + bool(unshown) <= room:
            break
        at = max(at for at, (rows, _) in enumerate(blocks) if rows[0].status == status)
        unshown = [*blocks.pop(at)[0], *unshown]
    more = [f"and {counted(unshown)}: --verbose"] if unshown else []
    details = [["", *_details(row, terminal)] for row in scan.rows if terminal.verbose]
    changes = [["", row.spot, *fixes.lines(row, terminal)] for row in scan.rows if row.fixes or row.advice]
    shown = [*(lines for _, lines in blocks), more, *details, *changes, hints, tail, [""]]
    return "\n".join(line for lines in shown for line in lines)


def _blocks(scan: Scan, terminal: Terminal, *, whole: bool) -> list[tuple[list[Row], list[str]]]:
    """Return rows of which the same is true with lines that say it and where, of findings also where they are used.

    Within a kind defaults come first, and those of tests last.
    If `whole`, the places have a line of their own, and those of findings their formulas.
    """
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in sorted(scan.rows, key=lambda row: (_is_of_tests(row), not row.defaults)):
        lost = row.status == "finding" and (row.place == "loss" or (row.place == "helper" and row.used))
        groups.setdefault((0 if lost else RANKS.get(row.status, 5), sentence(row)), []).append(row)
    blocks = []
    for (rank, said), rows in sorted(groups.items(), key=lambda each: each[0][0]):
        formulas = whole and rank < 2
        found: dict[str, str] = {}
        for row in rows:
            place = f"{row.spot} {row.title}: {row.formula}" if formulas else f"{row.spot} {row.function}"
            more = [f" [{row.variant}]"] if row.variant and not formulas else []
            others = f", and {len(row.uses) - 1} more" if len(row.uses) > 1 else ""
            uses = [f" ({use}{others})" for use in row.uses[:1] if rank < 2]
            found[place] = "".join([found.get(place, ""), *more, *uses])
        places = [f"{place}{more}" for place, more in found.items()]
        words = said if whole else f"{said} – {'; '.join(places)}"
        style = STYLES.get(rows[0].status, "")
        lines = [paint(line, style, terminal) for line in wrap(one_line(words), terminal, indent="    ", first="")]
        blocks.append((rows, [*lines, *_indented((places if formulas else ["; ".join(places)]) * whole, terminal)]))
    return blocks


def _is_of_tests(row: Row) -> bool:
    """Return True for a row of tests and benchmarks, which stand behind those of what is trained with."""
    *folders, name = PurePath(row.file).parts
    return name.startswith(("test_", "benchmark_")) or not TESTS.isdisjoint(folders)


def _indented(texts: Iterable[str], terminal: Terminal) -> list[str]:
    return [line for each in texts for line in wrap(one_line(each), terminal, indent="    ", first="  ")]


def sentence(row: Row) -> str:
    """Return what a variant follows on-policy and what is wrong with it, in words."""
    if row.why:
        return f"{row.status}: {row.why.splitlines()[0]}"
    used = {"helper": "of a helper", "logged": "that is only logged"}.get(row.place, f"in the {row.place}")
    term = f"{row.form or 'term'} {used}"
    if "current" not in row.gradients:
        return f"{term}: {row.logs or row.status}" + "".join(f" ({code})" for code in row.codes)
    follows = _direction(row)
    if row.status == "passed":
        how = ", excused" if row.found else ", as declared" if row.declared else " is fine"
        noted = ", ".join(code for code in row.noted if code not in row.ignored)
        return f"{term}{how}: {follows}" + f"; {noted} once rollouts are stale" * bool(noted)
    if row.state != "finding":
        stale = row.state == "unnamed" and not follows.startswith("no named")
        open_ = "; no named gradient with stale rollouts" * stale + "; not decided" * (row.state == "inconclusive")
        return f"{term}: {follows}{open_}"
    first = {"known": "in the baseline: ", "note": "no loss calls it: "}.get(row.status, "")
    verb = "" if follows.startswith(("no ", "against ")) else "follows "
    wrong = ", but " + "; ".join(f"{code}: {CHECKS[code].title}" for code in row.codes)
    wrong = f" ({', '.join(row.codes)})" if row.codes[0].startswith("KL1") else wrong
    return f"{first}{term}: {verb}{follows}{f', not {row.declared} as declared' * bool(row.declared)}{wrong}"


def _direction(row: Row) -> str:
    """Return what is followed on-policy in words; of an unnamed gradient its least cosines with named ones."""
    followed = row.gradients["current"].partition(" (")[0]
    if followed == "unnamed":
        best = max(row.directions, key=lambda name: row.directions[name], default="reverse_kl")
        cosine = row.directions.get("reverse_kl", 0.0)
        near = f", {row.directions[best]:.2f} with {FOLLOWS[best]}" if best != "reverse_kl" else ""
        how = (
            f"against ∇KL(π‖ref), cosine down to {cosine:.2f}"
            if cosine < 0
            else f"cosine with ∇KL(π‖ref) at least {cosine:.2f}{near}"
        )
        return f"no named gradient; {how}" if row.directions else "no named gradient"
    combination = parse(followed)
    (name, number), *more = combination.items()
    if name.startswith("inverse_length") and number > 0 and not more:
        return f"no KL but a bonus for length, {render(combination)}"
    if more or name not in FOLLOWS:
        return render(combination)
    return f"{'against ' * (number < 0)}{f'{abs(number):.4g} × ' * (abs(number) != 1)}{FOLLOWS[name]}"


def _details(row: Row, terminal: Terminal) -> list[str]:
    """Return how a variant was graded: gradients by sampler and environment, messages, source, notes."""
    current, stale = row.follows
    said = [f"on-policy {current}, off-policy {stale or 'not graded'}; {row.remarks}", *row.uses, *row.fits]
    said += [f"{code}: {row.messages.get(code, '')}" for code in (*row.codes, *row.warnings, *row.noted)]
    source = [f"    {line}" for line in visible(row.source).split("\n") if line]
    notes = [f"    # {one_line(note)}" for note in row.notes]
    return [
        one_line(f"{row.spot}: {row.title}"),
        *_indented([f"{row.place}: {row.formula}", *said], terminal),
        *source,
        *notes,
    ]


def markdown(scan: Scan) -> str:
    """Return a Markdown table and the lines that count."""
    heads = ("where", "term", "on-policy", "off-policy", "findings")
    terms = [(f"`{row.spot}` {row.title}", f"{row.place}: `{row.formula}`") for row in scan.rows]
    found = [(*row.follows, "; ".join([row.remarks, *row.uses])) for row in scan.rows]
    cells = [
        dict(zip(heads, map(visible, (*one, *other)), strict=True)) for one, other in zip(terms, found, strict=True)
    ]
    said = [*(f"not read: {line}" for line in scan.left_out), *scan.notes]
    said += [f"named KL and not recognised: {visible(line)}" for line in scan.unread]
    counted = ["\n" * bool(cells), "; ".join(scan.summary), "\n", "\n" * bool(said)]
    return "".join([as_markdown(cells), *counted, *(f"- {line}\n" for line in said)])


FORMATS: dict[str, Callable[[Scan], str]] = {
    "text": text,
    "json": lambda scan: as_json(scan.to_dict()),
    "markdown": markdown,
    "github": github,
    "sarif": sarif,
}
