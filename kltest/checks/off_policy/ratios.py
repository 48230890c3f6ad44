"""Experiments on a loss that is wrong under a stale sampler: its use of the sampler's log-probs.

Each changes one thing in one environment and compares gradients. It is made once an environment.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kltest.checks.batches import apart, gradient, limit, moves, norm, with_gradient
from kltest.checks.lifted import WithoutBounds, WithoutStops
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.identify.case import Case
from kltest.identify.findings import Combination, Findings, Row, shared
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.moments.differentiate import LossExperiment, received
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import LEAVES, Rollout, elsewhere
from kltest.truth import gradient as truth_gradient

# Share of the way from policy to sampler: no usual clip (0.2) acts there, and a missing ratio still shows (its bias is
# about this size, and the tolerance is 1e-9 or 1e-4).
NEAR = 0.01
# The same for names, and what a name may leave of the gradient there: named gradients are alike so near, and fit what
# has no name to the fourth order of the share or so, but not to rounding.
NEAR_FOR_NAMES, LEFT = 0.04, 1e-12
# Change of log-probs, in nats: far below the tightest clip in use (3e-4), far above rounding.
CLOSE = 1e-6
# Change of one log-prob by which a weight's share in it is measured, and how well: few bounds lie so near, and a weight
# of many tokens has a share of 1/T at least.
STEP, ROUNDED = 1e-3, 0.01
# Share of the mean square of a gradient that is none, and the least cosine that has a sign.
NOTHING, OPPOSITE = 1e-12, 0.1


@shared
def sampler_has_influence(findings: Findings, environment: str, only_told: bool = False) -> bool:
    """Return True if the loss's gradient changes with the sampler's log-probs, or with what the engine told of them.

    Tried far from the sampler and close to the policy: a clipped ratio may be saturated at one of the two.
    """
    rollout = _rollout(findings, environment)
    generator = torch.Generator().manual_seed(1)
    for start, distance in (("old_", 0.3), ("", CLOSE)):
        base = {name: rollout.peek(start + name).detach() for name in LEAVES}
        noise = {name: torch.randn(part.shape, generator=generator).double() for name, part in base.items()}
        moved = {f"old_{name}": part + distance * noise[name] for name, part in base.items()}
        if only_told:
            moved = {"rollout_logp": moved["old_logp"]}
        if moves(findings.measure, rollout, rollout.replace(**moved)):
            return True
    return False


@shared
def broadcast(findings: Findings, environment: str) -> bool:
    """Return True if a weight of many tokens, which is not their importance weight, multiplies a token's gradient.

    The sampler's log-prob of the last token is moved: the gradient at an earlier token is then multiplied, whatever the
    reference is, by another factor than the importance weight of the whole rollout would be.
    """
    rollout = _rollout(findings, environment)
    lengths = rollout.peek("mask").sum(dim=1).numpy().astype(int)
    rows = np.flatnonzero(lengths > 1)
    if findings.observed.coupled or not len(rows):
        return False
    old = rollout.peek("old_logp").clone()
    old[torch.from_numpy(rows), torch.from_numpy(lengths[rows] - 1)] += STEP
    others = [{}, {name: elsewhere(rollout.peek(name)) for name in ("ref_logp", "ref_logits")}]
    earlier = np.arange(old.shape[1]) < lengths[:, None] - 1
    with WithoutBounds():
        bases = [gradient(findings.measure, rollout.replace(**other)) for other in others]
        moved = [gradient(findings.measure, rollout.replace(old_logp=old, **other)) for other in others]
    squares = [(base**2).sum(axis=-1) for base in bases]
    known = earlier & (squares[0] > 0) & (squares[1] > 0)
    if not known.any() or apart(*bases) <= limit(findings):
        return False
    one, other = (
        ((base * after).sum(axis=-1)[known] / square[known]) - 1
        for base, after, square in zip(bases, moved, squares, strict=True)
    )
    # Shares of the importance weight: 1 for the whole rollout's, 1/T for the geometric mean.
    shares = -one / STEP
    near = max(ROUNDED, limit(findings) / STEP)
    return bool(np.abs(one - other).max() <= near * STEP and np.any((shares > near) & (np.abs(shares - 1) > near)))


class Unbounded(NamedTuple):
    """The gradient without the bounds on a ratio by name, None if it has none, and whether bounds act on it at all."""

    acts: bool
    named: Combination | None


@shared
def unbounded(findings: Findings, environment: str) -> Unbounded:
    """Return what a loss follows under a stale sampler once its bounds are lifted, or the sampler is nearly the policy.

    A bound that is lifted acts only if the gradient changes with a stale sampler and not with the policy as sampler.
    One that cannot be lifted, as rollouts that are dropped, is seen by names: a gradient that is a smooth function of
    the sampler and has a name near the policy has the same everywhere.
    """
    measure, drawn = findings.measure, instances(environment, findings.seed)
    lifted = _without_bounds(findings.loss)
    case = Case(environment, "stale", findings.seed)
    changes = {
        sampler: not all(measure.equal(findings.loss, lifted, one, sampler) for one in drawn)
        for sampler in ("stale", "current")
    }
    if changes["stale"] and not changes["current"]:
        return Unbounded(True, measure.name_of(lifted, case, drawn))
    named = None
    if findings.observed.dtype == "float64":
        named = measure.name_of(findings.loss, case, [nearer(one, NEAR_FOR_NAMES) for one in drawn], LEFT)
    return Unbounded(named is not None, named)


def follows(row: Row, findings: Findings) -> Combination:
    """Return what a row of a stale sampler follows, without the bounds on its ratio if it has no name with them."""
    if row.identified is None and row.sampler == "stale" and row.batch == 1 and row.method == "exact":
        return unbounded(findings, row.environment).named or {}
    return row.identified or {}


@shared
def penalty_is_stale(findings: Findings, environment: str) -> bool:
    """Return True if the penalty compares the sampler's log-probs with the reference's, in whole or in part.

    A penalty of the policy's own log-probs is zero, rollout by rollout, if the reference is the policy. What is left of
    it then is zero if the sampler is the policy as well, and belongs to the sampler's log-probs. It is no penalty of
    the policy's distance to the sampler if it is zero where the reference is the sampler, or has the opposite sign.
    """
    instance = instances(environment, findings.seed)[0]
    scale = findings.measure.second_moment(findings.loss, instance)

    def left(reference: np.ndarray, sampler: str = "stale") -> bool:
        changed = replace(instance, reference=reference)
        return findings.measure.second_moment(findings.loss, changed, sampler) > NOTHING * scale

    if left(instance.policy, "current") or not left(instance.policy):
        return False
    if not left(instance.sampler):
        return True
    at_policy = replace(instance, reference=instance.policy)
    found = findings.measure.gradient_of(findings.loss, at_policy)
    away = truth_gradient("to_sampler_kl", instance)
    return float((found * away).sum()) < -OPPOSITE * norm(found) * norm(away)


@shared
def right_when_nearer(findings: Findings, environment: str) -> bool:
    """Return True if the gradient is the declared one where the sampler is nearly the policy, so that no clip acts."""
    instance = instances(environment, findings.seed)[0]
    return findings.measure.meets(findings.loss, nearer(instance, NEAR))


def nearer(instance: Instance, share: float) -> Instance:
    """Return an instance whose sampler is this share of the way from its policy to its sampler."""
    return replace(instance, sampler=table(instance.policy + share * (instance.sampler - instance.policy)))


def _without_bounds(loss: Loss) -> Loss:
    def lifted(rollout: Rollout) -> Outcome:
        with WithoutBounds():
            return loss(rollout)

    return loss.changed(instead=lifted)


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
