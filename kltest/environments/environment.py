"""The one kind of world: contexts, tokens, and where a token leads. Everything else is a way to build it.

A *context* is what the policy conditions on: a row of its table of logits. Choosing token `v` in context `c` leads
to `successors[c, v, k]` with probability `probabilities[c, v, k]`, or ends the rollout where the successor is −1; a
rollout also ends at the horizon. A bandit has one context; a token sequence has one context per prefix; an n-gram
world shares contexts between prefixes; in a Markov decision process the contexts are the states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from kltest.errors import WorldError

END = -1


@dataclass(frozen=True, eq=False)
class Paths:
    """Rollouts of a world as integers, without any policy: N rows of up to T tokens.

    `contexts`, `tokens` (N, T) int64, zero where `mask` (N, T) bool is false; `prompt` (N,) int64;
    `log_weight` (N,) float64 is the log-probability of everything that is not the policy's choice: the prompt and the
    dynamics. `complete` says that the rows are every rollout of the world, once each, in prefix order (rows that share
    their first t tokens and contexts stand together).
    """

    contexts: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    prompt: np.ndarray
    log_weight: np.ndarray
    complete: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray | slice) -> Paths:
        """The given rows, in the given order, repeats allowed."""
        return Paths(self.contexts[rows], self.tokens[rows], self.mask[rows], self.prompt[rows], self.log_weight[rows])

    def log_probability(self, log_probs: np.ndarray) -> np.ndarray:
        """(N,) log-probability of each rollout, prompt and dynamics included, under a (C, V) table of log-probs."""
        chosen = log_probs[self.contexts, self.tokens]
        return self.log_weight + np.where(self.mask, chosen, 0.0).sum(axis=1)


@dataclass(frozen=True, eq=False)
class Environment:
    """A finite-horizon world with C contexts and V tokens (see the module's first lines).

    `start` (P,) int is each prompt's first context and `prompts` (P,) its probability; `successors` and
    `probabilities` are (C, V, K); `reward` (C, V) is paid for a token in a context and summed over the rollout.
    `tree` says that a context occurs at most once in a rollout and always at the same time step.
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
        contexts, vocabulary, _ = self.successors.shape
        problem = None
        if self.horizon < 1:
            problem = f"the horizon must be at least 1, not {self.horizon}"
        elif self.probabilities.shape != self.successors.shape:
            problem = f"probabilities {self.probabilities.shape} and successors {self.successors.shape} differ in shape"
        elif self.reward.shape != (contexts, vocabulary):
            problem = f"the reward must have shape {(contexts, vocabulary)}, not {self.reward.shape}"
        elif self.start.shape != self.prompts.shape or abs(float(self.prompts.sum()) - 1) > 1e-12:
            problem = "every prompt needs one start context and one probability, and the probabilities must sum to 1"
        elif (self.prompts < 0).any() or (self.probabilities < 0).any():
            problem = "probabilities must not be negative"
        elif np.abs(self.probabilities.sum(axis=2) - 1).max() > 1e-12:
            problem = "the successors' probabilities of every context and token must sum to 1"
        elif (self.successors < END).any() or (self.successors >= contexts).any():
            problem = f"successors must be −1 (the rollout ends) or a context below {contexts}"
        elif (self.start < 0).any() or (self.start >= contexts).any():
            problem = f"start contexts must lie in 0 … {contexts - 1}"
        if problem:
            raise WorldError(f"environment {self.name!r}: {problem}")

    @property
    def n_contexts(self) -> int:
        return self.successors.shape[0]

    @property
    def vocabulary(self) -> int:
        return self.successors.shape[1]

    @cached_property
    def transition(self) -> sparse.csr_array:
        """(C·V, C) matrix of the probabilities of going on, row c·V + v; what is missing from 1 ends the rollout."""
        contexts, vocabulary, branches = self.successors.shape
        successors = self.successors.reshape(contexts * vocabulary, branches)
        live = successors != END
        pointers = np.concatenate([[0], np.cumsum(live.sum(axis=1))])
        matrix = sparse.csr_array(
            (self.probabilities.reshape(successors.shape)[live], successors[live], pointers),
            shape=(contexts * vocabulary, contexts),
        )
        matrix.sum_duplicates()
        return matrix

    def start_distribution(self) -> np.ndarray:
        """(C,) probability of each context at the first time step."""
        return np.bincount(self.start, weights=self.prompts, minlength=self.n_contexts).astype(float)

    def count(self) -> float:
        """How many rollouts enumeration would give (a float, since it may exceed any integer type)."""
        reachable = self.probabilities > 0
        ends = (reachable & (self.successors == END)).sum(axis=(1, 2)).astype(float)
        goes_on = reachable & (self.successors != END)
        followed = np.where(goes_on, self.successors, 0)
        counts = np.full(self.n_contexts, float(self.vocabulary))
        with np.errstate(over="ignore"):
            for _ in range(self.horizon - 1):
                onward = np.where(goes_on, counts[followed], 0.0).sum(axis=(1, 2))
                if np.array_equal(updated := ends + onward, counts):
                    break
                counts = updated
        return float(counts[self.start[self.prompts > 0]].sum())

    def enumerate(self, *, memory: float | None = None) -> Paths:
        """Every rollout once, in prefix order.

        Raises WorldError, with the number of rollouts, when they would need more than `memory` bytes
        (default: half of the machine's).
        """
        count = self.count()
        memory = memory if memory is not None else 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        needed = count * (17 * self.horizon + 32) * 2
        if not needed <= memory:
            raise WorldError(
                f"environment {self.name!r} has {count:.6g} rollouts of up to {self.horizon} tokens; enumerating them "
                f"needs about {needed / 2**30:.3g} GiB and {memory / 2**30:.3g} GiB are allowed. Use a smaller "
                "vocabulary or horizon, dynamic programming (kltest.moments.dynamic), or sampling."
            )
        prompt = np.flatnonzero(self.prompts > 0)
        current, log_weight = self.start[prompt].astype(np.int64), np.log(self.prompts[prompt])
        contexts: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        mask: list[np.ndarray] = []
        for parent, context, token, live, weight in self._expand(current, log_weight):
            contexts = [column[parent] for column in contexts] + [context]
            tokens = [column[parent] for column in tokens] + [token]
            mask = [column[parent] for column in mask] + [live]
            prompt, log_weight = prompt[parent], weight
        return Paths(
            np.stack(contexts, axis=1), np.stack(tokens, axis=1), np.stack(mask, axis=1), prompt, log_weight, True
        )

    def _expand(self, current: np.ndarray, log_weight: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """One step of all partial rollouts at a time; a finished one stays as it is, with a dead token."""
        _, vocabulary, branches = self.successors.shape
        for step in range(self.horizon):
            last = step == self.horizon - 1
            width = vocabulary if last else vocabulary * branches
            ended = current == END
            parent = np.repeat(np.arange(len(current)), np.where(ended, 1, width))
            first = np.concatenate([[0], np.cumsum(np.where(ended, 1, width))[:-1]])
            child = np.arange(len(parent)) - first[parent]
            live = ~ended[parent]
            context = np.where(live, current[parent], 0)
            token = np.where(live, child if last else child // branches, 0)
            weight = log_weight[parent]
            if last:
                following = np.full(len(parent), END)
            else:
                branch = child % branches
                following = np.where(live, self.successors[context, token, branch], END)
                chance = np.where(live, self.probabilities[context, token, branch], 1.0)
                kept = chance > 0
                parent, context, token, live, following = (
                    column[kept] for column in (parent, context, token, live, following)
                )
                weight = weight[kept] + np.log(chance[kept])
            current, log_weight = following, weight
            yield parent, context, token, live, weight

    def sample(self, log_probs: np.ndarray, n: int, generator: np.random.Generator) -> Paths:
        """`n` rollouts drawn with a (C, V) table of the sampler's log-probs."""
        chances = np.exp(log_probs).cumsum(axis=1)
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
            total = chances[context, -1:]
            token = (generator.random((n, 1)) * total >= chances[context]).sum(axis=1).clip(0, self.vocabulary - 1)
            arrivals = self.probabilities[context, token].cumsum(axis=1)
            branch = (generator.random((n, 1)) * arrivals[:, -1:] >= arrivals).sum(axis=1)
            branch = branch.clip(0, self.successors.shape[2] - 1)
            contexts[:, step], tokens[:, step] = np.where(live, context, 0), np.where(live, token, 0)
            mask[:, step] = live
            if step < self.horizon - 1:
                chance = self.probabilities[context, token, branch]
                log_weight += np.where(live, np.log(chance), 0.0)
            current = np.where(live, self.successors[context, token, branch], END)
        return Paths(contexts, tokens, mask, prompt, log_weight)

    def returns(self, paths: Paths) -> np.ndarray:
        """(N,) total reward of each rollout."""
        return np.where(paths.mask, self.reward[paths.contexts, paths.tokens], 0.0).sum(axis=1)
