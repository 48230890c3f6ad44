"""From findings to checks and a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kltest.checks import CHECKS, Check, Found
from kltest.errors import KltestError, UsageError
from kltest.grading.expected_failures import Excuses
from kltest.identify.findings import Findings, Row, proportion
from kltest.report import CheckResult, Verdict
from kltest.truth import render

# A factor, or a gradient that is zero, is not reported once more where one of these accounts for it by its cause.
CAUSES = {
    "KL101": ("KL510",),
    "KL106": ("KL203", "KL204", "KL402", "KL403", "KL510"),
    "KL509": ("KL510",),
}
LEFTOVER = "KL105"


def selected_codes(select: Iterable[str], ignore: Iterable[str]) -> list[str]:
    """The codes that are asked for by codes or prefixes; UsageError for one that is the beginning of no code."""
    select, ignore = list(select), list(ignore)
    for prefix in (*select, *ignore):
        if not prefix or not any(code.startswith(prefix.upper()) for code in CHECKS):
            raise UsageError(f"there is no check whose code begins with {prefix!r}; the codes are {', '.join(CHECKS)}")
    kept = [code for code in CHECKS if not select or any(code.startswith(prefix.upper()) for prefix in select)]
    return [code for code in kept if not any(code.startswith(prefix.upper()) for prefix in ignore)]


NO_EXCUSES = Excuses()
# What these look at shows in a single call, or is asked only of what was enumerated; every other experiment compares
# calls, and a loss that does not repeat itself differs between any two.
IN_ONE_CALL = frozenset({"KL105", "KL505", "KL506", "KL507"})


def run_checks(findings: Findings, codes: Iterable[str], excuses: Excuses = NO_EXCUSES) -> list[CheckResult]:
    """The result of each check: which of the disagreeing rows it accounts for; excused rows are marked as such."""
    explained = {code: _explained(check, findings) for code, check in CHECKS.items()}
    for code, causes in CAUSES.items():
        caused = [row for cause in causes for row in explained[cause]]
        explained[code] = [row for row in explained[code] if row not in caused]
    named = [row for rows in explained.values() for row in rows]
    explained[LEFTOVER] += [row for row in findings.rows if row.wrong and row not in named]
    results = [excuses.result(_result(CHECKS[code], explained[code], findings)) for code in codes]
    findings.rows = [excuses.row(row, explained) for row in findings.rows]
    findings.notes += excuses.notes(results, explained)
    return results


def verdict(findings: Findings, results: Iterable[CheckResult], *, error: str = "") -> Verdict:
    """Error over refuted over inconclusive over confirmed.

    One disagreeing row or one failed check refutes, unless it is excused; so does a stale excuse.
    """
    if error:
        return "error"
    if any(result.refutes for result in results) or any(row.refutes for row in findings.rows):
        return "refuted"
    if not findings.rows or any(row.agrees is None for row in findings.rows):
        return "inconclusive"
    return "confirmed"


def _explained(check: Check, findings: Findings) -> list[Row]:
    if check.moot(findings):
        return []
    return [row for row in findings.rows if (row.wrong or findings.blocked) and _explains(check, row, findings)]


def _explains(check: Check, row: Row, findings: Findings) -> bool:
    """An experiment that cannot be made explains nothing; `examine` says that it could not."""
    try:
        return check.explains(row, findings)
    except KltestError:
        return False


def _tells(check: Check, row: Row, findings: Findings) -> str:
    with suppress(KltestError):
        return check.tells(row, findings) or _words(row)
    return _words(row)


def _result(check: Check, rows: list[Row], findings: Findings) -> CheckResult:
    if rows:
        words = "; ".join(f"{row.where}: {_tells(check, row, findings)}" for row in rows)
        return CheckResult(check.code, check.name, "fail", f"{check.title}. Found {words}. {check.why}", check.remedy)
    if reason := check.moot(findings):
        return CheckResult(check.code, check.name, "skip", reason)
    found = _examined(check, findings)
    if found is None:
        return CheckResult(check.code, check.name, "pass")
    if found.status != "fail":
        return CheckResult(check.code, check.name, found.status, found.message)
    return CheckResult(check.code, check.name, "fail", f"{check.title}. {found.message} {check.why}", check.remedy)


def _examined(check: Check, findings: Findings) -> Found | None:
    if findings.observed.nondeterministic and check.code not in IN_ONE_CALL and check.experiments:
        return Found("the loss gives different results for the same batch (KL507)", "inconclusive")
    try:
        return check.examine(findings)
    except KltestError as error:
        return Found(f"the experiment could not be made: {error}", "inconclusive")


def _words(row: Row) -> str:
    if row.identified is None and row.method == "sampled":
        return f"a gradient that samples leave without a name, off by about {row.relative_bias:.2g} of the declared one"
    if row.identified is None:
        return f"no named gradient (the best fit leaves {row.residual:.2g} of it)"
    factor = proportion(row.identified, row.expected)
    nearly = factor is not None and abs(factor - 1) < 1e-3
    return render(row.identified) + (f" (off by {row.relative_bias:.2g} of it)" if nearly else "")
