"""Words for findings, the same in all formats that people read."""

import math
import textwrap
import unicodedata
from collections.abc import Iterable

from kltest.report import CheckResult, GradientRow, Report, ValueRow, Verdict
from kltest.truth import render

COLUMNS = ("environment", "sampler", "expected gradient", "rel. bias", "cosine", "rel. variance", "verdict")
# Seconds from which a grading says where its time went.
SLOW = 60
NUMERIC = frozenset(COLUMNS[3:6])
JUDGED: dict[bool | None, tuple[str, Verdict]] = {
    True: ("agrees", "confirmed"),
    False: ("differs", "refuted"),
    None: ("open", "inconclusive"),
}
"""Words for a row by whether it agrees with the declared gradient, and the verdict that would be."""
UNNAMED = "no named gradient"
VALUES = {
    "kl": "KL(π‖ref)",
    "kl_per_token": "KL(π‖ref) per token",
    "mean_of_token_means": "the mean over rollouts of the mean log-ratio per token",
    None: "none of the KL values",
}


def visible(text: str, *, keep: str = "\n") -> str:
    """Return the text with every character that a terminal, XML or a page could misread written out (`\\x1b`).

    Those are controls, lone surrogates, non-characters, and characters that reorder the text around them.
    """

    def shown(character: str) -> str:
        harmless = character in keep or character.isprintable() or unicodedata.category(character) == "Zs"
        return character if harmless else character.encode("unicode_escape").decode("ascii")

    return "".join(map(shown, text))


def one_line(text: str) -> str:
    """Return the text on one line, runs of white space as single spaces."""
    return visible(" ".join(text.split()))


def number(value: float | None) -> str:
    """Return three significant digits, or a dash if there is no number."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.3g}".replace("inf", "∞")


def cosine(value: float | None) -> str:
    """Return four decimals, or more if rounding would show ±1 for a gradient that is not parallel."""
    if value is None or math.isnan(value):
        return "–"
    rounded = (f"{value:.{digits}f}" for digits in range(4, 13))
    return f"{value:.4f}" if abs(value) > 1 - 1e-12 else next(text for text in rounded if abs(float(text)) != 1)


def gradient_of(row: GradientRow) -> str:
    """Return what a row follows as a formula, or as far as it is known."""
    if row.identified is not None:
        return render(row.identified)
    if row.method == "sampled" and row.agrees is not False:
        return "what samples leave open" if row.agrees is None else f"{render(row.expected)}, as far as samples tell"
    return UNNAMED


def cells_of(row: GradientRow) -> tuple[str, ...]:
    """Return a gradient row as text, with the columns of COLUMNS."""
    found = gradient_of(row)
    if row.identified is None and row.method == "exact":
        found += f" (best fit misses {row.residual:.2g})"
    return (
        row.environment,
        row.sampler,
        found if row.batch == 1 else f"{found}  [batches of {row.batch} of {row.rollouts} rollouts]",
        number(row.relative_bias),
        cosine(row.cosine),
        number(row.relative_variance),
        f"expected {', '.join(row.excused)}" if row.excused else JUDGED[row.agrees][0],
    )


def colour_of(row: GradientRow) -> Verdict:
    """Return the verdict that a row would have alone, an expected failure as what is open."""
    return "inconclusive" if row.excused else JUDGED[row.agrees][1]


def note_of(row: GradientRow) -> str:
    """Return the note of a gradient row and, unless it was enumerated, the method."""
    parts = [one_line(row.note)] if row.note else []
    if row.method != "exact":
        parts.append(f"{row.method}, {row.rollouts} rollouts")
    return "; ".join(parts)


def filled(report: Report) -> str:
    """Return what the parameters got; those that are called as their field are named alone."""
    found = [name if got == name else f"{name} ({got})" for name, got in report.filled.items()]
    return ", ".join(found)


def reach_in_short(report: Report) -> str:
    """Return on one line how far the gradient was compared with the declared one; empty if it was not."""
    if (found := report.reach) is None:
        return ""
    tokens, rows = (f"{many} {what}{'s' * (many > 1)}" for many, what in ((found.tokens, "token"), (found.rows, "row")))
    sampler = f"{found.sampler:.2g} to sampler" if found.sampler else "policy as sampler"
    return f"up to {tokens}, {rows}, log-ratio {found.reference:.2g} to reference, {sampler}"


def reach(report: Report) -> str:
    """Return how far the gradient was compared with the declared one; empty if it was not."""
    if (found := report.reach) is None:
        return ""
    stale = f" and {found.sampler:.2g} to the sampler" if found.sampler else ", with the sampler equal to the policy"
    tokens = f"rollouts of up to {found.tokens} tokens" if found.tokens > 1 else "rollouts of one token"
    rows = f"batches of up to {found.rows} rows" if found.rows > 1 else "each by itself"
    chosen = f"{found.vocabulary} tokens to choose from, the likeliest with probability {found.probability:.3g}"
    gaps = "masks with and without gaps" if found.holes else "masks without gaps"
    return (
        f"{tokens}, {rows}, log-ratios of a token of up to {found.reference:.2g} to the reference{stale}, {chosen}, "
        f"{gaps}; not all at once, and nothing is claimed beyond"
    )


def settings(report: Report) -> str:
    """Return how the target was called and graded: the settings that change what is found."""
    parts = {"placement": report.placement, "credit": report.credit, "reduction": report.reduction}
    words = [f"{name} {value}" for name, value in parts.items() if value] + [report.dtype] * bool(report.dtype)
    return " · ".join([*(words if report.gradients else []), f"seed {report.seed}"])


def shown(report: Report) -> list[CheckResult]:
    """Return the checks that are shown in full: those that failed, and those that passed though expected to fail."""
    return [*report.failed, *report.unexpected_passes]


def remedy(check: CheckResult) -> tuple[str, str]:
    """Return what to change: words on one line, and corrected lines of code; either may be empty."""
    words, _, code = check.fix.partition("\n\n")
    return one_line(words), visible(code.expandtabs(4)).strip("\n").rstrip()


def reason(check: CheckResult) -> str:
    """Return what a check found and what to do, code on lines of its own."""
    words, code = remedy(check)
    found = one_line(check.message) + (f" Fix: {words}" if words else "")
    return f"{found}\n\n{textwrap.indent(code, '    ')}" if code else found


def expected_failures(report: Report) -> list[str]:
    """Return the expected failures, a line each."""
    return [f"{check.code} {one_line(check.name)}: {one_line(check.excused)}" for check in report.expected_failures]


def time_spent(seconds: float, calling: float, calls: int) -> str:
    """Return where the time of a grading went, "" if it took less than a minute."""
    if seconds < SLOW:
        return ""
    own = f"{calls} calls of the loss and their backward passes"
    return f"{seconds:.0f} s: {calling:.0f} s in {own}, {seconds - calling:.0f} s in kltest"


def by_reason(checks: Iterable[CheckResult]) -> dict[str, list[str]]:
    """Return the codes of checks by what their messages say, in order."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        reasons.setdefault(one_line(check.message), []).append(check.code)
    return reasons


def places(rows: Iterable[GradientRow | ValueRow], others: Iterable[GradientRow] = ()) -> str:
    """Return the environments of rows, with the sampler behind them unless it is the policy.

    Rows have their batch size as well if one of the `others` is of the same environment and sampler.
    """
    known = {(other.environment, other.sampler) for other in others}
    found: dict[str, list[str]] = {}
    for row in rows:
        how = [row.sampler] if row.sampler != "current" else []
        if isinstance(row, GradientRow) and (row.environment, row.sampler) in known:
            how.append(f"batches of {row.batch}")
        found.setdefault(", ".join(how), []).append(row.environment)
    parts = {how: ", ".join(dict.fromkeys(names)) for how, names in found.items()}
    return "; ".join(f"{names}: {how}" if how else names for how, names in parts.items())


def remarks(report: Report) -> list[str]:
    """Return what is said behind a report: notes on rows, logged values, notes, time, and the other checks."""
    noted: dict[str, list[GradientRow]] = {}
    for row in report.gradients:
        noted.setdefault(note_of(row), []).append(row)
    found = [f"{places(rows)}: {note}" for note, rows in noted.items() if note]
    found += [f"logged value: {line}" for line in value_rows(report)]
    found += map(one_line, report.notes)
    found += [f"time: {spent}"] if (spent := time_spent(report.seconds, report.calling, report.calls)) else []
    passed = [check.code for check in report.checks if check.status == "pass" and not check.passed_unexpectedly]
    found += [f"passed: {', '.join(passed)}"] if passed else []
    for status, word in (("skip", "skipped"), ("inconclusive", "inconclusive")):
        reasons = by_reason(check for check in report.checks if check.status == status)
        found += [f"{word}: {', '.join(codes)} ({why or 'no reason given'})" for why, codes in reasons.items()]
    return found


def value_rows(report: Report) -> list[str]:
    """Return what the logged value estimates, a line for each answer; none if the loss logs no value.

    It ends with the largest bias if the value matches no KL, else with the largest standard deviation.
    """
    lines = []
    for matches in dict.fromkeys(row.matches for row in report.value):
        group = [row for row in report.value if row.matches == matches]
        key = "bias" if matches is None else "std"
        known = [value for row in group if (value := getattr(row, f"relative_{key}")) is not None]
        spread = f"; relative {key} up to {number(max(known))}" if known else ""
        lines.append(f"{VALUES.get(matches, matches)} ({places(group)}{spread})")
    return lines
