"""Results of the checks, expected failures among them, and the verdict that follows."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kltest.checks import CHECKS, Check, Found
from kltest.errors import KltestError
from kltest.estimators.spec import Spec
from kltest.grading.options import Options
from kltest.identify.findings import Findings, Row, proportion
from kltest.report import CheckResult, Status, Verdict
from kltest.truth import plain, render

# A check on the left is not reported for rows that one on the right accounts for: the right one names the cause.
CAUSES = {
    "KL101": ("KL510",),
    "KL106": ("KL203", "KL204", "KL207", "KL402", "KL403", "KL510"),
    "KL509": ("KL510",),
    "KL901": ("KL902", "KL903", "KL904", "KL905", "KL906"),
    "KL903": ("KL904", "KL905", "KL906"),
}
LEFTOVER = {"kl": "KL105", "policy": "KL901", "all": "KL901"}
POLICY = "KL9"
# These read the row alone: they account for rows of the loss without its optional fields as well.
OF_THE_ROW = ("KL101", "KL102", "KL103", "KL201", "KL202")
# These need a single call. Every other experiment compares calls, which differ anyway if a loss does not repeat itself.
IN_ONE_CALL = frozenset({"KL505", "KL506", "KL507"})
# A loss that draws random numbers is given the same ones in each call of an experiment. That is no expectation, and
# another shape or precision draws others: these take the mean over many draws, or cannot be made.
ON_AVERAGE = frozenset(f"KL{number}" for number in (105, 203, 204, 205, 206, 207, 208, 306, 404, 504, 701, 703))
# These look beyond the graded environments: at far policies and samplers, long rollouts, large batches, padding, gaps.
FURTHER = frozenset(f"KL{number}" for number in (105, 203, 204, 205, 206, 207, 208, 306, 501, 504))
# They exchange or add padding, which there is none of without a mask.
OF_PADDING = frozenset(("KL207", "KL501"))
# The nearer to a refutation, the later.
STATUSES: tuple[Status, ...] = ("skip", "pass", "inconclusive", "fail")
OF_THE_NOISE = frozenset(("KL801", "KL802"))


@dataclass(frozen=True)
class ExpectedFailures:
    """Reasons by code of the checks that are known to fail.

    A maintainer who follows a token-level gradient on purpose says so once, and continuous integration still sees every
    other change. What an expected failure accounts for does not refute. If its check passes, the pass refutes unless
    that is allowed: the entry would hide the next failure.
    """

    reasons: Mapping[str, str] = field(default_factory=dict)
    allow_passes: bool = False

    def result(self, result: CheckResult) -> CheckResult:
        """Return a check's result with the reason of an expected failure, or of a pass that was not expected."""
        reason = self.reasons.get(result.code, "")
        if reason and result.status == "fail":
            return replace(result, excused=reason)
        if reason and result.status == "pass" and not self.allow_passes:
            return replace(result, excused=reason, message=self._passes(result.code))
        return result

    def row(self, row: Row, explained: Mapping[str, Sequence[Row]]) -> Row:
        """Return a disagreeing row with the codes that account for it, if all of these are expected to fail."""
        codes = [code for code, rows in explained.items() if row in rows]
        if not (row.wrong and codes and all(code in self.reasons for code in codes)):
            return row
        return replace(row, excused=tuple(codes))

    def notes(self, results: Iterable[CheckResult], explained: Mapping[str, Sequence[Row]]) -> list[str]:
        """Return a note for each expected failure that changes nothing."""
        status = {result.code: result.status for result in results}
        found = []
        for code in self.reasons:
            if status.get(code) == "pass" and self.allow_passes:
                found.append(self._passes(code))
            elif code not in status and not explained.get(code):
                found.append(f"{code} is expected to fail, but was not selected.")
            elif status.get(code) in ("skip", "inconclusive"):
                found.append(f"{code} is expected to fail, but the check could not be made here.")
        return found

    def _passes(self, code: str) -> str:
        return (
            f"{code} is expected to fail ({self.reasons[code]}), but it passes: remove it from the expected failures, "
            "so that it does not hide the next failure."
        )


def selected_codes(select: Collection[str], ignore: Collection[str], part: str = "kl") -> list[str]:
    """Return the codes of a part's checks that begin with a prefix of `select` (if any is given), none of `ignore`."""
    return [
        code
        for code in _of(part)
        if (not select or code.startswith(tuple(select))) and not code.startswith(tuple(ignore))
    ]


def run_checks(findings: Findings, codes: Sequence[str], options: Options) -> Iterator[CheckResult]:
    """Mark the rows whose checks are all expected to fail, and yield the result of each check.

    A check fails if it accounts for a disagreeing row, or if its own experiment finds something.
    """
    expected = ExpectedFailures(options.expected_failures, options.allow_unexpected_passes)
    leftover = LEFTOVER[options.part]
    deciding = _deciding(codes, expected, options.part)
    explained = {code: _explained(CHECKS[code], findings) for code in deciding}
    for code in OF_THE_ROW:
        if code in explained and not CHECKS[code].moot(findings):
            explained[code] += [row for row in findings.others if row.wrong and _explains(CHECKS[code], row, findings)]
    for code, causes in CAUSES.items():
        if code in explained:
            caused = [row for cause in causes for row in explained[cause]]
            explained[code] = [row for row in explained[code] if row not in caused]
    if leftover in explained:
        named = [row for rows in explained.values() for row in rows]
        every = [*findings.rows, *findings.others]
        explained[leftover] += [row for row in every if row.wrong and row not in named]
    findings.rows, findings.others = (
        [expected.row(row, explained) for row in rows] for rows in (findings.rows, findings.others)
    )
    results = []
    for code in codes:
        results.append(expected.result(_result(CHECKS[code], explained[code], findings, options)))
        yield results[-1]
    findings.notes += expected.notes(results, explained)


def _of(part: str) -> list[str]:
    return [code for code in CHECKS if code.startswith(POLICY) == (part != "kl")]


def _deciding(codes: Collection[str], expected: ExpectedFailures, part: str) -> list[str]:
    """Return the checks whose rows decide the results; an explanation may take experiments, and some take seconds."""
    if LEFTOVER[part] in codes or expected.reasons:
        return _of(part)
    causes = {cause for code in codes for cause in CAUSES.get(code, ())}
    return [code for code in _of(part) if code in codes or code in causes]


def look_further(findings: Findings, codes: Sequence[str]) -> Iterator[tuple[str, Found]]:
    """Yield the errors that experiments find beyond the graded environments, and what they leave open, by codes."""
    for code in codes:
        if code in FURTHER and not CHECKS[code].moot(findings):
            found = _examined(CHECKS[code], findings)
            if found and found.status in ("fail", "inconclusive") and found.level != "warning":
                yield code, found


def verdict(findings: Findings, results: Iterable[CheckResult], *, error: str = "") -> Verdict:
    """Return the first of error, refuted, inconclusive and confirmed that applies.

    A disagreeing row or a failed check of level error refutes, unless it is expected; so does a check that passes
    unexpectedly. A row or a check of level error that is inconclusive makes the verdict so; warnings never do.
    """
    results = list(results)
    if error:
        return "error"
    if any(result.refutes for result in results) or any(row.refutes for row in (*findings.rows, *findings.others)):
        return "refuted"
    if not findings.rows or any(row.agrees is None for row in (*findings.rows, *findings.others)):
        return "inconclusive"
    if any(result.status == "inconclusive" and not result.warns for result in results):
        return "inconclusive"
    return "confirmed"


def as_specified(findings: Findings, spec: Spec) -> Iterator[str]:
    """Yield a sentence that says whether a registered estimator follows what its SPEC names, if that names anything."""
    compared, other = 0, []
    batched = {(row.environment, row.sampler) for row in findings.rows if row.batch > 1}
    for row in findings.rows:
        wanted = spec.expectation(row.environment, row.sampler)
        # If rows are coupled, the SPEC speaks of the larger batches.
        alone = row.batch == 1 and (row.environment, row.sampler) in batched
        if wanted is None or row.method == "sampled" or alone:
            continue
        factor = proportion(row.identified, row.case.spelt(dict(wanted)))
        compared += 1
        if (factor is None and row.identified != dict(wanted)) or (factor is not None and abs(factor - 1) > 1e-3):
            other.append(f"{plain(wanted)} in {row.where}")
    if compared:
        wrong = f"It does not follow what its SPEC names: {', '.join(other)}."
        yield wrong if other else "It follows what its SPEC names."


def _explained(check: Check, findings: Findings) -> list[Row]:
    if check.moot(findings):
        return []
    return [
        row for row in findings.rows if (row.wrong or findings.observed.blocked) and _explains(check, row, findings)
    ]


def _explains(check: Check, row: Row, findings: Findings) -> bool:
    """True if the check accounts for the row; an experiment that cannot be made accounts for nothing."""
    try:
        return check.explains(row, findings)
    except KltestError:
        return False


def _result(check: Check, rows: list[Row], findings: Findings, options: Options) -> CheckResult:
    found = _found(check, rows, findings)
    level = "error" if options.strict else options.levels.get(check.code, found.level or check.level)
    fix = check.remedy(findings.observed.uses) if found.status == "fail" else ""
    return CheckResult(check.code, check.name, found.status, found.message, fix, level=level)


def _found(check: Check, rows: list[Row], findings: Findings) -> Found:
    if rows:
        words = "; ".join(f"{row.where}: {_words(check, row, findings)}" for row in rows)
        return Found(f"{check.summary(rows, findings)}. Found {words}. {check.remark(findings)}".rstrip())
    reason = check.moot(findings)
    found = Found(reason, "skip") if reason else _examined(check, findings) or Found("", "pass")
    if check.code in findings.beyond:
        status, words = findings.beyond[check.code]
        found = max(found, Found(words, status), key=_weight)
    return replace(found, message=f"{check.title}. {found.message}") if found.status == "fail" else found


def _weight(found: Found) -> int:
    """Return a number that is larger for what says more against a loss."""
    return STATUSES.index("pass" if found.level == "warning" else found.status)


def _examined(check: Check, findings: Findings) -> Found | None:
    if check.experiments and check.code not in IN_ONE_CALL:
        with suppress(KltestError):
            CHECKS["KL507"].examine(findings)
        if findings.observed.unrepeatable:
            return Found("the loss gives different results for the same batch (KL507)", "inconclusive")
    draws = findings.loss.calls.draws()
    found, observed = _made(check, findings), findings.observed
    observed.draws_far |= bool(draws.changed())
    known = observed.draws or observed.nondeterministic
    if found and _fails(found) and observed.draws_far and not known and not _fails(CHECKS["KL507"].examine(findings)):
        why = "it draws random numbers that change nothing where its gradient was measured"
        if check.code not in ON_AVERAGE:
            return Found(f"{why}; with one draw of them: {found.message}", "inconclusive", level=found.level)
        try:
            found = check.examine(findings.on_average())
        except KltestError as error:
            return Found(f"{why}, and the experiment could not be made with a mean over draws: {error}", "inconclusive")
        if not _fails(found):
            # They are what was found: from here on each call is a mean over many draws.
            observed.draws, observed.averaged_far = True, True
            observed.nondeterministic = f"{findings.loss.name}: {why}"
    return found


def _fails(found: Found | None) -> bool:
    return found is not None and found.status == "fail"


def _made(check: Check, findings: Findings) -> Found | None:
    """Return what a check finds; what cannot be made is inconclusive, since what was not looked at is not passed."""
    try:
        if findings.noisy and check.code in ON_AVERAGE:
            return check.examine(findings.on_average())
        if findings.observed.draws and check.code in OF_THE_NOISE:
            why = "it draws random numbers (KL507), and others in batches of another shape"
            return Found(why, "inconclusive", level="warning")
        return check.examine(findings)
    except KltestError as error:
        return Found(f"the experiment could not be made: {error}", "inconclusive")


def _words(check: Check, row: Row, findings: Findings) -> str:
    """Return the check's words on the row, else the gradient that the row follows."""
    with suppress(KltestError):
        if words := check.tells(row, findings):
            return words
    if row.identified is None and row.method == "sampled":
        return f"an unidentified gradient (sampled), relative distance about {row.relative_bias:.2g}"
    if row.identified is None:
        return f"no named gradient (the best fit leaves {row.residual:.2g} of it)"
    factor = proportion(row.identified, row.expected)
    nearly = factor is not None and abs(factor - 1) < 1e-3
    return render(row.identified) + (f" (off by {row.relative_bias:.2g} of it)" if nearly else "")
