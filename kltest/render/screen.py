"""The first screen of a report: verdict, gradient followed and declared, errors, warnings, and how far was looked.

Formats that people read begin with these lines; the rest comes after, or with `--verbose`.
"""

import re

from kltest.names import listed
from kltest.render import words
from kltest.render.words import one_line
from kltest.report import CheckResult, GradientRow, Report
from kltest.truth import ATLAS, parse, plain, render

MOST_ERRORS, MOST_OPEN, MOST_GRADIENTS = 6, 3, 3
"""Lines of the first screen that errors and open questions take, and gradients that are named one by one."""
MOST_IN_FULL = 2
"""Errors whose finding is printed in full."""
SYMBOLS = {
    r"π": "π is the policy",
    r"ref": "ref the reference",
    r"μ": "μ the sampler",
    r"∇": "∇ the gradient with respect to the logits of π",
    r"KL\(": "KL(a‖b) = E_a[log a − log b] over whole rollouts",
    r"(KL|TV|χ²)_t\(": "KL_t that of one token's distribution after a given prefix",
    r"H\(": "H(π) = −E_π[log π] the entropy of whole rollouts",
    r"H_t\(": "H_t the entropy of one token's distribution after a given prefix",
    r"[uE]_[t>s{]|u_": "u_t = log π − log ref of a token",
    r"E_π": "E_π the mean over rollouts of π",
    r"E_μ": "E_μ that over rollouts of μ",
    r"Σ_t": "Σ_t a sum over tokens",
    r"g_": "g_t = ∇log π of a token",
    r"ρ_t": "ρ_t = π/μ of a token",
    r"ρ̄": "ρ̄ the geometric mean of a rollout's π/μ",
}
"""The symbols of a formula explained, each printed if it occurs."""


def title(report: Report) -> str:
    """Return the verdict; beside an expected failure it names what is followed, which is not what was declared."""
    if report.verdict != "confirmed" or not report.expected_failures:
        return report.verdict
    many = len(report.expected_failures) > 1
    return f"confirmed with {'expected failures' if many else 'an expected failure'}: follows {followed(report)}"


def screen(report: Report, *, brief: bool = False) -> dict[str, list[str]]:
    """Return the texts of the first screen after the verdict by their labels, in the order of reading.

    If it is `brief`, how far was looked is one line. What is followed and declared is one text if it is the same.
    """
    if not report.gradients and not report.unfinished:
        return {}
    reach = words.reach_in_short if brief else words.reach
    lines = {
        **_followed_and_declared(report),
        "expected": words.expected_failures(report),
        "errors": _at_most(MOST_ERRORS, _errors(report)),
        "warnings": [_warnings(report)],
        "open": _at_most(MOST_OPEN, _open(report)),
        "read": [report.read] if report.read else [],
        "variants": [one.words for one in report.variants],
        "filled": [words.filled(report)] if report.filled else [],
        "looked at": [reach(report)] if report.reach else [],
    }
    return {label: texts for label, texts in lines.items() if texts}


def _at_most(most: int, texts: list[str]) -> list[str]:
    return [*texts[:most], f"and {len(texts) - most} more (--verbose)"] if len(texts) > most else texts


def _called(report: Report) -> str:
    """Return how the loss was called if it was not as a plain loss."""
    if report.placement == "loss":
        return ""
    return f" · placement {report.placement}" + (f", credit {report.credit}" if report.credit else "")


def _instead(report: Report) -> str:
    """Return the option that declares what a refuted loss follows, if that has one name in every row."""
    rows = [rows[0] for rows in _by_gradient(report).values()]
    if report.verdict != "refuted" or len(rows) != 1 or not (found := rows[0].identified) or "zero" in found:
        return ""
    if render(found) == declared(report):
        return ""
    option = plain({name: float(f"{coefficient:.4g}") for name, coefficient in found.items()})
    return f" · if what it follows is meant: --expect={option.replace(' ', '')}"


def declared(report: Report) -> str:
    """Return the declared gradient as a formula."""
    return render(parse(report.expect))


def followed(report: Report) -> str:
    """Return the gradients that were found, with their environments and samplers if they are several."""
    return "; ".join(_each_followed(report))


def _each_followed(report: Report) -> list[str]:
    """Return the gradients that were found, a text each, with their places if they are several."""
    found = _by_gradient(report)
    if len(found) < 2:
        return [*found] or ["nothing that was measured"]
    others = {what: [row for other in found if other != what for row in found[other]] for what in found}
    named = [f"{what} ({words.places(rows, others[what])})" for what, rows in found.items()]
    more = [f"{len(named) - MOST_GRADIENTS} others (--verbose)"] if len(named) > MOST_GRADIENTS else []
    return [*named[:MOST_GRADIENTS], *more]


def _by_gradient(report: Report) -> dict[str, list[GradientRow]]:
    """Group the rows by what they follow; a row of one token is left out if the longer ones say more of it."""
    found: dict[str, list[GradientRow]] = {}
    for row in report.gradients:
        if not any(_says_more(other, row) for other in report.gradients):
            found.setdefault(words.gradient_of(row), []).append(row)
    return found


def _says_more(other: GradientRow, row: GradientRow) -> bool:
    """True if the other row's gradient is the same as the row's on one token, and differs from it on several."""
    if row.environment != "bandit" or other.environment == "bandit" or other.sampler != row.sampler:
        return False
    if row.identified is None or other.identified is None:
        return False
    one, several = render(row.identified), render(other.identified)
    return one != several and one == render(_on_one_token(other.identified))


def _on_one_token(combination: dict[str, float]) -> dict[str, float]:
    """Return the combination under the names that it has where every rollout is one token long."""
    found: dict[str, float] = {}
    for name, coefficient in combination.items():
        short = name.removesuffix("@sampler").removeprefix("local_").removeprefix("last_token_").removesuffix("_sum")
        short = short if short in ATLAS else name
        found[short] = found.get(short, 0.0) + coefficient
    return found


def _followed_and_declared(report: Report) -> dict[str, list[str]]:
    target, called = parse(report.expect), _called(report)
    rows = [rows[0] for rows in _by_gradient(report).values()]
    if rows and all(row.agrees and row.identified and row.scale == 1.0 for row in report.gradients):
        return {"follows": [_meant(target, ", as declared") + called]}
    texts = _each_followed(report)
    if len(rows) == 1 and rows[0].identified is not None:
        texts = [_meant(rows[0].identified)]
    more = [f"the declared gradient up to the scale {words.number(scale)}"] if (scale := _scale(report)) else []
    if apart := [row for row in report.gradients if row.agrees is False]:
        off = f"off by up to {words.number(max(row.relative_bias for row in apart))} of the declared one"
        cosines = [row.cosine for row in apart if row.cosine is not None]
        more += [off + (f", cosine {words.cosine(min(cosines))}" if cosines else "")]
    texts = ["; ".join([*texts, *more])] if len(texts) == 1 else texts + (["; ".join(more)] if more else [])
    return {"follows": texts, "declared": [_meant(target) + called + _instead(report)]}


def _scale(report: Report) -> float | None:
    """Return the multiple of the declared gradient that a loss follows, if each row agrees up to scale."""
    scales = {row.scale for row in report.gradients}
    return None if None in scales else next((scale for scale in scales if scale != 1.0), None)


def _meant(combination: dict[str, float], remark: str = "") -> str:
    """Return a combination as a formula and a remark on it, with its meaning if it is one named gradient."""
    (name, *others) = combination
    if name == "zero":
        return f"0{remark}: in expectation there is no gradient"
    return f"{render(combination)}{remark}" + ("" if others else f": {ATLAS[name].meaning}")


def _errors(report: Report) -> list[str]:
    refuted = any(row.refutes for row in report.gradients)
    in_full = not refuted and len(report.errors) <= MOST_IN_FULL
    found = [f"{check.code} {finding(check, in_full=in_full)}" for check in report.errors]
    found += [one_line(check.message) for check in report.unexpected_passes]
    unexplained = "the gradient is not the declared one; none of the selected checks says why"
    return found or [unexplained if refuted else "none"]


def finding(check: CheckResult, *, in_full: bool = False) -> str:
    """Return the first sentence of a check's finding, the pitfall without numbers; in full, the second one as well.

    Where the gradient of every row is the declared one, the pitfall alone does not say what is wrong.
    """
    sentences = one_line(check.message).split(". ")
    return ". ".join(sentences[: 1 + in_full]).removesuffix(".")


def _warnings(report: Report) -> str:
    names = [f"{check.code} {check.name}" for check in report.warnings]
    if not names:
        return "none"
    return f"{', '.join(map(one_line, names))} (refute nothing; kltest explain {report.warnings[0].code})"


def _open(report: Report) -> list[str]:
    """Return what keeps the verdict open: rows that could not be judged, and errors that could not be looked for."""
    rows = [row for row in report.gradients if row.agrees is None]
    found = [one_line(report.unfinished)] if report.unfinished else []
    found += [f"{row.environment} ({row.sampler}): {one_line(row.note) or 'not judged'}" for row in rows]
    unsure = [check for check in report.checks if check.status == "inconclusive" and not check.warns]
    reasons = words.by_reason([] if report.unfinished else unsure)
    for why, codes in reasons.items():
        which = listed(codes) if len(codes) <= 3 else f"{codes[0]} and {len(codes) - 1} other checks"
        found.append(f"{which}: {why}")
    return found


def notation_of(*reports: Report) -> str:
    """Return what the symbols on the first screens of some reports mean."""
    text = " ".join(text for report in reports for texts in screen(report).values() for text in texts)
    return ", ".join(meaning for symbol, meaning in SYMBOLS.items() if re.search(symbol, text))


def headline(report: Report) -> str:
    """Return the verdict's reason as one sentence: what is followed, what was declared, and what failed."""
    if report.verdict == "error":
        return "could not be graded"
    target, found = declared(report), followed(report)
    if report.verdict == "inconclusive":
        return f"could not be compared with {target}" + (f": {report.unfinished}" if report.unfinished else "")
    agrees = bool(report.gradients) and all(row.agrees for row in report.gradients)
    as_declared = ", the declared gradient up to scale" if _scale(report) else ", as declared"
    sentence = f"follows {found}" + (as_declared if agrees else f"; {target} was declared")
    errors = [check.code for check in report.errors]
    passes = [check.code for check in report.unexpected_passes]
    sentence += f"; {listed(errors)} failed" if errors else ""
    sentence += f"; {listed(passes)}, expected to fail, passed" if passes else ""
    expected = [check.code for check in report.expected_failures]
    return sentence + (f"; {listed(expected)} failed as expected" if expected else "")
