"""The reading in which a loss is graded: fields that it reads, the sampler's influence, its KL part.

A whole policy loss has terms beside the KL one, and so has a shaped reward. They are not held against the KL term. The
KL part is what the coefficient multiplies, what is left without rewards, or a reward less its other terms.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.identify.shaped import ENVIRONMENT, ROWS, as_shaped_reward, rewarded
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Outcome
from kltest.loss.placement import reduce, with_rewards
from kltest.loss.resolve import Variant
from kltest.moments.differentiate import at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import SAMPLER_FIELDS, Rollout, elsewhere

# Far, and nearer than the tightest clip in use: a clipped ratio may be saturated at one of the two.
DISTANCES = (0.3, 1e-6)
# Rows of a call: divided by the usual sizes of groups, or one group for a loss that takes one a call.
SEVERAL = (24, 12, 4, 2, 1)
# Values of β: a gradient that is affine at these is taken as affine.
COEFFICIENTS = (0.0, 0.5, 1.0, 2.0)
OWN = (
    "{name} is no coefficient of a KL term, since the gradient is not affine in it (tried at 0, ½, 1 and 2) or moves "
    "with the reference at 0: it was left at {value:g}"
)
UNREWARDED = (
    "It reads rewards and takes no coefficient: its KL part is the gradient with rewards and advantages of zero, which "
    "is what was graded"
)
REST = "What it returns without its KL term does not move with the log-probs: that was subtracted"


def fields_used(loss: Loss, seed: int) -> frozenset[str]:
    """Return the fields that a loss takes by a parameter or reads from the rollout, in one call with four rollouts."""
    rollout = Rollout.of(instances(ENVIRONMENT, seed)[0], padding=seed).take([0, 3, 7, 11])
    with suppress(KltestError):  # a loss that fails is reported when it is measured
        loss(rollout)
    return frozenset(loss.takes) | frozenset(rollout.accessed)


def sampler_matters(loss: Loss, used: frozenset[str], seed: int) -> bool:
    """Return True if the KL part or the logged value changes with the sampler's log-probs, or if that cannot be tried.

    Args:
        loss: The loss, which gives its KL part: a ratio in the policy term of a whole loss does not count.
        used: The fields that it uses, from `fields_used`.
        seed: Seed of the instance, its padding and the changes.
    """
    if not used & SAMPLER_FIELDS:
        return False
    instance = instances(ENVIRONMENT, seed)[0]
    generator = np.random.default_rng(seed)
    try:
        for start, distance in zip((instance.sampler, instance.policy), DISTANCES, strict=True):
            moved = table(start + distance * generator.standard_normal(start.shape))
            one, other = (_results(loss, replace(instance, sampler=sampler), seed) for sampler in (start, moved))
            limit = TOLERANCES[one[0]].influence
            if not all(_same(*pair, limit) for pair in zip(one[1], other[1], strict=True)):
                return True
    except (KltestError, ValueError):  # it fails, or logs a KL in one call only: graded under both samplers
        return True
    return False


def _results(loss: Loss, instance: Instance, seed: int) -> tuple[str, list[Tensor]]:
    """Return the precision of one call, and its value, its logged value if there is one, and its gradients."""
    lengths = instance.paths.lengths
    rollout = Rollout.of(instance, sampler="stale", padding=seed, centre="batch").take(np.argsort(lengths)[:ROWS])
    with preserved(seed):
        outcome = loss.for_experiments()(rollout)
    metrics = [] if outcome.metric is None else [outcome.metric]
    return outcome.dtype, [outcome.objective.detach(), *metrics, *at_leaves(loss, outcome.objective, rollout)]


def _same(one: Tensor, other: Tensor, limit: float) -> bool:
    return one.shape == other.shape and _close(one.double(), other.double(), limit)


def kl_part(loss: Loss, declared: Mapping[str, float], seed: int, group: int | None = None) -> Loss:
    """Return the loss in the reading in which its KL term is graded; a registered estimator stays what it is.

    Args:
        loss: A loss. It becomes one of placement shaped-reward if a change of the rewards shows that it is one.
        declared: The declared gradient. A policy gradient in it is no other term.
        seed: Seed of the instance and its padding.
        group: Rollouts in a group, if that was asked for.
    """
    if loss.spec is not None:
        return loss
    loss = as_shaped_reward(loss, seed)
    rollouts = list(_rollouts(seed, group))
    if loss.shaped:
        return _without_rest(loss, rollouts)
    loss = _with_own_beta(loss, rollouts)
    if "rollout" in loss.takes:
        fields_used(loss, seed)  # it shows in a call if such a loss reads β
    whole = rewarded(loss) and loss.placement == "loss" and not (loss.takes_beta or loss.unrewarded)
    return _unrewarded(loss, rollouts) if whole and "expected_reward" not in declared else loss


class Rest(Variant):
    """A loss that takes β, at β = 0: all of it but its KL term."""

    def __call__(self, rollout: Rollout) -> Outcome:
        rest = reduce(self.loss.returned(rollout, 0.0).loss.double(), rollout.peek("mask")).mean()
        return replace(self.loss(rollout), objective=rest, returned="scalar", rows=None, value=None, metric=None)


def _rollouts(seed: int, group: int | None) -> Iterator[Rollout]:
    """Batches of several sizes, for losses that take batches of some sizes only; the largest first."""
    everything = Rollout.of(instances(ENVIRONMENT, seed)[0], padding=seed)
    for rows in (3 * group, group) if group else SEVERAL:
        order = torch.arange(rows) * 7 % len(everything)  # rows of all lengths, in no order
        yield everything.take(order).replace(group=torch.arange(rows) // (group or max(rows // 6, 1)))


def _with_own_beta(loss: Loss, rollouts: list[Rollout]) -> Loss:
    """Leave a divergence's parameter `beta` at its own value if it is no coefficient, as the weight of a mixture."""
    name = next((key for key, field in loss.fields.items() if field == "beta"), "")
    default = next((one.default for one in loss.parameters if one.name == name), inspect.Parameter.empty)
    value = loss.settings.get(name, default)
    if name != "beta" or loss.placement != "loss" or rewarded(loss):
        return loss
    if not isinstance(value, int | float) or isinstance(value, bool):
        return loss
    rollout, _ = _first_taken(loss, rollouts, float(value))
    if rollout is None:
        return loss
    try:
        at = [_gradient(loss, rollout, beta) for beta in COEFFICIENTS]
        line = [at[0] + beta * (at[2] - at[0]) for beta in COEFFICIENTS]
        limit = _limit(loss, rollout)
        affine = _close(torch.stack(at), torch.stack(line), limit)
        apart = _close(at[0], _gradient(loss, rollout.near_reference(), 0.0), limit)
        if affine and (apart or _close(at[0], at[2], limit)):
            return loss
    except KltestError:  # it is not even defined at all of them
        pass
    other = copy.copy(loss)
    other.fillings = {**loss.fillings, name: value}
    other.fields = {key: field for key, field in loss.fields.items() if key != name}
    other.takes, other.takes_beta, other.fixed_beta = loss.takes - {"beta"}, False, None
    other.notes = [*loss.notes, OWN.format(name=name, value=value)]
    return other


def _unrewarded(loss: Loss, rollouts: list[Rollout]) -> Loss:
    """Take rewards away if they move the gradient by something that does not move with the reference.

    If it does, as with a mask on groups of equal rewards, the rewards are part of the KL term and stay.
    """
    rollout, zero = _first_taken(loss, rollouts)
    if rollout is None or zero is None:
        return loss
    near = rollout.near_reference()
    half, moves = len(rollout) // 2, False
    alternate = (torch.arange(len(rollout)) % 2).double()
    try:
        limit = _limit(loss, rollout)
        without = _gradient(loss, with_rewards(near, torch.zeros_like(alternate)))
        for rewards in (torch.ones_like(alternate), alternate, alternate.where(torch.arange(len(rollout)) < half, 1.0)):
            here, there = (_gradient(loss, with_rewards(batch, rewards)) for batch in (rollout, near))
            moves |= not _close(here, zero, limit)
            if not _close(here + without, there + zero, limit):
                return loss
    except KltestError:
        return loss
    if not moves:
        return loss
    other = copy.copy(loss)
    other.unrewarded, other.notes = True, [*loss.notes, UNREWARDED]
    return other


def _first_taken(
    loss: Loss, rollouts: list[Rollout], beta: float | None = None
) -> tuple[Rollout | None, Tensor | None]:
    """Return the first batch that the loss takes, and its gradient there with rewards of zero."""
    for rollout in rollouts:
        try:
            return rollout, _gradient(loss, with_rewards(rollout, torch.zeros(len(rollout)).double()), beta)
        except KltestError:
            continue
    return None, None


def _without_rest(loss: Loss, rollouts: list[Rollout]) -> Loss:
    """Subtract from a shaped reward what is left of it without its KL term, if that does not move with log-probs."""
    other = copy.copy(loss)
    rollout = rollouts[0]
    moved = rollout.replace(**{n: elsewhere(rollout.peek(n).detach()) for n in rollout if "log" in n})
    batches = [rollout, moved]
    if loss.takes_beta:
        other.less, beta = "coefficient", 0.0
    else:
        other.less, beta = "reference", loss.beta(rollout)
        batches = [batch.near_reference() for batch in batches]
    try:
        with preserved():
            here, there = (loss.for_experiments().returned(batch, beta).loss.detach() for batch in batches)
    except KltestError:
        return loss
    live = rollout.peek("mask") != 0
    here, there = (torch.where(live, each, 0.0) if each.dim() == 2 else each for each in (here, there))
    if not here.any() or not _close(here, there, _limit(loss, rollout)):
        return loss
    other.notes = [*loss.notes, REST]
    return other


def _gradient(loss: Loss, rollout: Rollout, beta: float | None = None) -> Tensor:
    """The gradient at all leaves of what one call returns, in one row of numbers."""
    rollout = rollout.replace()
    with preserved():
        found = loss.for_experiments().returned(rollout, beta).loss
    if found.dim() == 2:
        found = found.where(rollout.peek("mask") != 0, 0.0)
    parts = at_leaves(loss, found.sum(), rollout)
    live = rollout.peek("mask") != 0
    return torch.cat([part.where(live if part.dim() == 2 else live[..., None], 0.0).flatten() for part in parts])


def _limit(loss: Loss, rollout: Rollout) -> float:
    with preserved():
        return TOLERANCES[loss.for_experiments()(rollout.replace()).dtype].groups


def _close(one: Tensor, other: Tensor, limit: float) -> bool:
    return bool((one - other).abs().max() <= limit * max(float(one.abs().max()), float(other.abs().max())))
