"""Exact noise: a loss against the least noisy estimator known of the same target.

Estimators that a loss is compared with are (N, C, V) tables, one gradient a rollout. With ρ the ratio to the sampler, 1
on-policy, and s_t the prefix at t:

    Rao–Blackwell   Σ_t ρ_(<t)·∇KL(s_t) + Σ_t g_t Σ_(s>t) ρ_(<s)·KL(s_s)   (the first sum alone for the local form)
    score function  Σ_t g_t Σ_(s≥t) ρ_(≤s)·u_s, and of whole rollouts ρ·Σu·Σg

From each the best multiple of z = ρ·Σ_t g_t, whose mean is zero, is subtracted as well, b = E[ĝ·z]/E‖z‖²: of a
score-function form c·g on-policy that is its optimal scalar baseline, E[‖g‖²c]/E‖g‖². Rao–Blackwell is not always the
less noisy one for two tokens and more, so that the best of all counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.environments import Instance
from kltest.identify.findings import Combination, Findings, Row
from kltest.identify.instances import instances
from kltest.moments.projection import each_gradient
from kltest.truth import gradient

# Rollouts for one of a comparator from which on it is worth a warning. Score-function forms cost nothing more, so an
# order of magnitude is much; Rao–Blackwell is bought with the full next-token distributions of both models, and every
# whole return takes 10 to 60 rollouts for one of it in the graded worlds: that is said, and no reason to warn.
MANY = {"rao-blackwell": 100.0, "to-go": 10.0, "return": 10.0}
# Variance below this share of the gradient's square is rounding: an estimator that is exact in one call.
EXACT = 1e-12
WORDS = {
    "rao-blackwell": "the Rao–Blackwellised estimator, which takes the exact next-token terms",
    "to-go": "reward-to-go with the best baseline",
    "return": "the same return with the best scalar baseline",
}


@dataclass(frozen=True)
class Comparison:
    """How many rollouts of a loss are worth one of the least noisy estimator of its target, in one world.

    `many`: more than it should take, of that estimator or of a cheaper one.
    """

    row: Row
    name: str
    rollouts: float
    own: float
    other: float
    many: bool

    @property
    def words(self) -> str:
        return (
            f"{self.row.where}: {self.rollouts:.3g} rollouts for one of {WORDS[self.name]} (variance {self.own:.3g} "
            f"against {self.other:.3g}, in units of ‖∇KL(π‖ref)‖²)"
        )


def comparisons(findings: Findings) -> list[Comparison]:
    """Every row that agrees with the target against the best estimator known of it, the worst instance each."""
    return [found for row in findings.rows if row.agrees and (found := _compare(row, findings)) is not None]


def _compare(row: Row, findings: Findings) -> Comparison | None:
    found = None
    for instance, own in zip(findings.measure.case(row).instances, row.variances, strict=False):
        unit = float(np.linalg.norm(gradient("reverse_kl", instance))) ** 2
        known = {name: v for name, v in variances(findings.expect, instance, row.sampler).items() if v > EXACT * unit}
        if not known:
            continue
        best = min(known, key=known.__getitem__)
        many = any(row.batch * own >= MANY[name] * variance for name, variance in known.items())
        one = Comparison(row, best, row.batch * own / known[best], own / unit, known[best] / unit, many)
        found = max((found, one), key=lambda each: (each.many, each.rollouts)) if found else one
    return found


def variances(expect: Combination, instance: Instance, sampler: str) -> dict[str, float]:
    """The variance of one rollout's gradient of every estimator known of a target; nothing where there is none."""
    weights = instance.rollout_weights(sampler)
    forms = [estimators(name, instance, sampler) for name in expect]
    common = set(forms[0]).intersection(*forms)
    baseline = _score(instance, sampler)
    found = {}
    for name in WORDS:
        if name in common:
            each = np.sum([c * form[name] for c, form in zip(expect.values(), forms, strict=True)], axis=0)
            found[name] = min(_variance(each, weights), _variance(_with_baseline(each, baseline, weights), weights))
    return found


def unknown_target(findings: Findings) -> str | None:
    """Why nothing can be compared, where no estimator of the declared target is known."""
    instance = instances(findings.environments[0], findings.seed)[0]
    unknown = [name for name in findings.expect if not estimators(name, instance, "stale")]
    return f"no estimator of {unknown[0]} is known to compare it with" if unknown else None


@lru_cache(maxsize=256)
def estimators(target: str, instance: Instance, sampler: str) -> dict[str, np.ndarray]:
    """(N, C, V) the gradient of every rollout under the estimators known of a named gradient, all unbiased."""
    base, at_sampler = target.removesuffix("@sampler"), target.endswith("@sampler")
    paths, policy, reference = instance.paths, instance.policy, instance.reference
    live = paths.mask
    own = _per_token(instance, policy - instance.behaviour(sampler))
    upto = np.exp(own.cumsum(axis=1))
    before = np.ones_like(upto) if at_sampler else np.exp(own.cumsum(axis=1) - own)

    def next_token(towards_logits: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """A gradient at the log-probs of every next token, (C, V), in each context visited."""
        return np.where(live, ratio, 0.0)[:, :, None] * towards_logits[paths.contexts]

    def score(costs: np.ndarray, *, rest: bool) -> np.ndarray:
        """Each token's cost from there on, or only after it."""
        later = costs[:, ::-1].cumsum(axis=1)[:, ::-1]
        return np.where(live, later if rest else later - costs, 0.0)

    log_ratio = policy - reference
    chances = np.exp(policy)
    if base in ("reverse_kl", "local_reverse_kl"):
        exact = next_token(chances * (log_ratio + 1), before)
        if base == "local_reverse_kl":
            return {"rao-blackwell": each_gradient(paths, policy, None, exact)}
        kl = np.broadcast_to((chances * log_ratio).sum(axis=1, keepdims=True), policy.shape)
        u = _per_token(instance, log_ratio)
        whole = np.where(live, upto[:, -1:] * u.sum(axis=1, keepdims=True), 0.0)
        return {
            "rao-blackwell": each_gradient(paths, policy, score(before * _per_token(instance, kl), rest=False), exact),
            "to-go": each_gradient(paths, policy, score(upto * u, rest=True), None),
            "return": each_gradient(paths, policy, whole, None),
        }
    if base in ("forward_kl", "local_forward_kl"):
        towards = np.exp(own.cumsum(axis=1) - own - _prefixes(instance, log_ratio)) if base == "forward_kl" else before
        return {"rao-blackwell": each_gradient(paths, policy, None, next_token(-np.exp(reference), towards))}
    return {}


def _per_token(instance: Instance, costs: np.ndarray) -> np.ndarray:
    """(N, T) the entries of a (C, V) table at the tokens taken, zero where padded."""
    return np.where(instance.paths.mask, instance.paths.chosen(costs), 0.0)


def _prefixes(instance: Instance, costs: np.ndarray) -> np.ndarray:
    """(N, T) the sums of a (C, V) table over the tokens before."""
    each = _per_token(instance, costs)
    return each.cumsum(axis=1) - each


def _score(instance: Instance, sampler: str) -> np.ndarray:
    """(N, C, V) ρ·Σ_t g_t, whose mean is zero."""
    ratio = np.exp(_per_token(instance, instance.policy - instance.behaviour(sampler)).sum(axis=1, keepdims=True))
    return each_gradient(instance.paths, instance.policy, np.where(instance.paths.mask, ratio, 0.0), None)


def _with_baseline(each: np.ndarray, score: np.ndarray, weights: np.ndarray) -> np.ndarray:
    size = float(np.einsum("n,ncv,ncv->", weights, score, score))
    return each - float(np.einsum("n,ncv,ncv->", weights, each, score)) / size * score if size else each


def _variance(each: np.ndarray, weights: np.ndarray) -> float:
    mean = np.einsum("n,ncv->cv", weights, each)
    return float(np.einsum("n,ncv,ncv->", weights, each - mean, each - mean))


def demonstrate(
    world: SmallWorld, losses: Mapping[str, Callable[..., Any]], *, declared: str = "reverse_kl", **call: Any
) -> Demonstration:
    """The variance of one rollout's gradient under losses, and how many rollouts of each are worth one of the best."""
    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact
    from kltest.truth import parse

    instance = world.instance()
    known = variances(parse(declared), instance, "current")
    best = min(known.values())
    rows: list[tuple[str | float, ...]] = []
    for name, function in losses.items():
        own = exact(bind(function, Call(**call), name=name), instance).variance
        rows.append((name, own, own / best))
    return Demonstration(
        world.words(), ("gradient of one rollout", "variance", "rollouts for one of the best"), tuple(rows)
    )
