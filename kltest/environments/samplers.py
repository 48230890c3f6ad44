"""Samplers: the policies that draw rollouts, by the names that `--sampler` takes.

Beside `current` (the policy itself) and `stale` (another policy, which `old_logp` belongs to) there are samplers of
which a trainer knows less than it thinks. With these it has computed `old_logp` and `prox_logp` by the policy that it
trains, so that ratios to them are 1; what the engine tells of its tokens is `rollout_logp`.

- `engine`: an engine's kernels and precision give slightly other log-probs.
- `truncated:p=P,k=K`: tokens come from the K likeliest, and of these from the fewest that hold P of the probability.
  The engine tells log-probs after renormalising, and before it with `renormalised=no`.
- `versions`: the weights change inside a rollout. Its first half is the stale sampler's, the rest the policy's.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kltest.environments.instance import Instance
from kltest.environments.policies import table
from kltest.errors import UsageError
from kltest.samplers import ENGINE, Truncation

# An engine's log-probs lie this share of the way from the policy's to the stale sampler's.
NEAR = 0.1
# Shares of probability that are equal up to rounding.
ROUNDED = 1e-12


def drawn_by(sampler: str, instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return instances whose rollouts a sampler draws; the same ones for "current" and "stale".

    Raises:
        UsageError: There is no such sampler, or it changes nothing in this environment.
    """
    given = tuple(instances)
    if sampler in ("current", "stale"):
        return given
    if sampler == ENGINE:
        return tuple(_from(i, table(i.policy + NEAR * (i.sampler - i.policy))) for i in given)
    if sampler == "versions":
        return tuple(_from(i, np.where(_first_half(i)[:, None], i.sampler, i.policy)) for i in given)
    cut = Truncation.named(sampler)
    kept = [kept_tokens(cut, i.policy) for i in given]
    if all(some.all() for some in kept):
        environment = given[0].environment
        raise UsageError(
            f"sampler {sampler!r} leaves every token in environment {environment.name!r}, which has "
            f"{environment.vocabulary} to choose from: take k=2 or a smaller p"
        )
    return tuple(_truncated(i, some, cut) for i, some in zip(given, kept, strict=True))


def kept_tokens(cut: Truncation, log_probs: np.ndarray) -> np.ndarray:
    """Return which tokens (C, V) bool of log-probs (C, V) a truncation can draw; the likeliest always."""
    order = np.argsort(-log_probs, axis=1, kind="stable")
    likeliest = np.exp(np.take_along_axis(log_probs, order, axis=1))
    likeliest[:, cut.k or likeliest.shape[1] :] = 0.0
    before = likeliest.cumsum(axis=1) - likeliest
    kept = np.zeros(log_probs.shape, dtype=bool)
    reached = before < cut.p * likeliest.sum(axis=1, keepdims=True) * (1 - ROUNDED)
    np.put_along_axis(kept, order, reached & (likeliest > 0), axis=1)
    return kept


def kept_mass(instance: Instance) -> tuple[float, float]:
    """Return the probability S of what a truncated sampler can draw: of a token at least, and of a whole rollout."""
    able = np.isfinite(instance.sampler)
    visited = np.unique(instance.paths.contexts[instance.paths.mask])
    of_token = np.where(able, np.exp(instance.policy), 0.0).sum(axis=1)[visited]
    drawn = instance.rollout_weights("stale") > 0
    return float(of_token.min()), float(instance.rollout_weights("current")[drawn].sum())


def _from(instance: Instance, sampler: np.ndarray) -> Instance:
    return replace(instance, sampler=sampler, trainer=instance.policy)


def _truncated(instance: Instance, kept: np.ndarray, cut: Truncation) -> Instance:
    mass = np.where(kept, np.exp(instance.policy), 0.0).sum(axis=1, keepdims=True)
    sampler = np.where(kept, instance.policy - np.log(mass), -np.inf)
    # What is never drawn is told something finite all the same: it weighs nothing, and 0·∞ would be no number.
    told = np.where(kept, sampler, instance.policy) if cut.renormalised else instance.policy
    return replace(_from(instance, sampler), engine=told)


def _first_half(instance: Instance) -> np.ndarray:
    """Return which contexts (C,) bool are of the first half of the steps, the step in the middle included."""
    environment = instance.environment
    steps = list(environment.reachable())
    half = -(-len(steps) // 2)
    early = np.any(steps[:half], axis=0)
    if half < len(steps) and (early & np.any(steps[half:], axis=0)).any():
        raise UsageError(
            f"sampler 'versions' needs an environment in which a prefix says how many tokens there were, and "
            f"{environment.name!r} comes back to its states: take bandit, sequence, ragged or turns"
        )
    return early
