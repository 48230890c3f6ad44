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
    # A law of the smallest batch is that of a rollout.
    # Utilities of success rates are those of one group size, and ∇E[R] is that of every size.
    for each in sorted(report.gradients, key=lambda row: row.batch):
        if each.environment == "sequence" and each.identified and not is_of_groups(each.identified):
            batch = each.batch if options.part == "kl" else min(each.batch, EXACT[0])
            found = laws(build, each.identified, each.sampler, batch, report.dtype, rows) | found  # type: ignore[arg-type]
    if options.part != "kl":
        yield {"laws": found}
        return
    taken = findings.observed.uses & SAMPLER_FIELDS
    try:
        moves = taken and sampler_has_influence(findings, "sequence")
    except KltestError:
        moves = taken
    yield {"laws": found, "reads_sampler": bool(moves)}
    named = [name for each in report.gradients for name in each.identified or ()]
    yield {"limits": limits(build({}), findings.measure, rows, report.dtype, named) if rows else []}
