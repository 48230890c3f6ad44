"""Words for findings, the same in all formats that people read."""

import math
import textwrap
from collections.abc import Sequence

from kltest.report import CheckResult, GradientRow, Report
from kltest.truth import render

COLUMNS = ("environment", "sampler", "expected gradient", "relative bias", "cosine", "relative variance")
# Seconds from which a grading says where its time went.
SLOW = 60
NUMERIC = frozenset(COLUMNS[3:])
SAMPLED = {True: "the declared one, within the margin", False: "another one, unnamed", None: "samples leave it open"}
"""Words for a gradient that samples do not name, by whether it agrees with the declared one."""
VALUES = {
    "kl": "KL(π‖ref)",
    "kl_per_token": "KL(π‖ref) per token",
    "mean_of_token_means": "the mean over rollouts of the mean log-ratio per token",
    None: "none of the KL values",
}


def visible(text: str, *, keep: str = "\n") -> str:
    """Return the text with every character that a terminal, XML or a page could misread written out (`\\x1b`)."""
    return "".join(c if c in keep or _harmless(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _harmless(character: str) -> bool:
    """False for controls, lone surrogates, non-characters and characters that reorder the text around them."""
    if character.isascii():
        return character.isprintable()
    point = ord(character)
    reordering = 0x202A <= point <= 0x202E or 0x2066 <= point <= 0x2069
    not_text = 0x80 <= point <= 0x9F or 0xD800 <= point <= 0xDFFF or point & 0xFFFE == 0xFFFE
    return not (reordering or not_text or point in (0x2028, 0x2029))


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


def gradient(identified: dict[str, float] | None, residual: float = math.nan) -> str:
    """Return a combination of named gradients as a formula."""
    if identified is None:
        return "no named gradient" + ("" if math.isnan(residual) else f" (best fit misses {residual:.2g})")
    return render(identified)


def cells_of(row: GradientRow) -> tuple[str, ...]:
    """Return a gradient row as text, with the columns of COLUMNS."""
    found = gradient(row.identified, row.residual)
    if row.method == "sampled" and row.identified is None:
        found = SAMPLED[row.agrees]
    return (
        row.environment,
        row.sampler,
        found if row.batch == 1 else f"{found}  [batches of {row.batch} of {row.rollouts} rollouts]",
        number(row.relative_bias),
        cosine(row.cosine),
        number(row.relative_variance),
    )


def note_of(row: GradientRow) -> str:
    """Return the note of a gradient row and, unless it was enumerated, the method."""
    parts = [one_line(row.note)] if row.note else []
    if row.method != "exact":
        parts.append(f"{row.method}, {row.rollouts} rollouts")
    return "; ".join(parts)


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def reach(report: Report) -> str:
    """Return how far the gradient was compared with the declared one; empty if it was not."""
    if report.reach is None:
        return ""
    found = report.reach
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


def passed(report: Report) -> list[str]:
    """Return the codes of the checks that passed as they should."""
    return [check.code for check in report.checks if check.status == "pass" and not check.passed_unexpectedly]


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


def skipped(report: Report) -> dict[str, list[str]]:
    """Return the codes of skipped and inconclusive checks by their reason, in order."""
    reasons: dict[str, list[str]] = {}
    for check in report.checks:
        if check.status in ("skip", "inconclusive"):
            prefix = "inconclusive: " if check.status == "inconclusive" else ""
            reasons.setdefault(prefix + (one_line(check.message) or "no reason given"), []).append(check.code)
    return reasons


def value_rows(report: Report) -> list[str]:
    """Return what the logged value estimates, a line for each answer; none if the loss logs no value.

    It ends with the largest bias if the value matches no KL, else with the largest standard deviation.
    """
    lines = []
    for matches in dict.fromkeys(row.matches for row in report.value):
        group = [row for row in report.value if row.matches == matches]
        environments: dict[str, list[str]] = {}
        for row in group:
            environments.setdefault(row.sampler, []).append(row.environment)
        places = "; ".join(f"{', '.join(names)}: {sampler}" for sampler, names in environments.items())
        key = "bias" if matches is None else "std"
        known = [value for row in group if (value := getattr(row, f"relative_{key}")) is not None]
        spread = f"; relative {key} up to {number(max(known))}" if known else ""
        lines.append(f"{VALUES.get(matches, matches)} ({places}{spread})")
    return lines
