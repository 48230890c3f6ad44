"""Experiments on a loss that is wrong under a stale sampler: its use of the sampler's log-probs.

Each changes one thing in one environment and compares gradients. It is made once an environment.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kltest.checks.batches import apart, gradient, limit, moves, norm, with_gradient
from kltest.checks.lifted import WithoutBounds, WithoutStops
from kltest.environments.policies import table
from kltest.identify.findings import Findings, shared
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.moments.differentiate import LossExperiment, received
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import LEAVES, Rollout

# Share of the way from policy to sampler: no usual clip (0.2) acts there, and a missing ratio still shows (its bias is
# about this size, and the tolerance is 1e-9 or 1e-4).
NEAR = 0.01
# Change of log-probs, in nats: far below the tightest clip in use (3e-4), far above rounding.
CLOSE = 1e-6


@shared
def sampler_has_influence(findings: Findings, environment: str) -> bool:
    """Return True if the loss's gradient changes with the sampler's log-probs.

    Tried far from the sampler and close to the policy: a clipped ratio may be saturated at one of the two.
    """
    rollout = _rollout(findings, environment)
    generator = torch.Generator().manual_seed(1)
    for start, distance in (("old_", 0.3), ("", CLOSE)):
        base = {name: rollout.peek(start + name).detach() for name in LEAVES}
        noise = {name: torch.randn(part.shape, generator=generator).double() for name, part in base.items()}
        moved = {f"old_{name}": part + distance * noise[name] for name, part in base.items()}
        if moves(findings.measure, rollout, rollout.replace(**moved)):
            return True
    return False


@shared
def only_through_the_sum(findings: Findings, environment: str) -> bool:
    """Return True if the sampler enters as one weight a sequence that depends on the sum of its log-probs alone."""
    rollout = _rollout(findings, environment)
    old, mask = rollout.peek("old_logp"), rollout.peek("mask")
    shift = torch.zeros_like(old)
    shift[:, 0], shift[:, 1] = 0.3, -0.3
    same_sum = old + torch.where(mask[:, 1:2] != 0, shift, 0.0)
    if moves(findings.measure, rollout, rollout.replace(old_logp=same_sum)):
        return False
    moved = old.clone()
    moved[:, 0] += 0.3
    before, after = (gradient(findings.measure, one) for one in (rollout, rollout.replace(old_logp=moved)))
    lengths, factors = mask.sum(dim=1).numpy(), []
    for length in np.unique(lengths):
        base, found = before[lengths == length], after[lengths == length]
        factor = float((base * found).sum() / max(norm(base) ** 2, 1e-300))
        if not 0 < factor < 1 - 1e-6 or apart(found, factor * base) > limit(findings):
            return False
        factors.append(factor)
    # A weight of exactly 1/μ is the importance weight itself, and no mistake.
    return any(abs(factor - math.exp(-0.3)) > 1e-4 for factor in factors)


@shared
def right_without_clip(findings: Findings, environment: str) -> bool:
    """Return True if the gradient is the declared one when no clip acts: nearly on-policy, or with clips lifted."""
    loss, instance = findings.loss, instances(environment, findings.seed)[0]

    def lifted(rollout: Rollout) -> Outcome:
        with WithoutBounds():
            return loss(rollout)

    near = table(instance.policy + NEAR * (instance.sampler - instance.policy))
    meets = findings.measure.meets
    return meets(loss.changed(instead=lifted), instance) or meets(loss, replace(instance, sampler=near))


@shared
def fixed_by_reattaching(findings: Findings, environment: str) -> bool:
    """Return True if the gradient is the declared one once it flows through the sampler's ratio wherever it stopped.

    A ratio depends on logp − old_logp, so that a stop-gradient removes minus the derivative with respect to old_logp.
    This derivative is measured with all stops lifted, minus the derivative without lifting, and added to the loss's own
    gradient. Stops on what does not depend on the sampler, such as a reward, stay. Then the derivative without lifting
    is not subtracted: for exp(logp.detach() − old_logp), which differentiates only old_logp.
    """
    loss, instance = findings.loss, instances(environment, findings.seed)[0]

    def missing(one_sided: bool, rollout: Rollout) -> dict[str, Tensor]:
        flowing = 0.0 if one_sided else _towards_sampler(loss, rollout)
        with WithoutStops():
            return {"logp": flowing - _towards_sampler(loss, rollout)}

    rollout, least = _rollout(findings, environment), TOLERANCES["float32"].influence
    return any(
        extra(rollout)["logp"].abs().max() > least and findings.measure.meets(with_gradient(loss, extra), instance)
        for extra in (partial(missing, False), partial(missing, True))
    )


def _towards_sampler(loss: Loss, rollout: Rollout) -> Tensor:
    found = received(LossExperiment(loss), rollout, ["old_logp"]).get("old_logp")
    return torch.zeros_like(rollout.peek("old_logp")) if found is None else found


def _rollout(findings: Findings, environment: str) -> Rollout:
    return Rollout.of(instances(environment, findings.seed)[0], sampler="stale", padding=findings.seed)
