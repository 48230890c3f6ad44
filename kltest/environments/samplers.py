"""Samplers: the policies that draw rollouts, by the names that `--sampler` takes.

Beside `current` (the policy itself) and `stale` (another policy, which `old_logp` belongs to) there are samplers of
which a trainer knows less than it thinks. With these it has computed `old_logp` and `prox_logp` by the policy that it
trains, so that ratios to them are 1; what the engine tells of its tokens is `rollout_logp`.

- `engine`: an engine's kernels and precision give slightly other log-probs.
- `truncated:p=P,k=K`: tokens come from the K likeliest, and of these from the fewest that hold P of the probability.
  The engine tells log-probs after renormalising, and before it with `renormalised=no`.
- `versions`: the weights change inside a rollout. Its first half is the stale sampler's, the rest the policy's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kltest.environments.instance import Instance
from kltest.environments.policies import table
from kltest.errors import UsageError, did_you_mean

NAMES = ("current", "stale", "engine", "versions", "truncated:p=P,k=K")
ENGINE, TRUNCATED = "engine", "truncated"
# An engine's log-probs lie this share of the way from the policy's to the stale sampler's.
NEAR = 0.1
# Shares of probability that are equal up to rounding.
ROUNDED = 1e-12
_SWITCH = {"yes": True, "no": False}


@dataclass(frozen=True)
class Truncation:
    """Sampling from the `k` likeliest tokens, then from the fewest that hold the share `p` of the probability."""

    p: float = 1.0
    k: int | None = None
    renormalised: bool = True

    @classmethod
    def named(cls, name: str) -> "Truncation":
        """Read `truncated:p=0.9,k=2`. Raises UsageError if something else stands there."""
        given = dict(part.partition("=")[::2] for part in name.partition(":")[2].replace(" ", "").split(",") if part)
        read: dict[str, Callable[[str], Any]] = {"p": float, "k": int, "renormalised": _SWITCH.__getitem__}
        try:
            found = cls(**{key: read[key](value) for key, value in given.items()})
        except (KeyError, ValueError):
            found = cls(p=0.0)
        if not 0 < found.p <= 1 or (found.k is not None and found.k < 1) or not {"p", "k"} & {*given}:
            raise UsageError(
                f"sampler {name!r}: write truncated:p=0.9, truncated:k=2 or truncated:p=0.9,k=2, with p a share of the "
                "probability (0 < p ≤ 1) and k a number of tokens; ,renormalised=no if the engine tells log-probs from "
                "before the cut"
            )
        return found

    def kept(self, log_probs: np.ndarray) -> np.ndarray:
        """Return which tokens (C, V) bool of log-probs (C, V) can be drawn; the likeliest always."""
        order = np.argsort(-log_probs, axis=1, kind="stable")
        likeliest = np.exp(np.take_along_axis(log_probs, order, axis=1))
        likeliest[:, self.k or likeliest.shape[1] :] = 0.0
        before = likeliest.cumsum(axis=1) - likeliest
        kept = np.zeros(log_probs.shape, dtype=bool)
        reached = before < self.p * likeliest.sum(axis=1, keepdims=True) * (1 - ROUNDED)
        np.put_along_axis(kept, order, reached & (likeliest > 0), axis=1)
        return kept


def check(name: str) -> str:
    """Return the name of a sampler, without spaces. Raises UsageError if there is none of this name."""
    name = name.replace(" ", "")
    if name.partition(":")[0] == TRUNCATED:
        Truncation.named(name)
    elif name not in NAMES:
        raise UsageError(f"there is no sampler {name!r}; {did_you_mean(name, NAMES)}they are {', '.join(NAMES)}")
    return name


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
    cut = Truncation.named(check(sampler))
    kept = [cut.kept(i.policy) for i in given]
    if all(some.all() for some in kept):
        environment = given[0].environment
        raise UsageError(
            f"sampler {sampler!r} leaves every token in environment {environment.name!r}, which has "
            f"{environment.vocabulary} to choose from: take k=2 or a smaller p"
        )
    return tuple(_truncated(i, some, cut) for i, some in zip(given, kept, strict=True))


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
