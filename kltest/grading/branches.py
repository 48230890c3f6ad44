"""The other branches of a loss, which it takes without fields that have None for a default."""

from collections.abc import Iterator
from dataclasses import replace

from kltest.errors import KltestError
from kltest.grading.options import Options
from kltest.grading.verdict import OF_PADDING, look_further, selected_codes
from kltest.identify.findings import Findings, Row
from kltest.identify.graded import fields_used
from kltest.identify.instances import instances
from kltest.identify.measure import Measure
from kltest.report import Status
from kltest.rollout import SAMPLER_FIELDS


def without_optional_fields(findings: Findings, options: Options) -> Iterator[Row]:
    """Yield rows of the loss without what it can do without: each such field in place of None, then all of them.

    What the checks find further out there stands in `Findings.beyond`. A branch that fails is not judged, and it is
    noted.
    """
    names = findings.loss.optional
    if not names or any(row.agrees is not True for row in findings.rows):
        return
    for left_out in (*((name,) for name in names), *([names] if len(names) > 1 else [])):
        branch, words = _branch(findings, left_out, options), " and ".join(left_out)
        try:
            for row in _rows(findings, branch, left_out):
                branch.rows.append(replace(row, without=words))
                yield branch.rows[-1]
        except KltestError as error:
            findings.notes.append(f"Without {words} it cannot be graded: {str(error).splitlines()[0]}")
            continue
        for code, status, sentence in _further(findings, branch, left_out, options):
            if findings.beyond.get(code, ("inconclusive",))[0] == "inconclusive":
                findings.beyond[code] = status, f"Without {words}: {sentence}"
        findings.notes.append(f"It was graded without {words} as well, which has None for a default.")


def _further(
    findings: Findings, branch: Findings, left_out: tuple[str, ...], options: Options
) -> Iterator[tuple[str, Status, str]]:
    """Yield (code, status, sentence) of what a branch whose rows are right does farther out, and of rows left open."""
    undecided = [row for row in branch.rows if row.agrees is None]
    if undecided:
        yield "KL105", "inconclusive", f"{undecided[0].where} was not decided: {undecided[0].note or 'not judged'}"
    if all(row.agrees is True for row in branch.rows):
        codes = selected_codes(options.select, options.ignore)
        unmasked = OF_PADDING if _is_mask(findings, left_out) else frozenset()
        for code, found in look_further(branch, [code for code in codes if code not in unmasked]):
            yield code, found.status, found.message


def _is_mask(findings: Findings, left_out: tuple[str, ...]) -> bool:
    return any(findings.loss.fields[name] == "mask" for name in left_out)


def _branch(findings: Findings, left_out: tuple[str, ...], options: Options) -> Findings:
    """Return findings without rows of the loss without some fields; without the sampler's it is the policy."""
    loss = findings.loss.without(left_out)
    uses = fields_used(loss, options.seed)
    on_policy = any(findings.loss.fields[name] in SAMPLER_FIELDS for name in left_out)
    samplers = ("current",) if on_policy else findings.samplers
    known = findings.measure
    measure = Measure(loss, known.declared, uses, seed=options.seed, sizes=known.sizes, sampling=known.sampling)
    return Findings(findings.expect, findings.placement, findings.environments, samplers, measure)


def _rows(findings: Findings, branch: Findings, left_out: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a branch; without a mask only where no rollout is padded."""
    for environment in branch.environments:
        if _is_mask(findings, left_out) and instances(environment, branch.seed)[0].paths.padded:
            continue
        for sampler in branch.samplers:
            yield from branch.measure.rows(environment, sampler)
