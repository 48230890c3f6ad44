"""The exact expected gradient and the exact per-rollout variance of any loss, over every rollout of an environment."""

import numpy as np

from kltest.environments import Instance, Paths
from kltest.errors import KltestError, UsageError
from kltest.loss.calling import Loss
from kltest.moments.caller import Caller
from kltest.moments.dynamic_programming import by_tokens
from kltest.moments.moments import Moments, Reduction
from kltest.moments.reduction import probe
from kltest.moments.totals import Totals
from kltest.rollout import Rollout

# More rollouts than this are called in large batches, if the loss treats rows apart.
ONE_BY_ONE = 300
MOST_SINGLES = 20_000
# Numbers in one field of a chunk: few enough to stay in the processor's cache from one operation to the next.
CHUNK = 2**17
POOL = 3
# Chunks in which it is proved again that rows are called together.
PROVED = 2


def exact(
    loss: Loss,
    instance: Instance,
    sampler: str = "current",
    *,
    padding: int = 0,
    seed: int = 0,
    known: Reduction | None = None,
    logs: bool = True,
) -> Moments:
    """Exact E[ĝ] and E‖ĝ‖² of a batch of one rollout: the sum over all rollouts of p(i)·ĝ(i) and p(i)·‖ĝ(i)‖².

    First the loss is called on single rollouts, pairs and larger batches, to learn how it combines rows. Then each
    rollout is called alone, which is the definition. More than ONE_BY_ONE rollouts are called in large batches instead,
    if the loss was seen to treat rows apart; single ones are compared again. A loss that works token by token, as its
    SPEC declares or as every step of its calls shows (kltest.loss.watched), is called once for each context and token
    instead (kltest.moments.dynamic_programming); on random rollouts that is compared with its own calls.

    Args:
        loss: The loss, bound to a rollout's fields.
        instance: Environment with policy, reference and sampler, C contexts and V tokens.
        sampler: "current" draws rollouts from the policy, "stale" from the sampler.
        padding: Seed of what stands at padded positions.
        seed: Seed of the rows on which the loss is tried.
        known: How the loss combines the rows of another instance, or of another sampler. If it treated them apart, all
            rollouts are called in one batch, in two halves of it, and a few alone; only if these differ is each called
            alone, or if it logs one number a call, which takes no gradient. If it coupled them, that is not tried again
            where rollouts are few.
        logs: False if what the loss returns and logs for each rollout is not needed.

    Returns:
        Moments of the gradient with respect to logits (C, V).

    Raises:
        BatchOfOneError: The loss cannot be called with one rollout.
        NonDeterministicError: The loss gives one batch two gradients.
        TargetError: The loss fails, or its gradient is not finite.
        UsageError: The loss couples rows, and there are more than MOST_SINGLES rollouts.
        InvalidEnvironmentError: The environment cannot be enumerated.
    """
    paths = instance.paths
    large = len(paths) > ONE_BY_ONE
    if large and (found := by_tokens(loss, instance, sampler, padding, seed)):
        return found
    generator = np.random.default_rng([seed, len(paths)])
    tried = paths.take(_pool(paths, generator)) if large else paths
    base = Rollout.of(instance, tried, sampler=sampler, padding=padding)
    apart = known not in (None, "coupled")
    if apart or (known == "coupled" and not large):
        caller = Caller(loss, base)
        if not apart:
            caller.found_coupled("another instance")
    else:
        caller = probe(loss, base, generator)
    if large or apart:
        caller.logs = logs and not large
        if found := _together(caller, instance, sampler, padding, generator):
            return found
        if len(paths) > MOST_SINGLES:
            raise UsageError(
                f"{loss.name} couples the rows of a batch ({caller.coupling}), so that each rollout must be called "
                f"alone; environment {instance.environment.name!r} has {len(paths)} and at most {MOST_SINGLES} are. "
                "Use a smaller environment"
            )
        caller.take_from(Rollout.of(instance, sampler=sampler, padding=padding))
    totals = Totals(instance, distinct=instance.environment.tree)
    for called in caller.one_by_one(np.arange(len(paths))[:, None], generator):
        totals.add(paths, instance.rollout_weights(sampler), called)
    return totals.moments(caller)


def _pool(paths: Paths, generator: np.random.Generator) -> np.ndarray:
    """A few rows that differ in every way in which rollouts can: length, prompt, tokens."""
    chosen = generator.choice(len(paths), size=POOL, replace=False)
    if paths.padded:
        chosen = np.append(chosen, [paths.lengths.argmin(), paths.lengths.argmax()])
    if len(ends := np.unique(paths.prompt[[0, -1]])) > 1:
        mates = [generator.choice(np.flatnonzero(paths.prompt == prompt), size=2) for prompt in ends]
        chosen = np.append(chosen, np.concatenate(mates))
    return np.unique(chosen)


def _together(
    caller: Caller, instance: Instance, sampler: str, padding: int, generator: np.random.Generator
) -> Moments | None:
    """Large batches, each row's gradient scaled to what it gives alone; None if that is not to be had."""
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    totals = Totals(instance, distinct=instance.environment.tree)
    width = paths.shape[1] * (instance.environment.vocabulary if caller.wide else 1)
    size = max(1, CHUNK // width)
    checked = set(generator.integers(-(-len(paths) // size), size=PROVED).tolist())
    for number, (rows, part) in enumerate(paths.split(size)):
        if not caller.shares:
            return None
        caller.take_from(Rollout.of(instance, part, sampler=sampler, padding=padding))
        # Until a gradient is not zero, a sum cannot be told from a mean.
        prove = number in checked or len(caller.shares) > 1
        try:
            called = caller.joint(np.arange(len(part))[:, None], generator, prove=prove)
        except KltestError:
            if len(paths) > ONE_BY_ONE:
                raise
            return None  # it is raised again where each is called alone
        if called is None:
            if not caller.shares:
                caller.found_coupled(f"a batch of {len(part)} rollouts")
            return None
        totals.add(part, weights[rows], called, rows.start)
    return totals.moments(caller)
