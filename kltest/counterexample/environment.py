"""Environments small enough for pencil and paper, given by their probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kltest.environments import Instance, ragged, sequence

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
        lines = []
        for context in range(len(self.policy)):
            parts = [
                f"{name} = ({', '.join(f'{p:.6g}' for p in table[context])})"
                for name, table in tables.items()
                if table is not None
            ]
            lines.append(f"  {self.prefix(context)}: {', '.join(parts)}")
        kind = f"{self.length} token{'s' * (self.length > 1)}{' at most' * self.ends}"
        return "\n".join([f"{kind} of {len(self.policy[0])} actions", *lines])

    def prefix(self, context: int) -> str:
        """Name a context by the actions that lead to it."""
        branches = len(self.policy[0]) - self.ends
        depth, first = 0, 0
        while context >= first + branches**depth:
            first += branches**depth
            depth += 1
        actions = [(context - first) // branches**later % branches for later in reversed(range(depth))]
        return f"after {' '.join(map(str, actions))}" if depth else "root"


def kind(length: int, ends: bool) -> str:
    """Return the name that grading has for environments of a length, fixed or not."""
    return "bandit" if length == 1 else "ragged" if ends else "sequence"
