"""The objective that is graded of a loss: rules, tried in this order by calling it on small batches.

1. A registered estimator is graded as it stands: its SPEC says what it is.
2. A parameter as `padding_mask` is 1 at padding if with 1 on live tokens these have no gradient (`of_padding`).
3. What it returns rises by exactly one with the reward, a reward less a penalty: the negative of it, with rewards of
   zero (`response_to_rewards`), less what does not move with the log-probs (`without_constant`).
4. Placed in the reward, it falls by exactly one with the reward: it, with rewards of zero (`response_to_rewards`).
5. Its parameter `beta` is no coefficient, since the gradient is not affine in it: it, at β's own value (`own_beta`).
6. A whole policy loss without a coefficient: it, with rewards and advantages of zero, if rewards move the gradient by
   something that does not move with the reference (`without_rewards`).
7. Anything else is graded whole; of a loss that takes β, (gradient at β − gradient at 0)/β.

A rule that cannot be tried, since the loss fails, leaves the loss as it is: the failure is reported when it is
measured. `tests/unit/test_graded.py` has a loss that needs each rule, and its sister that must not meet it.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.arguments import PaddingOf
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Outcome
from kltest.loss.placement import ROW_FIELDS, reduce, with_rewards
from kltest.loss.precision import least_precise
from kltest.loss.results import Result, check_finite, is_finite
from kltest.moments.differentiate import at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import SAMPLER_FIELDS, Rollout, elsewhere

# Lengths differ there, so that masks matter.
ENVIRONMENT = "ragged"
# Groups of two, three, four and six divide this number of rollouts.
ROWS = 12
# Rows of a call: divided by the usual sizes of groups, or one group for a loss that takes one a call.
SEVERAL = (24, 12, 4, 2, 1)
# Rewards of the changed batch, all different: positive and below one, as many functions clip rewards to [-1, 1].
LOWEST, HIGHEST = 0.25, 0.75
# Largest error of a slope, for functions that compute in float32, and largest change of a gradient that rewards leave.
SLOPE, UNMOVED = 1e-4, 1e-6
# Values of β: a gradient that is affine at these is taken as affine.
COEFFICIENTS = (0.0, 0.5, 1.0, 2.0)
# Steps of the sampler: far, and nearer than the tightest clip in use, since a clipped ratio may be saturated at one.
STEPS = (0.3, 1e-6)
# Draws of random numbers with which each is tried: of a coin whose chance moves by a thousandth some fall otherwise.
DRAWS = 128

RECOGNISED = (
    "What it returns rises by one with the reward: it is taken as a reward less a penalty, higher being better, and "
    "graded as the negative of a cost, with rewards of zero (placement shaped-reward; --placement loss prevents it)"
)
HINT = (
    "What it returns rises with the reward. If it is a reward less a penalty, higher being better, grade it with "
    "--placement shaped-reward"
)
COST = (
    "What it returns falls by one with the reward: it is a cost that contains the negative reward, and was graded with "
    "rewards of zero"
)
TURNED = "{names} is 1 at padding and 0 on live tokens: with 1 on live tokens these have no gradient"
OWN = (
    "{name} is no coefficient of a KL term, since the gradient is not affine in it (tried at 0, ½, 1 and 2) or moves "
    "with the reference at 0: it was left at {value:g}"
)
UNREWARDED = (
    "It reads rewards and takes no coefficient: its KL part is the gradient with rewards and advantages of zero, which "
    "is what was graded"
)
REST = "What it returns without its KL term does not move with the log-probs: that was subtracted"


def kl_part(loss: Loss, declared: Mapping[str, float], seed: int, group: int | None = None) -> Loss:
    """Return the loss as its KL term is graded, by the rules above.

    Args:
        loss: A loss. It becomes one of placement shaped-reward if a change of the rewards shows that it is one.
        declared: The declared gradient. A policy gradient in it is no other term.
        seed: Seed of the instance and its padding.
        group: Rollouts in a group, if that was asked for.
    """
    if loss.spec is not None:
        return loss
    tried = list(batches(seed, group))
    loss = response_to_rewards(of_padding(loss, tried), seed)
    if loss.shaped:
        return without_constant(loss, tried[0])
    loss = own_beta(loss, tried)
    if "rollout" in loss.takes:
        fields_used(loss, seed)  # it shows in a call if such a loss reads β
    return loss if "expected_reward" in declared else without_rewards(loss, tried)


def of_padding(loss: Loss, batches: list[Rollout]) -> Loss:
    """Rule 2: turn a mask round whose name says padding, if live tokens have a gradient then, and no other way."""
    names = [name for name, field in loss.fields.items() if field == "mask" and "pad" in name]
    if not names or set(names) & loss.call.arguments.keys():
        return loss
    arguments = loss.arguments
    for name in names:
        arguments = arguments.with_value(name, PaddingOf())
    other = loss.changed(TURNED.format(names=" and ".join(names)), arguments=arguments, record=replace(loss.record))
    own, turned = (_first_taken(one, batches)[1] for one in (loss, other))
    return other if turned is not None and turned.any() and (own is None or not own.any()) else loss


def response_to_rewards(loss: Loss, seed: int) -> Loss:
    """Rules 3 and 4: return the loss as a shaped reward, or as a cost that contains the reward, if it is one.

    Only a loss whose placement was not given, or given as "reward", is tried. If it was not given, the reward must not
    change the gradient: what a policy loss returns moves with the reward as well.
    """
    asked = loss.call.placement
    if asked not in (None, "reward") or not _may_read_rewards(loss):
        return loss
    try:
        slope, rises, gradient_moves = _response(loss, seed)
    except KltestError:
        return loss
    if slope is None or (gradient_moves and not asked):
        return loss
    if slope == 1:
        return loss.changed(RECOGNISED, placement="reward", shaped=True, unrewarded=True, less="")
    hints = [HINT] if rises else []
    if slope == -1 and asked and not loss.takes_beta:
        return loss.changed(*hints, COST, unrewarded=True)
    return loss.changed(*hints)


def _response(loss: Loss, seed: int) -> tuple[int | None, bool, bool]:
    """Call the loss with rewards of 0 and with others; its sum over live tokens, a row each, is what may move.

    Returns:
        1 if each sum rises by as much as its reward, written to one token, to live ones or to all, −1 if it falls, 0 if
        it does neither, None if the loss returns one number for the batch; True if sums rise where rewards do, centred
        or scaled perhaps; True if a gradient changes with the rewards.
    """
    instance = instances(ENVIRONMENT, seed)[0]
    rollout = Rollout.of(instance, padding=seed).take(instance.paths.by_length[:ROWS])
    live = rollout.peek("mask") != 0
    rewards = torch.linspace(LOWEST, HIGHEST, len(rollout)).double()
    sums, gradients = [], []
    for given in (torch.zeros_like(rewards), rewards):
        _, each, gradient = called(loss, with_rewards(rollout, given), seed=seed)
        if each.shape != rewards.shape:
            return None, False, False
        sums.append(each)
        gradients.append(gradient)
    rise = sums[1] - sums[0]
    slope = 0
    for columns in (1.0, live.sum(dim=1).double(), live.shape[1]):
        for sign in (1, -1):
            if torch.allclose(rise, sign * columns * rewards, rtol=SLOPE, atol=0.0):
                slope = slope or sign
    moves = not torch.allclose(gradients[0], gradients[1], rtol=SLOPE, atol=UNMOVED)
    return slope, float((rise * rewards).sum()) > SLOPE, moves


def without_constant(loss: Loss, batch: Rollout) -> Loss:
    """Rule 3: subtract from a shaped reward what is left of it without its KL term, unless that moves with log-probs.

    What is left is the reward at β = 0, or, without a coefficient, with the policy as reference.
    """
    moved = batch.replace(**{name: elsewhere(batch.peek(name).detach()) for name in batch if "log" in name})
    batches, beta = [batch, moved], 0.0
    if not loss.takes_beta:
        batches, beta = [one.near_reference() for one in batches], loss.beta(batch)
    try:
        with preserved():
            rests = [loss.for_experiments().returned(one, beta).loss.detach() for one in batches]
        live = batch.peek("mask") != 0
        here, there = (torch.where(live, rest, 0.0) if rest.dim() == 2 else rest for rest in rests)
        if not here.any() or not _close(here, there, _limit(loss, batch)):
            return loss
    except KltestError:
        return loss
    return loss.changed(REST, less="coefficient" if loss.takes_beta else "reference")


def own_beta(loss: Loss, batches: list[Rollout]) -> Loss:
    """Rule 5: leave a divergence's parameter `beta` at its own value if it is no coefficient, as a mixture's weight."""
    name = next((key for key, field in loss.fields.items() if field == "beta"), "")
    if name != "beta" or loss.placement != "loss" or _may_read_rewards(loss):
        return loss
    default = next((one.default for one in loss.arguments.parameters if one.name == name), inspect.Parameter.empty)
    value = loss.call.arguments.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return loss
    batch, _ = _first_taken(loss, batches, float(value))
    if batch is None or _is_coefficient(loss, batch, float(value)):
        return loss
    return loss.changed(
        OWN.format(name=name, value=value),
        arguments=loss.arguments.with_value(name, value),
        fixed_beta=None,
        record=replace(loss.record, reads_beta=False),
    )


def _is_coefficient(loss: Loss, batch: Rollout, value: float) -> bool:
    """True if the gradient is affine in β and, where β matters, does not move with the reference at β = 0.

    Or if what β adds is another multiple of one KL term, and no longer proportional at its own value, as with
    min(β, 0.02): then it is no weight of a mixture, and the term has not the coefficient that is asked for.
    """
    try:
        at = [_gradient(loss, batch, beta) for beta in (*COEFFICIENTS, value / 100, value)]
        limit = _limit(loss, batch)
        near, one_more = (_gradient(loss, batch.near_reference(), beta) for beta in (0.0, 1.0))
        line = [at[0] + beta * (at[2] - at[0]) for beta in COEFFICIENTS]
        if _close(torch.stack(at[: len(line)]), torch.stack(line), limit):
            return _close(at[0], near, limit) or _close(at[0], at[2], limit)
        added = torch.stack(at) - at[0]
        shares = (added * added[2]).flatten(1).sum(1) / added[2].square().sum()
        multiples = torch.stack([share * added[2] for share in shares])
        of_one_term = bool((shares >= 0).all()) and _close(added, multiples, limit)
        # A KL term has no gradient in any rollout where the policy is the reference.
        of_one_term &= _close(at[0], near, limit) and _close(one_more, near, limit)
        return of_one_term and abs(100 * float(shares[-2] / shares[-1]) - 1) > SLOPE
    except KltestError:  # it is not even defined at all of them
        return False


def without_rewards(loss: Loss, batches: list[Rollout]) -> Loss:
    """Rule 6: take rewards away if they move the gradient by something that does not move with the reference.

    If it does, as with a mask on groups of equal rewards, the rewards are part of the KL term and stay.
    """
    if loss.placement != "loss" or not _may_read_rewards(loss) or loss.takes_beta or loss.unrewarded:
        return loss
    batch, zero = _first_taken(loss, batches)
    if batch is None or zero is None:
        return loss
    near, rows = batch.near_reference(), torch.arange(len(batch))
    ones, alternate = torch.ones(len(batch)).double(), (rows % 2).double()
    moves = False
    try:
        limit = _limit(loss, batch)
        near_zero = _gradient(loss, with_rewards(near, torch.zeros_like(ones)))
        for rewards in (ones, alternate, alternate.where(rows < len(batch) // 2, 1.0)):
            here, there = (_gradient(loss, with_rewards(one, rewards)) for one in (batch, near))
            moves |= not _close(here, zero, limit)
            if not _close(here + near_zero, there + zero, limit):
                return loss
    except KltestError:
        return loss
    return loss.changed(UNREWARDED, unrewarded=True) if moves else loss


def whole(loss: Loss, beta: float | None = 0.0, sign: int = 1) -> Loss:
    """Return all that a loss returns at a β, times a sign: at 0 all of it but its KL term; None: at its own β."""

    def called(rollout: Rollout) -> Outcome:
        if loss.record.traced is None:
            loss(rollout)  # the first call follows rounding
        found = loss.returned(rollout, loss.beta(rollout) if beta is None else beta).loss
        objective = sign * reduce(found.double(), rollout.peek("mask")).mean()
        if not is_finite(objective):
            check_finite(loss.name, found, rollout, loss.fields)
        dtype = least_precise((*(loss.record.traced or ()), found.dtype))
        return Outcome(objective, "scalar", dtype=str(dtype).removeprefix("torch."))

    return loss.changed(instead=called)


def fields_used(loss: Loss, seed: int) -> frozenset[str]:
    """Return the fields that a loss takes by a parameter or reads from the rollout, in one call with four rollouts."""
    rollout = Rollout.of(instances(ENVIRONMENT, seed)[0], padding=seed).take([0, 3, 7, 11])
    with suppress(KltestError):
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
        for start, step in zip((instance.sampler, instance.policy), STEPS, strict=True):
            moved = table(start + step * generator.standard_normal(start.shape))
            for draw in range(seed, seed + DRAWS):
                one, other = (
                    _results(loss, replace(instance, sampler=sampler), seed, draw) for sampler in (start, moved)
                )
                if _differ(one, other):
                    return True
                # Random numbers that decide by the ratio, as those of a rejection, may decide alike in one draw.
                if draw == seed and not _differ(one, _results(loss, replace(instance, sampler=start), seed, draw + 1)):
                    break
    except (KltestError, ValueError):  # it fails, or logs a KL in one call only: graded under both samplers
        return True
    return False


def _differ(one: tuple[str, list[Tensor]], other: tuple[str, list[Tensor]]) -> bool:
    limit = TOLERANCES[one[0]].influence
    return any(
        here.shape != there.shape or not _close(here.double(), there.double(), limit)
        for here, there in zip(one[1], other[1], strict=True)
    )


def _results(loss: Loss, instance: Instance, seed: int, draw: int) -> tuple[str, list[Tensor]]:
    """Return the precision of one call, and its value, its logged value if there is one, and its gradients."""
    rollout = Rollout.of(instance, sampler="stale", padding=seed, centre="batch").take(instance.paths.by_length[:ROWS])
    with preserved(draw):
        outcome = loss.for_experiments()(rollout)
    metrics = [] if outcome.metric is None else [outcome.metric]
    return outcome.dtype, [outcome.objective.detach(), *metrics, *at_leaves(loss, outcome.objective, rollout)]


def _may_read_rewards(loss: Loss) -> bool:
    return bool(loss.takes & {*ROW_FIELDS, "rollout"})


def batches(seed: int, group: int | None, rows: Sequence[int] = SEVERAL, **options: Any) -> Iterator[Rollout]:
    """Yield batches of several sizes, for losses that take batches of some sizes only; the largest first.

    Args:
        seed: Seed of the instance and its padding.
        group: Rollouts in a group, if that was asked for.
        rows: Sizes, if it was not.
        options: Of `Rollout.of`.
    """
    everything = Rollout.of(instances(ENVIRONMENT, seed)[0], padding=seed, **options)
    for many in (3 * group, group) if group else rows:
        order = torch.arange(many) * 7 % len(everything)  # rows of all lengths, in no order
        yield everything.take(order).replace(group=torch.arange(many) // (group or max(many // 6, 1)))


def _first_taken(loss: Loss, batches: list[Rollout], beta: float | None = None) -> tuple[Rollout | None, Tensor | None]:
    """Return the first batch that the loss takes, and its gradient there with rewards of zero."""
    for batch in batches:
        try:
            return batch, _gradient(loss, with_rewards(batch, torch.zeros(len(batch)).double()), beta)
        except KltestError:
            continue
    return None, None


def _gradient(loss: Loss, rollout: Rollout, beta: float | None = None) -> Tensor:
    """The gradient at all leaves of what one call returns, in one row of numbers."""
    return called(loss, rollout, beta)[2]


def called(
    loss: Loss, rollout: Rollout, beta: float | None = None, seed: int | None = None
) -> tuple[Result, Tensor, Tensor]:
    """Call a loss once, as it is before it is placed.

    Returns:
        What it returned; its value, (B,) summed over tokens or a scalar; and its gradient at all leaves, in one row.
    """
    rollout = rollout.replace()
    live = rollout.peek("mask") != 0
    with preserved(seed):
        found = loss.for_experiments().returned(rollout, beta)
    each = reduce(found.loss, rollout.peek("mask"))
    parts = at_leaves(loss, each.sum(), rollout)
    row = torch.cat([part.where(live if part.dim() == 2 else live[..., None], 0.0).flatten() for part in parts])
    return found, each.detach().double(), row


def _limit(loss: Loss, rollout: Rollout) -> float:
    with preserved():
        return TOLERANCES[loss.for_experiments()(rollout.replace()).dtype].groups


def _close(one: Tensor, other: Tensor, limit: float) -> bool:
    return bool((one - other).abs().max() <= limit * max(float(one.abs().max()), float(other.abs().max())))
