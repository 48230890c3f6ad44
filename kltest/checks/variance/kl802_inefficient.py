"""KL802: another estimator of the same target is much less noisy.

The estimators that a loss is compared with are (N, C, V) tables, one gradient for each rollout. With ρ the ratio to the
sampler, 1 on-policy, and s_t the prefix at t:

    Rao–Blackwell   Σ_t ρ_(<t)·∇KL(s_t) + Σ_t g_t Σ_(s>t) ρ_(<s)·KL(s_s)   (the first sum alone for the local form)
    score function  Σ_t g_t Σ_(s≥t) ρ_(≤s)·u_s, and of whole rollouts ρ·Σu·Σg

From each the best multiple of z = ρ·Σ_t g_t, whose mean is zero, is subtracted as well, b = E[ĝ·z]/E‖z‖². For a
score-function form c·g on-policy that is its optimal scalar baseline, E[‖g‖²c]/E‖g‖². With two tokens and more
Rao–Blackwell is not always the less noisy one, so the best of all counts.
"""

from functools import lru_cache

import numpy as np

from kltest.checks.check import Found
from kltest.checks.demonstrations import Cells, Demonstration, Losses
from kltest.counterexample.environment import SmallEnvironment
from kltest.environments import Instance
from kltest.identify.case import size
from kltest.identify.findings import Combination, Findings, Row
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.moments import exact
from kltest.moments.projection import each_gradient
from kltest.samples.controls import Along, before, from_here

# Rollouts for one of a better estimator from which on there is a warning. Score-function forms cost nothing more, so an
# order of magnitude is much. Rao–Blackwell needs the full next-token distributions of both models, and any whole return
# takes 10 to 60 rollouts for one of it in the graded environments, which is reported without a warning.
MANY = {"rao-blackwell": 100.0, "to-go": 10.0, "return": 10.0}
# Variance relative to ‖∇KL(π‖ref)‖²; below it is rounding, and the estimator is exact in one call.
EXACT = 1e-12
WORDS = {
    "rao-blackwell": "the Rao–Blackwellised estimator, which takes the exact next-token terms",
    "to-go": "reward-to-go with the best baseline",
    "return": "the same return with the best scalar baseline",
}


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check without a row that agrees or an estimator to compare with, else None."""
    if not any(row.agrees for row in findings.rows):
        return "no row agrees with the declared gradient, so there is nothing to be efficient at"
    instance = instances(findings.environments[0], findings.seed)[0]
    unknown = [name for name in findings.expect if not estimators(name, instance, "stale")]
    return f"no estimator of {unknown[0]} is known to compare it with" if unknown else None


def examine(findings: Findings) -> Found | None:
    """Compare the rollouts that each row needs with those of the best estimator known."""
    compared = [found for row in findings.rows if row.agrees and (found := _compare(row, findings)) is not None]
    if not compared:
        return Found("no unbiased estimator is known here but those that are exact in one call", "skip")
    worse = [one for one in compared if one[0]]
    words = f"It takes, in {'; '.join(words for _, _, words in worse or compared)}."
    return Found(words) if worse else Found(words, "pass")


def _compare(row: Row, findings: Findings) -> tuple[bool, float, str] | None:
    """Return if a row takes too many rollouts, how many for one of the least noisy estimator of its target, and words.

    They are too many for that estimator or for a cheaper one, on the worst instance. None if the best estimator is
    exact on all instances.
    """
    found = []
    for instance, own in zip(row.case.instances, row.variances, strict=False):
        unit = size(instance) ** 2
        known = {name: v for name, v in variances(findings.expect, instance, row.sampler).items() if v > EXACT * unit}
        if known:
            best = min(known, key=known.__getitem__)
            many = any(row.batch * own >= MANY[name] * variance for name, variance in known.items())
            rollouts = row.batch * own / known[best]
            words = (
                f"{row.where}: {rollouts:.3g} rollouts for one of {WORDS[best]} (variance {own / unit:.3g} against "
                f"{known[best] / unit:.3g}, in units of ‖∇KL(π‖ref)‖²)"
            )
            found.append((many, rollouts, words))
    return max(found, default=None)


def variances(expect: Combination, instance: Instance, sampler: str) -> dict[str, float]:
    """Variance of one rollout's gradient under every known estimator of a target; empty if there is none."""
    weights = instance.rollout_weights(sampler)
    forms = [estimators(name, instance, sampler) for name in expect]
    common = set(forms[0]).intersection(*forms)
    found = {}
    for name in WORDS:
        if name in common:
            each = np.sum([c * form[name] for c, form in zip(expect.values(), forms, strict=True)], axis=0)
            found[name] = _variance(each, weights, _score(instance, sampler))
    return found


@lru_cache(maxsize=256)
def estimators(target: str, instance: Instance, sampler: str) -> dict[str, np.ndarray]:
    """(N, C, V) gradients of all rollouts under the known estimators of a named gradient, all unbiased.

    None is where some rollouts are never drawn: ratios do not bring those back.
    """
    local, at_sampler = target.startswith("local_"), target.endswith("@sampler")
    base = target.removesuffix("@sampler").removeprefix("local_")
    if base not in ("reverse_kl", "forward_kl") or (at_sampler and not local):
        return {}
    if not (local and at_sampler) and not instance.rollout_weights(sampler).all():
        return {}
    along = Along(instance, instance.paths, sampler)
    prefix = along.live if at_sampler else along.before * along.live

    def gradients(logp: np.ndarray | None, logits: np.ndarray | None = None) -> np.ndarray:
        return each_gradient(instance.paths, instance.policy, logp, logits)

    if base == "forward_kl":
        # Rollouts up to the token are the reference's, or, in the local form, the policy's.
        reached = prefix if local else prefix * np.exp(-before(along.u))
        towards = -np.exp(instance.reference)[instance.paths.contexts]
        return {"rao-blackwell": gradients(None, reached[..., None] * towards)}
    exact_terms = prefix[..., None] * along.moves
    if local:
        return {"rao-blackwell": gradients(None, exact_terms)}
    later = along.before * along.kl
    return {
        "rao-blackwell": gradients((from_here(later) - later) * along.live, exact_terms),
        "to-go": gradients(from_here(along.prefix_ratio * along.u) * along.live),
        "return": gradients(along.whole_ratio * along.u.sum(axis=1, keepdims=True)),
    }


def _score(instance: Instance, sampler: str) -> np.ndarray:
    """(N, C, V) ρ·Σ_t g_t, whose mean is zero."""
    weights = Along(instance, instance.paths, sampler).whole_ratio
    return each_gradient(instance.paths, instance.policy, weights, None)


def _variance(each: np.ndarray, weights: np.ndarray, score: np.ndarray) -> float:
    """Variance of the gradients of all rollouts, the best multiple of their scores, of mean zero, subtracted."""

    def mean_product(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.einsum("n,ncv,ncv->", weights, one, other))

    centred = each - np.einsum("n,ncv->cv", weights, each)
    return mean_product(centred, centred) - mean_product(each, score) ** 2 / (mean_product(score, score) or 1.0)


def k1_in_both_places(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio + log_ratio.detach() * logp.where(mask != 0, 0.0).sum(-1)


ENVIRONMENT = SmallEnvironment(policy=[(0.6, 0.4), (0.6, 0.4), (0.5, 0.5)], reference=[(0.5, 0.5)] * 3, length=2)


def demonstrate(losses: Losses) -> Demonstration:
    """The variance of one rollout's gradient, and the number of rollouts that are worth one of the best."""
    instance = ENVIRONMENT.instance()
    best = min(variances({"reverse_kl": 1.0}, instance, "current").values())
    rows: list[Cells] = []
    for name, function in losses.items():
        own = exact(bind(function, name=name), instance).variance
        rows.append((name, own, own / best))
    columns = ("gradient of one rollout", "variance", "rollouts for one of the best")
    return Demonstration(ENVIRONMENT.words(), columns, rows)
