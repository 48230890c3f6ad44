"""Exact measurements of many policies at once, by dynamic programming over contexts, and their history."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kltest.environments import END
from kltest.training.batch import Policy, total
from kltest.training.problems import Problem, Runs
from kltest.truth import optimum

# Columns of a History with a number for each recorded step and run.
MEASURED = ("reward", "kl", "objective", "kl_to_optimum", "gap", "entropy", "gradient_norm", "logged")


@dataclass(frozen=True, eq=False)
class History:
    """Measurements of R runs, in the given order, at K recorded `steps` (numbers of updates done).

    Columns are (K, R), and exact except for the last two:

    - `reward` is E_π[R]; `kl` is KL(π‖ref) and `entropy` H(π), both over whole rollouts in nats;
    - `objective` is J_β = E_π[R] − β·KL(π‖ref);
    - `kl_to_optimum` is KL(π‖π*) and `gap` is J* − J_β: NaN if β = 0, which has no π*, or with `optima=False`;
    - `gradient_norm` is the Euclidean norm of the next update's gradient;
    - `logged` is the KL that the estimator logs there, per rollout: its metrics["kl"] if it returns metrics, else its
      value; NaN without an estimator.

    `diverged` (R,) int is the update at which a run was stopped, or −1; `logits` (R, C, V) are the final ones.
    """

    steps: np.ndarray
    reward: np.ndarray
    kl: np.ndarray
    objective: np.ndarray
    kl_to_optimum: np.ndarray
    gap: np.ndarray
    entropy: np.ndarray
    gradient_norm: np.ndarray
    logged: np.ndarray
    diverged: np.ndarray
    logits: np.ndarray

    def __len__(self) -> int:
        return len(self.diverged)


class PolicyMeasure:
    """E[R], KL(π‖ref), H(π) and, with `optima`, KL(π‖π*) and J* of many runs in one environment."""

    def __init__(self, runs: Runs, *, optima: bool) -> None:
        self.runs = runs
        environment = runs.environment
        ends = environment.successors == END
        # (K, V, C)
        self._following = torch.from_numpy(np.where(ends, 0, environment.successors).transpose(2, 1, 0).copy())
        self._chance = torch.from_numpy(np.where(ends, 0.0, environment.probabilities).transpose(2, 1, 0).copy())
        self._starts = torch.from_numpy(environment.start)
        self._prompts = torch.from_numpy(environment.prompts)
        self._reached = [torch.from_numpy(np.flatnonzero(here)) for here in environment.reachable()]
        self._reward, self._log_reference = torch.from_numpy(runs.reward), torch.from_numpy(runs.log_reference)
        self._beta = torch.from_numpy(runs.beta)
        self._optimal: Tensor | None = None
        self._best: Tensor | None = None
        if optima:
            self._optimal, self._best = self._optima()

    def _optima(self) -> tuple[Tensor, Tensor]:
        """Return log π* (T or 1, V, C, R) and J* (R,), NaN if β = 0; runs that share problem and β are solved once."""
        environment = self.runs.environment
        shape = (1 if environment.tree else environment.horizon, environment.n_contexts, environment.vocabulary)

        @cache
        def solved(problem: Problem, beta: float) -> tuple[np.ndarray, float]:
            if not beta > 0:
                return np.full(shape, np.nan), np.nan
            found = optimum(problem.environment, problem.reference, beta)
            return np.broadcast_to(found.policy, shape), found.value

        policies, values = zip(*(solved(run.problem, run.beta) for run in self.runs.each), strict=True)
        tables = np.stack(policies, axis=-1).swapaxes(1, 2)
        return torch.from_numpy(np.ascontiguousarray(tables)), torch.tensor(values, dtype=torch.float64)

    def __call__(self, policy: Policy) -> dict[str, np.ndarray]:
        """Measurements (R,) of a policy, by name."""
        log_policy, chances = torch.from_numpy(policy.log_probs), torch.from_numpy(policy.chances)
        vocabulary, contexts, runs = log_policy.shape
        fixed = [self._reward, log_policy - self._log_reference, -log_policy]
        value = torch.zeros((contexts, 3 if self._optimal is None else 4, runs), dtype=torch.float64)
        for step in reversed(range(self.runs.environment.horizon)):
            here = self._reached[step]
            earlier = torch.zeros_like(value)
            for token in range(vocabulary):
                costs = [table[token].index_select(0, here) for table in fixed]
                if self._optimal is not None:
                    best = self._optimal[min(step, len(self._optimal) - 1), token]
                    costs.append(log_policy[token].index_select(0, here) - best.index_select(0, here))
                worth = torch.stack(costs, dim=1)
                if step < self.runs.environment.horizon - 1:
                    worth = worth + self._onward(value, here, token)
                earlier.index_add_(0, here, worth * chances[token].index_select(0, here).unsqueeze(1))
            value = earlier
        first = torch.from_numpy(total((value.index_select(0, self._starts) * self._prompts.view(-1, 1, 1)).numpy()))
        found = dict(zip(("reward", "kl", "entropy", "kl_to_optimum"), first, strict=False))
        found["objective"] = found["reward"] - self._beta * found["kl"]
        if self._best is not None:
            found["gap"] = self._best - found["objective"]
        return {name: values.numpy() for name, values in found.items()}

    def _onward(self, value: Tensor, here: Tensor, token: int) -> Tensor:
        """Expected values (C', k, R) after a token in the contexts `here`, from values (C, k, R)."""
        expected = torch.zeros(())
        for following, chance in zip(self._following[:, token], self._chance[:, token], strict=True):
            reached = value.index_select(0, following.index_select(0, here))
            expected = expected + reached * chance.index_select(0, here).view(-1, 1, 1)
        return expected
