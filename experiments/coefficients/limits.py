"""The effective coefficient of k3 in the loss as β → 0, where single answers compete (arms, or whole rollouts).

It ends at π = β·ref/(λ − R). With * the best answer and Δ_v = R_* − R_v, what the KL lacks of the largest one is

    −log ref_* − KL(π‖ref) = −ε·log ref_* − (1 − ε)·log(1 − ε) − Σ π_v·log(π_v/ref_v),    ε = Σ π_v = 1 − π_*,

sums over the others, in which nothing cancels. At the end π_v tends to β·ref_v/Δ_v, so that this falls like
β·log(1/β); at the optimum of β' like e^(−Δ/β')·Δ/β', Δ the smallest Δ_v. The two are equal where Δ/β' ~ log(1/β): as
β → 0

    β'/β ~ Δ/(β·log(1/β)),

without bound.
"""

from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from .ends import predicted
from .environments import problem

# Where answers compete, and the estimator that ends there: of arms token k3 is sequence k3.
ANSWERS = {"bandit": "k3-loss", "sequence": "k3-loss-sequence"}
BETAS = (1e-1, 1e-4, 1e-16, 1e-64, 1e-256)


def limit(environment: str, seed: int) -> list[dict[str, Any]]:
    """β' by the optimum with the same KL, and by the law, for ever smaller β."""
    return [
        {"beta": beta, "coefficient_by_kl": coefficient(environment, seed, beta), "law": law(environment, seed, beta)}
        for beta in BETAS
    ]


def coefficient(environment: str, seed: int, beta: float) -> float:
    log_reference, gaps, order = _answers(environment, seed)
    policy = predicted(environment, ANSWERS[environment], beta, seed)
    ended = problem(environment, seed).environment.enumerate().log_probability(policy)[order]
    wanted = _log_missing(ended, log_reference)

    def excess(log_coefficient: float) -> float:
        scores = log_reference - gaps / np.exp(log_coefficient)
        return _log_missing(scores - logsumexp(scores), log_reference) - wanted

    # e^(−680) is still a float.
    return float(np.exp(brentq(excess, np.log(gaps[1] / 680), np.log(1e6), xtol=1e-14)))


def law(environment: str, seed: int, beta: float) -> float:
    return float(_answers(environment, seed)[1][1] / np.log(1 / beta))


def _answers(environment: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log ref of each answer, what it earns less than the best, and the order of both: the best one first."""
    which = problem(environment, seed)
    paths = which.environment.enumerate()
    returns = which.environment.returns(paths)
    order = np.argsort(-returns)
    return paths.log_probability(which.reference)[order], returns[order[0]] - returns[order], order


def _log_missing(log_policy: np.ndarray, log_reference: np.ndarray) -> float:
    """Log of −log ref_* − KL(π‖ref)."""
    others, ratios = np.exp(log_policy[1:]), (log_policy - log_reference)[1:]
    rest = others.sum()
    return float(np.log(-rest * log_reference[0] - (1 - rest) * np.log1p(-rest) - others @ ratios))
