"""The environment class: contexts, tokens and transitions. All environments are instances of it.

A *context* is what the policy conditions on: a row of its table of logits. Token `v` in context `c` leads to
`successors[c, v, k]` with probability `probabilities[c, v, k]`; a successor of −1 ends the rollout, and so does the
horizon. A bandit has one context; a token sequence has one context per prefix; an n-gram shares contexts between
prefixes; in a Markov decision process the contexts are the states.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kltest.environments.paths import Level, Paths, Tree
from kltest.errors import InvalidEnvironmentError

if TYPE_CHECKING:
    from scipy import sparse

    Matrix = np.ndarray | sparse.csr_array | sparse.csc_array

END = -1
# Entries of a transition matrix that is multiplied as a dense one.
DENSE = 2**15
# Steps whose prefixes are shared by at least this many rollouts, on average, form one level of the tree.
FEW_ROWS = 32


def memory_limit() -> float:
    """Return half of the machine's memory, in bytes."""
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, eq=False)
class Environment:
    """A finite-horizon environment with C contexts and V tokens.

    Attributes:
        name: Name for messages.
        horizon: Largest number T of tokens in a rollout.
        start: First context (P,) int of each prompt.
        prompts: Probability (P,) of each prompt.
        successors: Contexts (C, V, K) int to which a token may lead; −1 ends the rollout.
        probabilities: Probabilities (C, V, K) of the successors.
        reward: Reward (C, V) of a token in a context; a rollout earns the sum.
        tree: A context occurs at most once in a rollout, and always at the same time step.

    Raises:
        InvalidEnvironmentError: Shapes disagree, numbers are not finite, or probabilities do not sum to 1.
    """

    name: str
    horizon: int
    start: np.ndarray
    prompts: np.ndarray
    successors: np.ndarray
    probabilities: np.ndarray
    reward: np.ndarray
    tree: bool

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise InvalidEnvironmentError(f"environment {self.name!r}: {problem}")

    def _problem(self) -> str | None:
        """Return the first fault of the arrays that describe this environment, or None."""
        if self.successors.ndim != 3 or 0 in self.successors.shape:
            return f"successors must be (contexts, tokens, branches), none of them 0, not {self.successors.shape}"
        contexts, vocabulary, _ = self.successors.shape
        if self.horizon < 1:
            return f"the horizon must be at least 1, not {self.horizon}"
        if self.probabilities.shape != self.successors.shape:
            return f"probabilities {self.probabilities.shape} and successors {self.successors.shape} differ in shape"
        if self.reward.shape != (contexts, vocabulary):
            return f"the reward must have shape {(contexts, vocabulary)}, not {self.reward.shape}"
        if not np.isfinite(self.reward).all():
            return "the reward must be finite; it contains NaN or infinity"
        # Each comparison is false for NaN, so that NaN is refused.
        if self.start.shape != self.prompts.shape or not abs(float(self.prompts.sum()) - 1) <= 1e-12:
            return "every prompt needs one start context and one probability, and the probabilities must sum to 1"
        if not ((self.prompts >= 0).all() and (self.probabilities >= 0).all()):
            return "probabilities must not be negative or NaN"
        if not np.abs(self.probabilities.sum(axis=2) - 1).max() <= 1e-12:
            return "the successors' probabilities of every context and token must sum to 1"
        if (self.successors < END).any() or (self.successors >= contexts).any():
            return f"successors must be −1 (the rollout ends) or a context below {contexts}"
        if (self.start < 0).any() or (self.start >= contexts).any():
            return f"start contexts must lie in 0 … {contexts - 1}"
        told_apart = np.sort(np.where(self.probabilities > 0, self.successors, END - 1 - np.arange(self.branches)))
        if (told_apart[:, :, 1:] == told_apart[:, :, :-1]).any():
            return "a context and token list the same successor twice: add the two probabilities up"
        return None

    @property
    def n_contexts(self) -> int:
        """Number of contexts, C."""
        return self.successors.shape[0]

    @property
    def vocabulary(self) -> int:
        """Number of tokens, V."""
        return self.successors.shape[1]

    @property
    def branches(self) -> int:
        """Number of successors that are listed for a context and token, the end of the rollout included."""
        return self.successors.shape[2]

    @cached_property
    def transition(self) -> "sparse.csr_array":
        """Transition matrix (C·V, C), row c·V + v; the rest of a row's sum to 1 is the probability of ending."""
        from scipy import sparse  # slow to import, and most environments that are graded are small

        rows, columns, chances = self._transitions
        pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=self.n_contexts * self.vocabulary))])
        matrix = sparse.csr_array((chances, columns, pointers), shape=(len(pointers) - 1, self.n_contexts))
        matrix.sum_duplicates()
        return matrix

    @cached_property
    def products(self) -> "tuple[Matrix, Matrix]":
        """The transition matrix and its transpose, each in the form that multiplies fastest: dense if it is small."""
        shape = self.n_contexts * self.vocabulary, self.n_contexts
        if shape[0] * shape[1] > DENSE:
            return self.transition, self.transition.T
        rows, columns, chances = self._transitions
        dense = np.bincount(rows * shape[1] + columns, chances, shape[0] * shape[1]).reshape(shape)
        return dense, np.ascontiguousarray(dense.T)

    @property
    def _transitions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, column and probability of each entry of the transition matrix, row by row."""
        cells, branches = np.nonzero(self.successors.reshape(-1, self.branches) != END)
        at = cells, branches
        columns, chances = (one.reshape(-1, self.branches)[at] for one in (self.successors, self.probabilities))
        return cells, columns, chances

    def start_distribution(self) -> np.ndarray:
        """Return the probability (C,) of each context at the first time step."""
        return np.bincount(self.start, weights=self.prompts, minlength=self.n_contexts).astype(float)

    def reachable(self) -> Iterator[np.ndarray]:
        """Yield the contexts (C,) bool that can be reached at time 0, 1, …, horizon − 1."""
        here, settled = self.start_distribution() > 0, False
        for _ in range(self.horizon - 1):
            yield here
            if not settled:
                following = self.products[1] @ np.repeat(here.astype(float), self.vocabulary) > 0
                here, settled = following, np.array_equal(following, here)
        yield here

    def count(self) -> float:
        """Return the number of rollouts as a float, since it may exceed any integer type."""
        reachable = self.probabilities > 0
        ends = (reachable & (self.successors == END)).sum(axis=(1, 2)).astype(float)
        goes_on = reachable & (self.successors != END)
        context, followed = np.nonzero(goes_on)[0], self.successors[goes_on]
        last = np.full(self.n_contexts, float(self.vocabulary))
        with np.errstate(over="ignore"):
            counts = self.backwards(
                lambda later: ends + np.bincount(context, later[followed], self.n_contexts), last, self.horizon - 1
            )
        return float(counts[self.start[self.prompts > 0]].sum())

    def backwards(
        self, step: Callable[[np.ndarray], np.ndarray], last: np.ndarray, steps: int | None = None
    ) -> np.ndarray:
        """Apply a step to numbers (C,) once for each time step (or `steps`), or until they do not change any more."""
        for _ in range(self.horizon if steps is None else steps):
            last, before = step(last), last
            if np.array_equal(last, before):
                break
        return last

    def enumerate(self) -> Paths:
        """Enumerate every rollout once, in prefix order.

        Raises:
            InvalidEnvironmentError: They need more than half of the machine's memory; the message names their number.
        """
        count, memory = self.count(), memory_limit()
        needed = count * (17 * self.horizon + 32) * 2
        if not needed <= memory:
            raise InvalidEnvironmentError(
                f"environment {self.name!r} has {count:.6g} rollouts of up to {self.horizon} tokens; enumerating them "
                f"needs about {needed / 2**30:.3g} GiB and {memory / 2**30:.3g} GiB are allowed. Use a smaller "
                "vocabulary or horizon, dynamic programming (kltest.moments.dynamic), or sampling."
            )
        prompt = np.flatnonzero(self.prompts > 0)
        current, log_weight = self.start[prompt].astype(np.int64), np.log(self.prompts[prompt])
        grown: list[tuple[np.ndarray, np.ndarray | None, np.ndarray]] = []
        for parent, cell, live, weight in self._expand(current, log_weight):
            grown.append((cell, live, parent))
            prompt, log_weight = prompt[parent], weight
        return Tree(_levels(grown), self.vocabulary, prompt, log_weight)

    def _expand(self, current: np.ndarray, log_weight: np.ndarray) -> Iterator[tuple[Any, ...]]:
        """Extend all partial rollouts by one step at a time; a finished one is kept, with a dead token."""
        _, vocabulary, branches = self.successors.shape
        successors = self.successors.reshape(-1, branches)
        probabilities = self.probabilities.reshape(-1, branches)
        for step in range(self.horizon):
            last = step == self.horizon - 1
            width = vocabulary if last else vocabulary * branches
            ended = current == END
            children = np.where(ended, 1, width)
            parent = np.repeat(np.arange(len(current)), children)
            child = np.arange(len(parent)) - (np.cumsum(children) - children)[parent]
            live = ~ended[parent]
            cell = np.where(live, current[parent], 0) * vocabulary + (child if last else child // branches)
            log_weight = log_weight[parent]
            if not last:
                branch = child % branches
                chance = np.where(live, probabilities[cell, branch], 1.0)
                current = np.where(live, successors[cell, branch], END)
                if not (kept := chance > 0).all():
                    columns = parent, cell, live, current, log_weight, chance
                    parent, cell, live, current, log_weight, chance = (column[kept] for column in columns)
                log_weight = log_weight + np.log(chance)
            yield parent, cell, None if live.all() else live, log_weight

    def sample(self, log_probs: np.ndarray, n: int, generator: np.random.Generator) -> Paths:
        """Draw rollouts.

        Args:
            log_probs: Log-probs (C, V) of the sampler.
            n: Number of rollouts.
            generator: Source of randomness.
        """
        prompt = generator.choice(len(self.prompts), size=n, p=self.prompts)
        current = self.start[prompt].astype(np.int64)
        log_weight = np.log(self.prompts[prompt])
        shape = (n, self.horizon)
        contexts, tokens = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        for step in range(self.horizon):
            live = current != END
            if not live.any():
                break
            context = np.where(live, current, 0)
            chances = np.exp(log_probs[context]).cumsum(axis=1)
            token = (generator.random((n, 1)) * chances[:, -1:] >= chances).sum(axis=1).clip(0, self.vocabulary - 1)
            arrivals = self.probabilities[context, token].cumsum(axis=1)
            branch = (generator.random((n, 1)) * arrivals[:, -1:] >= arrivals).sum(axis=1)
            branch = branch.clip(0, self.successors.shape[2] - 1)
            contexts[:, step], tokens[:, step] = np.where(live, context, 0), np.where(live, token, 0)
            mask[:, step] = live
            if step < self.horizon - 1:
                log_weight += np.where(live, np.log(self.probabilities[context, token, branch]), 0.0)
            current = np.where(live, self.successors[context, token, branch], END)
        return Paths(contexts, tokens, mask, prompt, log_weight)

    def returns(self, paths: Paths) -> np.ndarray:
        """Return the total reward (N,) of each rollout."""
        return paths.along(self.reward)

    def expected_returns(self, log_probs: np.ndarray) -> np.ndarray:
        """Return the expected total reward (P,) of each prompt's rollouts under log-probs (C, V)."""
        chances, shape = np.exp(log_probs), self.reward.shape

        def step(value: np.ndarray) -> np.ndarray:
            return (chances * (self.reward + (self.products[0] @ value).reshape(shape))).sum(axis=1)

        return self.backwards(step, np.zeros(self.n_contexts))[self.start]


def _levels(grown: list[tuple[np.ndarray, np.ndarray | None, np.ndarray]]) -> tuple[Level, ...]:
    """Build levels from each step's (cells, live, parents); rows of a node are counted from the leaves up."""
    levels: list[Level] = []
    rows: np.ndarray | int = 1
    leaves = len(grown[-1][0])
    for step in reversed(range(len(grown))):
        cell, live, parent = grown[step]
        if len(cell) * FEW_ROWS <= leaves and step > 0:
            levels.append(_stem(grown[: step + 1], rows))
            break
        levels.append(Level(slice(step, step + 1), cell[:, None], rows, None if live is None else live[:, None]))
        counts = np.bincount(parent, np.broadcast_to(rows, parent.shape)).astype(np.int64)
        rows = int(counts[0]) if (counts == counts[0]).all() else counts
    return tuple(reversed(levels))


def _stem(grown: list[tuple[np.ndarray, np.ndarray | None, np.ndarray]], rows: np.ndarray | int) -> Level:
    """Merge the first steps into one level, whose nodes are those of the last of them."""
    node = np.arange(len(grown[-1][0]))
    cells: list[np.ndarray] = []
    live: list[np.ndarray] = []
    for cell, alive, parent in reversed(grown):
        cells.append(cell[node])
        live.append(np.ones(len(node), dtype=bool) if alive is None else alive[node])
        node = parent[node]
    alive = np.stack(live[::-1], axis=1)
    return Level(slice(0, len(grown)), np.stack(cells[::-1], axis=1), rows, None if alive.all() else alive)
