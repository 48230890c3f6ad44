"""The other branches of a loss: without fields that have None for a default, and with numbers that have."""

from collections.abc import Iterator
from dataclasses import replace

from kltest.errors import KltestError
from kltest.grading.options import Options
from kltest.grading.verdict import OF_PADDING, look_further, selected_codes
from kltest.identify.findings import Findings, Row
from kltest.identify.graded import fields_used
from kltest.identify.instances import instances
from kltest.identify.measure import Measure
from kltest.loss.calling import Loss
from kltest.loss.derived import DERIVED
from kltest.report import Status
from kltest.rollout import SAMPLER_FIELDS


def other_branches(findings: Findings, options: Options) -> Iterator[Row]:
    """Yield rows of the loss with other arguments: None for fields that it can do without, and what trainers pass for a
    parameter that is None by default.

    What the checks find further out there stands in `Findings.beyond`. A branch that fails is not judged, and it is
    noted.
    """
    derivable = findings.loss.derivable
    if not findings.agree:
        return
    for left_out in _left_out(findings.loss):
        words = f"without {' and '.join(left_out)}"
        note = f"It was graded {words} as well, which has None for a default."
        yield from _graded(findings, _without(findings, left_out, options), left_out, words, note, options)
    for name in derivable:
        words = f"with {name}"
        note = f"It was graded {words}, {DERIVED[name][0]}, as well as with None, its default."
        branch = _branch(findings, findings.loss.with_derived((name,)), findings.samplers, options)
        yield from _graded(findings, branch, (), words, note, options)


def _left_out(loss: Loss) -> list[tuple[str, ...]]:
    """Return what is left out: each field, what a trainer lacks that keeps log-probs of tokens alone, and all."""
    tried = [*((name,) for name in loss.optional), loss.of_distributions, loss.optional]
    return [names for names in dict.fromkeys(tried) if names]


def _graded(
    findings: Findings, branch: Findings, left_out: tuple[str, ...], words: str, note: str, options: Options
) -> Iterator[Row]:
    """Yield the rows of a branch, and record what the checks find further out."""
    begins = words[0].upper() + words[1:]
    try:
        for row in _rows(findings, branch, left_out):
            branch.rows.append(replace(row, branch=words))
            yield branch.rows[-1]
    except KltestError as error:
        findings.notes.append(f"{begins} it cannot be graded: {str(error).splitlines()[0]}")
        return
    for code, status, sentence in _further(findings, branch, left_out, options):
        if findings.beyond.get(code, ("inconclusive",))[0] == "inconclusive":
            findings.beyond[code] = status, f"{begins}: {sentence}"
    findings.notes.append(note)


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


def _without(findings: Findings, left_out: tuple[str, ...], options: Options) -> Findings:
    """Return findings without rows of the loss without some fields; without the sampler's it is the policy."""
    on_policy = any(findings.loss.fields[name] in SAMPLER_FIELDS for name in left_out)
    samplers = ("current",) if on_policy else findings.samplers
    return _branch(findings, findings.loss.without(left_out), samplers, options)


def _branch(findings: Findings, loss: Loss, samplers: tuple[str, ...], options: Options) -> Findings:
    known, uses = findings.measure, fields_used(loss, options.seed)
    measure = Measure(loss, known.declared, uses, seed=options.seed, sizes=known.sizes, sampling=known.sampling)
    return Findings(findings.expect, findings.placement, findings.environments, samplers, measure)


def _rows(findings: Findings, branch: Findings, left_out: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a branch; without a mask only where no rollout is padded."""
    for environment in branch.environments:
        if _is_mask(findings, left_out) and instances(environment, branch.seed)[0].paths.padded:
            continue
        for sampler in branch.samplers:
            yield from branch.measure.rows(environment, sampler)
