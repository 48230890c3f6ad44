"""KL304: one ratio for the whole sequence on every token's term."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import prefix_ratio
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or row.identified is not None or row.length == 1:
        return False
    return findings.measure.probes.only_through_the_sum(row.environment)


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def one_mean_ratio(logp, ref_logp, old_logp, mask):
    log_ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True)
    ratio = (log_ratio / mask.sum(-1, keepdim=True)).exp().detach()
    return ratio * (logp - ref_logp).where(mask != 0, 0.0).square() / 2


WORLD = SmallWorld(
    policy=[(0.5, 0.5), (0.8, 0.2), (0.8, 0.2)],
    reference=[(0.5, 0.5)] * 3,
    sampler=[(0.8, 0.2), (0.8, 0.2), (0.8, 0.2)],
    length=2,
)


def demonstrate() -> Demonstration:
    return of_gradients(
        WORLD, {"as written": one_mean_ratio, "mended": prefix_ratio}, declared="local_reverse_kl", sampler="stale"
    )


CHECK = Check(
    code="KL304",
    name="broadcast-sequence-ratio",
    title="One sequence-level ratio is broadcast over the tokens' terms",
    what=(
        "The sampler's log-probs enter through their sum over the sequence only, as one ratio that multiplies "
        "every token's term, and the result is not the declared gradient."
    ),
    why=(
        "A geometric mean of ratios is not an importance weight, and a differentiable sequence ratio on token "
        "terms adds derivatives of every token to every term: the result mixes two gradients and fits "
        "neither."
    ),
    example=(
        "Two tokens of two actions. Root: π = ref = (0.5, 0.5), sampler (0.8, 0.2). Then π = sampler = (0.8, "
        "0.2) against ref = (0.5, 0.5) in both contexts. With respect to the first probability there the "
        "truth is 0.5·1.386294 = 0.693147 in both; the geometric-mean ratio on k2, detached, gives √0.4·1.386294 "
        "= 0.876770 and √0.1·1.386294 = 0.438385."
    ),
    fix=("Use the full-sequence ratio, detached, on a sequence-level term, or prefix ratios on token terms."),
    sources=(
        "Zheng et al. 2025, GSPO, arXiv 2507.18071",
        "TRL pull request #4638",
    ),
    wrong=one_mean_ratio,
    mended=prefix_ratio,
    demonstrate=demonstrate,
    options={"sampler": "both", "expect": "local_reverse_kl"},
    explains=explains,
    moot=moot,
)
