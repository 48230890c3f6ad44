"""Environments small enough for pencil and paper, with gradients by the definition: every batch is called by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch

from kltest.environments import Instance, Paths, ragged, sequence
from kltest.identify.combinations import Combination
from kltest.loss.calling import Loss
from kltest.moments import exact_batches
from kltest.moments.differentiate import RowGradients, differentiate
from kltest.moments.projection import each_gradient
from kltest.moments.tolerances import TOLERANCES
from kltest.report import CounterExample, Prefix
from kltest.rollout import Rollout
from kltest.truth import combine, gradient

Probabilities = Sequence[Sequence[float]]


@dataclass(frozen=True)
class SmallEnvironment:
    """A token sequence given by its probabilities, a row per context: the root first, then prefixes in order.

    Rollouts have `length` tokens; with `ends`, at most that many, and the last action ends the rollout. `sampler`
    defaults to the policy; `reward` (contexts, actions) to 0.
    """

    policy: Probabilities
    reference: Probabilities
    sampler: Probabilities | None = None
    length: int = 1
    ends: bool = False
    reward: Probabilities | None = None

    def instance(self) -> Instance:
        """Return the environment with its policies, ready to be enumerated."""
        build = ragged if self.ends else sequence
        reward = None if self.reward is None else np.array(self.reward, dtype=float)
        environment = build(len(self.policy[0]), self.length, reward=reward)
        tables = (self.policy, self.reference, self.policy if self.sampler is None else self.sampler)
        return Instance.of(environment, *(np.log(np.array(table, dtype=float)) for table in tables))

    def words(self) -> str:
        """Describe the environment: its size, then the probabilities of every context on a line."""
        tables = {"π": self.policy, "ref": self.reference, "sampler": self.sampler}
        length = f"{self.length} token{'s' * (self.length > 1)}{' at most' * self.ends}"
        lines = [f"{length} of {len(self.policy[0])} actions"]
        for context in range(len(self.policy)):
            rows = {name: ", ".join(f"{p:.6g}" for p in table[context]) for name, table in tables.items() if table}
            lines.append(f"  {self.prefix(context)}: {', '.join(f'{name} = ({row})' for name, row in rows.items())}")
        return "\n".join(lines)

    def prefix(self, context: int) -> str:
        """Name a context by the actions that lead to it."""
        branches = range(len(self.policy[0]) - self.ends)
        prefixes = (actions for depth in range(self.length) for actions in product(branches, repeat=depth))
        actions = next(islice(prefixes, context, None))
        return f"after {' '.join(map(str, actions))}" if actions else "root"


def kind(length: int, ends: bool) -> str:
    """Return the name that grading has for environments of a length, fixed or not."""
    return "bandit" if length == 1 else "ragged" if ends else "sequence"


class Shown(NamedTuple):
    """A counter-example, the dtype of the loss, and True if its gradient differs from the declared one."""

    example: CounterExample
    dtype: str
    differs: bool


def measure(
    loss: Loss, instance: Instance, sampler: str, batch: int = 1, *, summed: bool = False, columns: int = 0
) -> tuple[np.ndarray, np.ndarray, RowGradients]:
    """Return the expectation and the standard deviation (C, V) of the gradient that one batch gives, and a call.

    Every ordered batch of a size is called, with `columns` columns of padding added. If `summed`, the loss adds up the
    rows of a batch, and its gradient is divided by their number.
    """
    paths, chance = instance.paths, instance.rollout_weights(sampler)
    mean, square = np.zeros(instance.policy.shape), np.zeros(instance.policy.shape)
    for rows in product(range(len(paths)), repeat=batch):
        part = paths.take(np.array(rows))
        rollout, live = rollouts(instance, part, sampler, batch), part.mask if part.padded else None
        if columns:
            rollout, live = rollout.wider(columns), np.pad(part.mask, ((0, 0), (0, columns)))
        called = differentiate(loss, rollout, live)
        leaves = (None if leaf is None else leaf[:, : part.tokens.shape[1]] for leaf in (called.logp, called.logits))
        reached = each_gradient(part, instance.policy, *leaves).sum(axis=0)
        reached /= batch if summed else 1
        mean += chance[list(rows)].prod() * reached
        square += chance[list(rows)].prod() * reached**2
    return mean, np.sqrt(np.maximum(square - mean**2, 0.0)), called


def at_once(loss: Loss, instance: Instance, sampler: str, *, summed: bool) -> tuple[np.ndarray, RowGradients]:
    """Return the (C, V) expected gradient of a loss that treats rows apart, and its one call on all rollouts."""
    paths = instance.paths
    factor = 1.0 if summed else float(len(paths))
    called = differentiate(loss, rollouts(instance, paths, sampler, 1), paths.mask if paths.padded else None, factor)
    each = each_gradient(paths, instance.policy, called.logp, called.logits)
    return np.einsum("n,ncv->cv", instance.rollout_weights(sampler), each), called


def rollouts(instance: Instance, paths: Paths, sampler: str, batch: int) -> Rollout:
    """Return a batch of rollouts; padded positions hold the log-probs of the root's first action."""
    base = Rollout.of(instance, paths, sampler=sampler, centre="environment" if batch == 1 else "batch")
    if not paths.padded:
        return base
    tables = {"": instance.policy, "ref_": instance.reference, "old_": instance.behaviour(sampler)}
    reads = {"logp": paths.chosen, "logits": paths.everything}
    padded = {f"{prefix}{name}": torch.from_numpy(reads[name](tables[prefix])) for prefix in tables for name in reads}
    return base.replace(tokens=torch.from_numpy(paths.tokens.copy()), **padded)


def adds_up(loss: Loss, environment: SmallEnvironment, sampler: str, batch: int) -> bool:
    """True if a loss that couples rows adds them up in batches of this size; a batch of one is never divided."""
    return batch > 1 and exact_batches(loss, environment.instance(), sampler, batch, grouped=True).added_up


def differs(found: np.ndarray, target: np.ndarray, instance: Instance, limit: float) -> bool:
    """True if a gradient is off by more than `limit` times the larger of ‖target‖ and ‖∇KL(π‖ref)‖."""
    rounding = TOLERANCES["float64"].gradient
    scale = max(float(np.linalg.norm(target)), float(np.linalg.norm(gradient("reverse_kl", instance))))
    # Both are zero if the policy is the reference; then the gradient itself is the scale.
    scale = scale if scale > rounding else float(np.linalg.norm(found))
    return scale > rounding and float(np.linalg.norm(found - target)) > limit * scale


def counter_example(
    loss: Loss,
    declared: Combination,
    environment: SmallEnvironment,
    sampler: str,
    batch: int,
    limit: float,
    *,
    summed: bool = False,
) -> Shown:
    """Return the environment with both gradients."""
    instance = environment.instance()
    found, std, called = measure(loss, instance, sampler, batch, summed=summed)
    truth = combine(declared, instance)
    contexts = []
    for context in range(len(environment.policy)):
        tables = (environment.policy, environment.reference, environment.sampler, environment.reward)
        rows: list[Any] = [table and list(table[context]) for table in tables]
        numbers = (_plain(one[context]) for one in (truth, found, std))
        contexts.append(Prefix(environment.prefix(context), *rows, *numbers))
    name, actions = kind(environment.length, environment.ends), len(environment.policy[0])
    size = (environment.length, actions, environment.ends, batch)
    example = CounterExample(name, sampler, *size, called.outcome.returned, summed, contexts)
    differ = differs(found, truth, instance, max(limit, TOLERANCES[called.dtype].gradient))
    return Shown(example, called.dtype, differ)


def _plain(values: np.ndarray) -> list[float]:
    """Plain numbers to 14 digits: the others are rounding, and so is all of a number below 1e-15."""
    return [0.0 if abs(value) < 1e-15 else float(f"{value:.14g}") for value in values]
