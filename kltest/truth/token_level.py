"""The fixed point of a token-level KL term, and how far it lies below the optimum of J = E_π[R] − β·KL(π‖ref).

At the fixed point π̂ every token has u = KL_s + A/β, with KL_s the next-token KL in its context and A its advantage for
the reward alone. With K = Σ_t KL_{s_t} the sum of next-token KLs along a rollout and dynamics that are deterministic,
log π̂/ref = K + (R − E R)/β; the optimum π* ∝ ref·e^{R/β} has a constant in the place of K. Hence, prompt by prompt,

    J* − J(π̂) = β·KL(π̂‖π*) = β·(E[K] + log E[e^{−K}]),    expectations over rollouts of π̂:

zero if and only if K is the same for all rollouts of a prompt. K − E K = Σ_t δ_t, a martingale, with δ_t what a token
changes the expected KL of the tokens after it by, δ = D(s, a) − E[D | s]. The same δ, times the visits of s and π̂(a|s),
is the part `future_reverse_kl` of ∇KL(π̂‖ref) at the logits of a tabular policy. If dynamics are random, the gap is
β·Δ(start) with

    Δ(s) = log E_a exp(E_{s'}[Δ(s')] − δ(s, a)),

and at most β·log E exp(−Σ_t δ_t), since e^{E x} ≤ E e^x; equal if Δ(s') is known from s and a. Derived here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from kltest.environments import END, Environment
from kltest.environments.policies import table
from kltest.truth.recursions import onward
from kltest.truth.regularised import checked, reward_only

# The frontier's coefficient is looked for within this factor of β.
FACTOR = 100.0
# Exponents below this are taken as sums of what they exceed their own mean by, so that nothing cancels.
SMALL = 1.0


def token_level_fixed_point(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """Return π ∝ ref·exp(Q_R/β), with Q_R the action values of π for the reward alone, solved backwards.

    It is the fixed point of token-level k2 or the exact next-token KL as a loss: ∇E[R] = β·`local_reverse_kl`.

    Args:
        environment: Environment with C contexts, V tokens and horizon T.
        reference: Logits (C, V) of the reference.
        beta: Coefficient β of the KL term.

    Returns:
        Log-probs (C, V) in a tree, else (T, C, V).

    Raises:
        UsageError: β is not positive and finite.
        InvalidEnvironmentError: The reference has another shape or is not finite.
    """
    return reward_only(environment, reference, beta, lambda reference, scores: table(reference + scores))


@dataclass(frozen=True)
class TokenLevelGap:
    """What the fixed point π̂ of a token-level KL term lacks, in units of the reward unless stated; means over prompts.

    Attributes:
        objective: J* − J(π̂).
        at_same_kl: max {E_π[R]: KL(π‖ref) ≤ KL(π̂‖ref)} − E_π̂[R], what π̂ lies below the frontier of reward and KL:
            min over β' > 0 of β'·KL(π̂‖π*_β') (of J*_β' + β'·KL(π̂‖ref) − E_π̂[R], if dynamics are random).
        coefficient: The β' of that minimum, at most a factor of 100 from β.
        pooled: β·log E exp(−Σδ): `objective` if dynamics are deterministic, else at least that.
        second_order: β·Var(Σδ)/2, which `pooled` tends to as the variance tends to 0.
        bennett: β·log(1 + Var(Σδ)·(e^r − 1 − r)/r²), r the largest −Σδ, at least `pooled` (Bennett 1962). If dynamics
            are deterministic r = E[K] − min K, at most KL(π̂‖ref).
        hoeffding: β·(max Σδ − min Σδ)²/8, at least `pooled` (Hoeffding 1963).
        variance: Var(Σδ) in nats², Var(K) if dynamics are deterministic.
        correlation: Correlation of Σδ and ΣA, K and the return R if dynamics are deterministic. To second order
            `at_same_kl` is `second_order`·(1 − correlation²): what K shares with R is a change of β.
        share: √(Var(Σδ)/Var(Σ(A/β + δ))): ‖future_reverse_kl‖/‖reverse_kl‖ at π̂ in the metric of the inverse Fisher
            information of a policy with logits for every context, and √(Var K/Var Σu) if dynamics are deterministic.
        kl: KL(π̂‖ref) in nats.
        reward: E_π̂[R].
    """

    objective: float
    at_same_kl: float
    coefficient: float
    pooled: float
    second_order: float
    bennett: float
    hoeffding: float
    variance: float
    correlation: float
    share: float
    kl: float
    reward: float


@dataclass(frozen=True)
class _Step:
    """One time step at π̂: log-probs, δ and A, each (C, V)."""

    policy: np.ndarray
    innovation: np.ndarray
    advantage: np.ndarray


def token_level_gap(environment: Environment, reference: np.ndarray, beta: float) -> TokenLevelGap:
    """Return how far the fixed point of a token-level KL term lies below the optimum, and bounds of it.

    J* − J(π̂) = β·(E[K] + log E[e^{−K}]) if dynamics are deterministic. By recursion over time, for any number of
    rollouts.

    Args:
        environment: Environment with C contexts and V tokens.
        reference: Logits (C, V) of the reference.
        beta: Coefficient β of the KL.

    Returns:
        A TokenLevelGap.

    Raises:
        UsageError: β is not positive and finite.
        InvalidEnvironmentError: The reference has another shape or is not finite.
    """
    reference = checked(environment, reference, beta)
    steps, kl, reward = _steps(environment, reference, beta)
    first = environment.start_distribution()

    def mean(values: np.ndarray) -> float:
        return float(first @ values)

    def moment(one: Callable[[_Step], np.ndarray], other: Callable[[_Step], np.ndarray]) -> np.ndarray:
        """E[Σ one·Σ other] (C,) of two martingales' increments."""
        values = np.zeros(environment.n_contexts)
        for step in steps:
            products = one(step) * other(step) + onward(environment, values)
            values = (np.exp(step.policy) * products).sum(axis=1)
        return values

    def lacking(log_coefficient: float) -> float:
        coefficient = math.exp(log_coefficient)
        return coefficient * mean(_excess(environment, steps, 1 / coefficient - 1 / beta))

    def delta(step: _Step) -> np.ndarray:
        return step.innovation

    def gain(step: _Step) -> np.ndarray:
        return step.advantage / beta

    def both(step: _Step) -> np.ndarray:
        return delta(step) + gain(step)

    variances = moment(delta, delta)
    variance, whole = mean(variances), mean(moment(both, both))
    scale = math.sqrt(variance * mean(moment(gain, gain)))
    low, high = _extremes(environment, steps)
    at, log_beta = lacking(math.log(beta)), math.log(beta)
    best = minimize_scalar(
        lacking,
        bounds=(log_beta - math.log(FACTOR), log_beta + math.log(FACTOR)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    nearer = best.fun < at
    return TokenLevelGap(
        objective=at,
        at_same_kl=float(best.fun) if nearer else at,
        coefficient=math.exp(best.x) if nearer else beta,
        pooled=beta * mean(_excess(environment, steps, pooled=True)),
        second_order=beta * variance / 2,
        bennett=beta * mean(np.log1p(variances * _curvature(-low))),
        hoeffding=beta * mean((high - low) ** 2) / 8,
        variance=variance,
        correlation=mean(moment(delta, gain)) / scale if scale else 0.0,
        share=math.sqrt(variance / whole) if whole else 0.0,
        kl=mean(kl),
        reward=mean(reward),
    )


def _steps(environment: Environment, reference: np.ndarray, beta: float) -> tuple[list[_Step], np.ndarray, np.ndarray]:
    """The steps at π̂, the last one first; KL (C,) and reward (C,) from the first one on."""
    policy = token_level_fixed_point(environment, reference, beta)
    stages = [policy] * environment.horizon if policy.ndim == 2 else list(policy[::-1])
    kl, reward, found = np.zeros(environment.n_contexts), np.zeros(environment.n_contexts), []
    for stage in stages:
        chances = np.exp(stage)
        ahead, action_values = onward(environment, kl), environment.reward + onward(environment, reward)
        later, reward = ((chances * one).sum(axis=1) for one in (ahead, action_values))
        kl = (chances * (stage - reference)).sum(axis=1) + later
        found.append(_Step(stage, ahead - later[:, None], action_values - reward[:, None]))
    return found, kl, reward


def _excess(environment: Environment, steps: list[_Step], steering: float = 0.0, *, pooled: bool = False) -> np.ndarray:
    """Δ (C,) of Δ(s) = log E_a exp(E[Δ(s')] − δ + steering·A), or with log E e^{Δ(s')} for E[Δ(s')] if `pooled`.

    With steering 1/β' − 1/β it is KL(π̂‖π*_β') if dynamics are deterministic.
    """
    values = np.zeros(environment.n_contexts)
    for step in steps:
        later = np.log1p(onward(environment, np.expm1(values))) if pooled else onward(environment, values)
        exponent = later - step.innovation + steering * step.advantage
        chances, mean = np.exp(step.policy), (np.exp(step.policy) * later).sum(axis=1)
        small = np.clip(exponent, -SMALL, SMALL)
        values = np.where(
            np.abs(exponent).max(axis=1) < SMALL,
            np.log1p(mean + (chances * (np.expm1(small) - small)).sum(axis=1)),
            logsumexp(step.policy + exponent, axis=1),
        )
    return values


def _extremes(environment: Environment, steps: list[_Step]) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest Σδ (C,) of all rollouts."""
    possible = environment.probabilities > 0
    found = []
    for sign in (1.0, -1.0):
        values = np.zeros(environment.n_contexts)
        for step in steps:
            following = np.where(environment.successors == END, 0.0, values[environment.successors])
            later = np.where(possible, following, np.inf).min(axis=2)
            values = (sign * step.innovation + later).min(axis=1)
        found.append(sign * values)
    return found[0], found[1]


def _curvature(x: np.ndarray) -> np.ndarray:
    """(e^x − 1 − x)/x², which grows in x, for x ≥ 0; by its series where the difference would cancel."""
    safe = np.maximum(x, 1e-3)
    with np.errstate(over="ignore"):
        exact = (np.expm1(safe) - safe) / safe**2
    return np.where(x > 1e-3, exact, 0.5 + x / 6 + x**2 / 24 + x**3 / 120)
