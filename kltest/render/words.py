"""Words for findings, the same in all formats that people read."""

import math
import textwrap
from collections.abc import Sequence

from kltest.errors import UsageError
from kltest.report import CheckResult, GradientRow, Report
from kltest.truth import parse, render

COLUMNS = ("environment", "sampler", "expected gradient", "relative bias", "cosine", "relative variance")
NUMERIC = frozenset(COLUMNS[3:])
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


def declared(report: Report) -> str:
    """Return the declared gradient as a formula, or as it was written if it cannot be read."""
    try:
        return render(parse(report.expect))
    except UsageError:
        return one_line(report.expect)


def cells_of(row: GradientRow) -> tuple[str, ...]:
    """Return a gradient row as text, with the columns of COLUMNS."""
    undecided = row.method == "sampled" and row.identified is None
    found = "samples leave it open" if undecided else gradient(row.identified, row.residual)
    return (
        row.environment,
        row.sampler,
        found if row.batch == 1 else f"{found}  [batches of {row.batch}]",
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


def headline(report: Report) -> str:
    """Return the verdict as one sentence."""
    target = declared(report) if report.verdict != "error" else ""
    excused = dict.fromkeys(code for row in report.gradients for code in row.excused)
    scales = {row.scale for row in report.gradients} - {None, 1.0}
    found = f"{target} times {number(scales.pop())}, which agrees up to scale" if scales else target
    if excused:
        found = f"{followed(report)}, not {target}: {' and '.join(excused)} failed as expected"
    return {
        "confirmed": f"the expected gradient is {found}",
        "refuted": _refutation(report, found, target),
        "inconclusive": f"could not be compared with {target}",
        "error": "could not be graded",
    }[report.verdict]


def followed(report: Report) -> str:
    """Return the gradients that were found, with their environments if there are several."""
    places: dict[str, list[str]] = {}
    for row in report.gradients:
        places.setdefault(gradient(row.identified), []).append(row.environment)
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{name} ({', '.join(dict.fromkeys(where))})" for name, where in places.items())


def _refutation(report: Report, found: str, target: str) -> str:
    """Name what refutes: the gradient, else failed checks, else checks that passed though expected to fail."""
    failed = [check.code for check in report.errors]
    passed = [check.code for check in report.unexpected_passes]
    agrees = bool(report.gradients) and all(row.agrees is not None and not row.refutes for row in report.gradients)
    if not agrees or not (failed or passed):
        return f"the loss does not follow {target} as declared"
    if failed:
        return f"the expected gradient is {found}, but {_listed(failed)} failed"
    return f"the expected gradient is {found}, but {_listed(passed)}, expected to fail, passed"


def _listed(codes: Sequence[str]) -> str:
    return " and ".join([", ".join(codes[:-1]), codes[-1]] if len(codes) > 1 else codes)


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

    Behind it stands the largest bias if the value is none of the KLs, else the largest standard deviation.
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
