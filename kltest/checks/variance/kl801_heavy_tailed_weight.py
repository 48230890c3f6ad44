"""KL801: the weight of a rollout grows exponentially with a log-ratio."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def moot(findings: Findings) -> str | None:
    return "no gradient reaches the policy" if findings.blocked else None


def examine(findings: Findings) -> Found | None:
    from kltest.checks.variance import tails

    found = findings.once(tails.tails)
    if not found:
        return None
    distances = ", ".join(f"{distance:g}" for distance in tails.DISTANCES)
    sentences = []
    for tail in found:
        growth, parts = (", ".join(f"{factor:.2g}" for factor in numbers) for numbers in (tail.growth, tail.parts))
        sentences.append(
            f"With {tail.direction.words} the gradient of a rollout grows like e^({tail.rate:.2g}·|log-ratio|): to "
            f"{growth} times its size when that of its last token is {distances} further out, and what it contributes "
            f"to E‖ĝ‖², the chance of drawing it included, to {parts} times."
        )
    return Found(" ".join(sentences))


def weighted_by_the_ratio(logp, ref_logp, mask):
    weight = (ref_logp - logp).where(mask != 0, 0.0).clamp(max=50.0).exp().detach()
    return -(weight * logp).where(mask != 0, 0.0).sum(-1)


def exact_forward_kl(logits, ref_logits, mask):
    live = (mask != 0).unsqueeze(-1)
    return -(ref_logits.where(live, 0.0).exp() * logits.where(live, 0.0)).where(live, 0.0).sum((-1, -2))


WORLD = SmallWorld(policy=[(0.99, 0.01)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    from kltest.checks.variance import tails

    return tails.demonstrate(WORLD, {"as written": weighted_by_the_ratio, "mended": exact_forward_kl})


CHECK = Check(
    code="KL801",
    name="heavy-tailed-weight",
    title="The weight of a rollout grows exponentially with a log-ratio (a warning)",
    what=(
        "What a rollout weighs in the gradient is multiplied by e for every unit of the log-ratio to the reference or "
        "to the sampler: ref/π of k3, a product of importance ratios over a sequence."
    ),
    why=(
        "The expectation may be right, but most of the second moment sits in rollouts that are hardly ever drawn: "
        "training looks calm and is biased towards what was drawn, until one rare token outweighs everything "
        "else in the batch. Averages of such weights settle slowly, and their sample variance does not show it."
    ),
    example=(
        "Two actions, π = (0.99, 0.01), ref = (0.5, 0.5), target ∇KL(ref‖π). Weighted by ref/π the second action "
        "counts 50-fold, the first about half: E‖ĝ‖² = 49.005051, of which the rarest 1% of draws carry 0.999999. "
        "Taken over both actions at once every draw gives the same gradient, E‖ĝ‖² = 0.480200."
    ),
    fix=(
        "Use a weight that is linear in the log-ratio (k1, k2), or take the expectation over the next token exactly "
        "(below for a forward KL). Where a ratio to the sampler is needed stay close to it, prefer prefix ratios to "
        "whole-sequence ones, and look at the largest weight of a batch. Limiting the weight trades the tail for a "
        "bias (KL306)."
    ),
    sources=(
        "Schulman 2020, Approximating KL Divergence",
        "Zhang et al. 2025, RPG, arXiv 2505.17508",
        "Owen 2013, Monte Carlo theory, methods and examples, ch. 9: the tail of importance weights",
    ),
    wrong=weighted_by_the_ratio,
    mended=exact_forward_kl,
    demonstrate=demonstrate,
    options={"expect": "local_forward_kl"},
    examine=examine,
    moot=moot,
)
