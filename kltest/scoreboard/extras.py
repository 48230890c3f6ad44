"""Measurements beside a report, in a child process: laws, limits, and if the sampler's log-probs enter the KL term."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kltest.errors import KltestError
from kltest.grading.isolated import Child
from kltest.grading.jobs import Job
from kltest.loss.calling import Loss
from kltest.report import Report
from kltest.rollout import SAMPLER_FIELDS
from kltest.scoreboard.rows import BATCH, GROUP

# For laws, and for limits.
SECONDS, SECONDS_OF_LIMITS = 300.0, 600.0


def extras(job: Job, report: Report) -> dict[str, Any]:
    """Return fields of a row: laws of coefficients by name, limits of batches, if the sampler's log-probs matter.

    They are measured in a child of this process. A loss that ends it, or that was not graded, has none of what was not
    measured before. Of a policy part, laws alone are measured.
    """
    found: dict[str, Any] = {"laws": {}, "limits": [], "reads_sampler": False}
    if report.gradients:
        with Child(_extras, job, report) as child:
            for seconds in (SECONDS, SECONDS_OF_LIMITS):
                step = child.step(seconds)
                if step.kind != "value":
                    break
                found |= step.value
    return found


def _extras(job: Job, report: Report) -> Iterator[dict[str, Any]]:
    import torch

    from kltest.checks.off_policy.ratios import sampler_has_influence
    from kltest.grading.grader import part_of, plan
    from kltest.grading.options import Options
    from kltest.loss.resolve import resolve
    from kltest.scoreboard.laws import laws
    from kltest.scoreboard.limits import EXACT, keeps_groups_apart, limits
    from kltest.truth import is_of_groups

    torch.set_num_threads(1)
    options = Options(**job.given)

    def build(arguments: Mapping[str, Any]) -> Loss:
        mine = replace(options, arguments={**options.arguments, **arguments})
        return part_of(resolve(job.target, mine.call), mine)

    findings = plan(build({}), options)
    rows = ""
    if report.reduction == "coupled":
        rows = GROUP if keeps_groups_apart(build({})) else BATCH
    found: dict[str, str] = {}
    kl = options.part == "kl"
    named = [each for each in report.gradients if each.environment == "sequence" and each.identified]
    if not kl:
        # A group of one is none, and a utility of success rates is that of one group size.
        largest = max((each.batch for each in named), default=1)
        named = [each for each in named if each.batch == largest and not is_of_groups(each.identified or ())]
    # A law of the smallest batch is that of a rollout.
    for each in sorted(named, key=lambda row: row.batch):
        batch, terms = each.batch if kl else min(each.batch, EXACT[0]), each.identified or {}
        found = laws(build, terms, each.sampler, batch, report.dtype, rows) | found  # type: ignore[arg-type]
    if not kl:
        yield {"laws": found}
        return
    taken = findings.observed.uses & SAMPLER_FIELDS
    try:
        moves = taken and sampler_has_influence(findings, "sequence")
    except KltestError:
        moves = taken
    yield {"laws": found, "reads_sampler": bool(moves)}
    names = [name for each in report.gradients for name in each.identified or ()]
    yield {"limits": limits(build({}), findings.measure, rows, report.dtype, names) if rows else []}
