"""KL904: a cap or a mask of importance weights acts at the graded staleness and biases the gradient."""

import numpy as np

from kltest.checks.off_policy.ratios import NEAR, nearer
from kltest.identify.case import target
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> str | None:
    """Describe a row that is right once the sampler is nearly the policy, with its bias in units of its noise."""
    drawn = row.case.instances
    if row.sampler == "current" or row.batch > 1 or not row.gradients or not np.isfinite(drawn[0].sampler).all():
        return None
    if not findings.measure.meets(findings.loss, nearer(drawn[0], NEAR), row.sampler):
        return None
    biases = [
        found - target(findings.expect, one, row.sampler) for found, one in zip(row.gradients, drawn, strict=True)
    ]
    # The noise of a mean over n rollouts is √(variance/n).
    rollouts = min(noise / float((bias**2).sum()) for noise, bias in zip(row.variances, biases, strict=True))
    words = (
        f"its bias, {row.relative_bias:.2g} of the gradient, exceeds the noise of a mean over {rollouts:.0f} rollouts"
    )
    return f"right nearer to the policy; {words}"


def capped(logp, old_logp, reward, mask):
    live = mask != 0
    weight = (logp - old_logp).where(live, 0.0).sum(-1).exp().clamp(max=1.2)
    return -weight.detach() * reward * logp.where(live, 0.0).sum(-1)


def uncapped(logp, old_logp, reward, mask):
    live = mask != 0
    weight = (logp - old_logp).where(live, 0.0).sum(-1).exp()
    return -weight.detach() * reward * logp.where(live, 0.0).sum(-1)
