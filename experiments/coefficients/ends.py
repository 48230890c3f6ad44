"""Fixed points that training should converge to, and the frontier of optima over coefficients."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.interpolate import PchipInterpolator

from kltest.environments import Instance
from kltest.truth import optimum, value

from ..fixed_points import sequence_k3_fixed_point, token_k2_fixed_point, token_k3_fixed_point
from .environments import environment, problem

# Coefficients at which the frontier is solved for, to be interpolated between.
FRONTIER = np.logspace(-3, 6, 181)

EXACT = ("k1-reward", "k1-reward-to-go", "k1-both", "k3-both", "rao-blackwell", "k2-loss-sequence", "leave-one-out")
LOCAL = ("k2-loss", "full-loss", "k3-ratio", "k1-reward-immediate")


def predicted(label: str, estimator: str, beta: float, seed: int) -> np.ndarray | None:
    """(C, V) log-probs of the policy at which the expected gradient vanishes, by theory; None if unknown."""
    which = problem(label, seed)
    asked = which.environment, which.reference, beta
    steps = which.environment.horizon
    if estimator in EXACT or (steps == 1 and estimator in (*LOCAL, "last-token")):
        return best(label, beta, seed)
    if estimator == "length-normalised":
        return best(label, beta / steps, seed)
    if estimator in LOCAL:
        policy = token_k2_fixed_point(*asked)
    elif estimator == "k3-loss":
        policy = token_k3_fixed_point(*asked)
    elif estimator == "k3-loss-sequence" and which.environment.tree:
        policy = sequence_k3_fixed_point(*asked)
    else:
        return None
    return by_context(label, policy)


@cache
def best(label: str, beta: float, seed: int) -> np.ndarray:
    """(C, V) log-probs of π*."""
    which = problem(label, seed)
    return by_context(label, optimum(which.environment, which.reference, beta).policy)


def by_context(label: str, policy: np.ndarray) -> np.ndarray:
    """Return (C, V) of a table that may have a time step in front; each context here belongs to one time step."""
    if policy.ndim == 2:
        return policy
    here = environment(label)
    merged = policy[0].copy()
    reached = here.start_distribution() > 0
    for table in policy:
        merged[reached] = table[reached]
        reached = here.transition.T @ np.repeat(reached.astype(float), here.vocabulary) > 0
    return merged


def measured(label: str, seed: int, policy: np.ndarray) -> tuple[float, float]:
    """KL(π‖ref) and E_π[R], exactly."""
    which = problem(label, seed)
    instance = Instance.of(which.environment, policy, which.reference)
    return value("reverse_kl", instance), value("expected_reward", instance)


def distance(label: str, seed: int, policy: np.ndarray, other: np.ndarray) -> float:
    """KL(π‖other) over whole rollouts."""
    return value("reverse_kl", Instance.of(problem(label, seed).environment, policy, other))


@cache
def entropy(label: str, beta: float, seed: int) -> float:
    """H(π*) over whole rollouts."""
    which = problem(label, seed)
    return value("entropy", Instance.of(which.environment, best(label, beta, seed), which.reference))


@dataclass(frozen=True)
class Frontier:
    """KL(π*‖ref) and E_π*[R] of the optima π*(β'), over β'; both fall as β' grows."""

    environment: str
    seed: int
    kl: np.ndarray
    reward: np.ndarray
    floor: float

    def at(self, coefficient: float) -> tuple[float, float]:
        """KL and reward at a β', not interpolated."""
        return measured(self.environment, self.seed, best(self.environment, coefficient, self.seed))

    def same_kl(self, kl: float) -> float | None:
        """The β' whose optimum is as far from the reference; None beyond the frontier's ends."""
        return _inverse(np.log(self.kl), np.log(max(kl, 1e-300)))


@cache
def frontier(label: str, seed: int) -> Frontier:
    kl, reward = np.array([measured(label, seed, best(label, float(beta), seed)) for beta in FRONTIER]).T
    return Frontier(label, seed, kl, reward, measured(label, seed, problem(label, seed).reference)[1])


def _inverse(values: np.ndarray, wanted: float) -> float | None:
    """The coefficient at which a falling curve has a value, by monotone cubic interpolation of its logarithm."""
    finite = np.isfinite(values)
    ascending, logs = values[finite][::-1], np.log(FRONTIER)[finite][::-1]
    # Where a curve is flat to rounding it says nothing.
    keep = np.concatenate([[True], np.diff(ascending) > 1e-9])
    ascending, logs = ascending[keep], logs[keep]
    if not ascending[0] < wanted < ascending[-1]:
        return None
    return float(np.exp(PchipInterpolator(ascending, logs)(wanted)))
