"""Columns of a row beside a report: laws of its coefficients, and if the sampler's log-probs enter its KL term."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kltest.errors import KltestError
from kltest.grading.isolated import Child
from kltest.grading.jobs import Job
from kltest.report import Report
from kltest.rollout import SAMPLER_FIELDS
from kltest.scoreboard.laws import laws

SECONDS = 300.0
ENVIRONMENT = "sequence"


def extras(job: Job, report: Report) -> dict[str, Any]:
    """Return fields of a row: laws of coefficients by name, and if the sampler's log-probs move the gradient.

    They are measured in a child of this process. A loss that ends it, or that was not graded, has none of it.
    """
    found: dict[str, Any] = {"laws": {}, "reads_sampler": False}
    if report.gradients:
        with Child(_extras, job, report) as child:
            step = child.step(SECONDS)
        found |= step.value if step.kind == "value" else {}
    return found


def _extras(job: Job, report: Report) -> Iterator[dict[str, Any]]:
    import torch

    from kltest.checks.off_policy.ratios import sampler_has_influence
    from kltest.grading.grader import plan
    from kltest.grading.options import Options
    from kltest.identify.graded import kl_part
    from kltest.loss.calling import Loss
    from kltest.loss.resolve import resolve

    torch.set_num_threads(1)
    options = Options(**job.given)

    def build(arguments: Mapping[str, Any]) -> Loss:
        mine = replace(options, arguments={**options.arguments, **arguments})
        return kl_part(resolve(job.target, mine.call), mine.expect, mine.seed, mine.group_size)

    found: dict[str, str] = {}
    # A law of the smallest batch is that of a rollout.
    for each in sorted(report.gradients, key=lambda row: row.batch):
        if each.environment == ENVIRONMENT and each.identified:
            found = laws(build, each.identified, each.sampler, each.batch, report.dtype) | found  # type: ignore[arg-type]
    findings = plan(build({}), options)
    taken = findings.observed.uses & SAMPLER_FIELDS
    try:
        moves = taken and sampler_has_influence(findings, ENVIRONMENT)
    except KltestError:
        moves = taken
    yield {"laws": found, "reads_sampler": bool(moves)}
