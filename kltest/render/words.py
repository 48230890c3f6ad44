"""How findings are put into words, once for all formats that people read."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kltest.report import CheckResult, GradientRow, Report, ValueRow

COLUMNS = ("environment", "sampler", "expected gradient", "relative bias", "cosine", "relative variance")


@dataclass(frozen=True)
class Row:
    """A gradient row as text; `agrees` is None where the row could not be judged.

    `excused` are the codes of the expected failures that account for a disagreement.
    """

    cells: tuple[str, ...]
    agrees: bool | None
    note: str
    excused: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        return self.agrees is False and not self.excused


def visible(text: str, *, keep: str = "\n") -> str:
    """The text with every character that a terminal, XML or a page could misread written out (`\\x1b`)."""
    return "".join(character if character in keep or _harmless(character) else _escape(character) for character in text)


def _harmless(character: str) -> bool:
    """Neither a control, a lone surrogate, a non-character, nor one that reorders the text around it."""
    if character.isascii():
        return character.isprintable()
    point = ord(character)
    reordering = 0x202A <= point <= 0x202E or 0x2066 <= point <= 0x2069
    not_text = 0x80 <= point <= 0x9F or 0xD800 <= point <= 0xDFFF or point & 0xFFFE == 0xFFFE
    return not (reordering or not_text or point in (0x2028, 0x2029))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    """The text on one line, runs of white space as single spaces."""
    return visible(" ".join(text.split()))


def number(value: float | None) -> str:
    """Three significant digits; a dash where there is none to give."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.3g}".replace("inf", "∞")


def cosine(value: float | None) -> str:
    """Four decimals, more where rounding would claim a perfect alignment that is none."""
    if value is None or math.isnan(value):
        return "–"
    rounded = (f"{value:.{digits}f}" for digits in range(4, 13))
    return f"{value:.4f}" if abs(value) > 1 - 1e-12 else next(text for text in rounded if abs(float(text)) != 1)


def gradient(identified: dict[str, float] | None, residual: float = math.nan) -> str:
    """A combination of named gradients in mathematical words."""
    if identified is None:
        return "no named gradient" + ("" if math.isnan(residual) else f" (best fit misses {residual:.2g})")
    from kltest.truth import render

    return render(identified)


def declared(report: Report) -> str:
    """The declared target in mathematical words, or as it was written where it means nothing."""
    from kltest.errors import UsageError
    from kltest.truth import parse, render

    try:
        return render(parse(report.expect))
    except UsageError:
        return one_line(report.expect)


def rows(report: Report) -> list[Row]:
    """The gradient rows of a report as text, columns as in COLUMNS."""
    return [Row(_cells(row), row.agrees, _note(row), tuple(row.excused)) for row in report.gradients]


def _cells(row: GradientRow) -> tuple[str, ...]:
    sampled = row.method == "sampled" and row.identified is None
    found = "samples leave it open" if sampled else gradient(row.identified, row.residual)
    return (
        row.environment,
        row.sampler,
        found if row.batch == 1 else f"{found}  [batches of {row.batch}]",
        number(row.relative_bias),
        cosine(row.cosine),
        number(row.relative_variance),
    )


def _note(row: GradientRow) -> str:
    parts = [one_line(row.note)] if row.note else []
    if row.method != "exact":
        parts.append(f"{row.method}, {row.rollouts} rollouts")
    return "; ".join(parts)


def headline(report: Report) -> str:
    """The verdict as one sentence."""
    target = declared(report) if report.verdict != "error" else ""
    excused = dict.fromkeys(code for row in report.gradients for code in row.excused)
    exception = f", apart from what {' and '.join(excused)} accounts for, as expected" if excused else ""
    return {
        "confirmed": f"the expected gradient is {target}{exception}",
        "refuted": _refutation(report, f"{target}{exception}", target),
        "inconclusive": f"could not be compared with {target}",
        "error": "could not be graded",
    }[report.verdict]


def _refutation(report: Report, found: str, target: str) -> str:
    """What refutes: the gradient, or else a check, or else an excuse that is stale."""
    failed = [check.code for check in report.failed if not check.warns]
    stale = [check.code for check in report.stale]
    judged = bool(report.gradients) and all(row.agrees is not None and not row.refutes for row in report.gradients)
    if not judged or not (failed or stale):
        return f"the loss does not follow {target} as declared"
    if failed:
        return f"the expected gradient is {found}, but {_codes(failed)} failed"
    return f"the expected gradient is {found}, but {_codes(stale)}, expected to fail, passed"


def _codes(codes: Sequence[str]) -> str:
    return " and ".join([", ".join(codes[:-1]), codes[-1]] if len(codes) > 1 else codes)


def settings(report: Report) -> list[str]:
    """How the target was called and graded, the parts that change what is found."""
    if not report.gradients:
        return [f"seed {report.seed}"]
    parts = [f"placement {report.placement}"]
    if report.credit:
        parts.append(f"credit {report.credit}")
    if report.reduction:
        parts.append(f"reduction {report.reduction}")
    if report.dtype:
        parts.append(report.dtype)
    return [*parts, f"seed {report.seed}"]


def is_warning(check: CheckResult) -> bool:
    """Whether a failure of this check only warns (the variance family)."""
    return check.warns


def remedy(check: CheckResult) -> tuple[str, str]:
    """What to change: the words on one line, and the corrected lines of code as they stand, each empty if not given."""
    words, _, code = check.fix.partition("\n\n")
    return one_line(words), visible(code.expandtabs(4)).strip("\n").rstrip()


def reason(check: CheckResult) -> str:
    """What a check found and what to do, code on lines of its own."""
    words, code = remedy(check)
    found = one_line(check.message) + (f" Fix: {words}" if words else "")
    return f"{found}\n\n{textwrap.indent(code, '    ')}" if code else found


def excuses(report: Report) -> list[str]:
    """The expected failures, a line each."""
    return [f"{check.code} {one_line(check.name)}: {one_line(check.excused)}" for check in report.excused]


def skipped(report: Report) -> dict[str, list[str]]:
    """The codes of skipped and inconclusive checks by their reason, in order."""
    reasons: dict[str, list[str]] = {}
    for check in report.checks:
        if check.status in ("skip", "inconclusive"):
            prefix = "inconclusive: " if check.status == "inconclusive" else ""
            reasons.setdefault(prefix + (one_line(check.message) or "no reason given"), []).append(check.code)
    return reasons


def value_rows(report: Report) -> list[str]:
    """What the logged value estimates, a line for each answer; empty where the loss shows no value."""
    words = {
        "kl": "KL(π‖ref)",
        "kl_per_token": "KL(π‖ref) per token",
        "mean_of_token_means": "the mean over rollouts of the mean log-ratio per token",
        None: "none of the KL values",
    }
    found: dict[str | None, list[ValueRow]] = {}
    for row in report.value:
        found.setdefault(row.matches, []).append(row)
    return [f"{words.get(matches, matches)} ({_worlds(group)}{_span(group)})" for matches, group in found.items()]


def _worlds(group: Sequence[ValueRow]) -> str:
    worlds: dict[str, list[str]] = {}
    for row in group:
        worlds.setdefault(row.sampler, []).append(row.environment)
    return "; ".join(f"{', '.join(names)}: {sampler}" for sampler, names in worlds.items())


def _span(group: Sequence[ValueRow]) -> str:
    """The worst bias where the value is none of the KLs, else how noisy it is."""
    if group[0].matches is None:
        biases = [row.relative_bias for row in group if row.relative_bias is not None]
        return f"; relative bias up to {number(max(biases))}" if biases else ""
    stds = [row.relative_std for row in group if row.relative_std is not None]
    return f"; relative std up to {number(max(stds))}" if stds else ""
