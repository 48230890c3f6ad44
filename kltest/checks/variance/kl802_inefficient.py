"""KL802: another estimator of the same target is much less noisy."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def moot(findings: Findings) -> str | None:
    from kltest.checks.variance import efficiency as variance

    if not any(row.agrees for row in findings.rows):
        return "no row agrees with the declared gradient, so there is nothing to be efficient at"
    return variance.unknown_target(findings)


def examine(findings: Findings) -> Found | None:
    from kltest.checks.variance import efficiency as variance

    compared = findings.once(variance.comparisons)
    if not compared:
        return Found("the best estimator known is exact in one call in the worlds that were graded", "skip")
    worse = [one for one in compared if one.many]
    words = f"It takes, in {'; '.join(one.words for one in worse or compared)}."
    return Found(words) if worse else Found(words, "pass")


def k1_in_both_places(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio + log_ratio.detach() * logp.where(mask != 0, 0.0).sum(-1)


def rao_blackwell(logp, logits, ref_logits, mask):
    live = mask != 0
    log_pi, log_ref = (part.where(live.unsqueeze(-1), 0.0) for part in (logits, ref_logits))
    next_kl = (log_pi.exp() * (log_pi - log_ref)).sum(-1).where(live, 0.0)
    following = next_kl.detach().flip(-1).cumsum(-1).flip(-1) - next_kl.detach()
    return (next_kl + following * logp.where(live, 0.0)).sum(-1)


WORLD = SmallWorld(policy=[(0.6, 0.4), (0.6, 0.4), (0.5, 0.5)], reference=[(0.5, 0.5)] * 3, length=2)


def demonstrate() -> Demonstration:
    from kltest.checks.variance import efficiency as variance

    return variance.demonstrate(WORLD, {"as written": k1_in_both_places, "mended": rao_blackwell})


CHECK = Check(
    code="KL802",
    name="inefficient",
    title="Another estimator of the same gradient needs far fewer rollouts (a warning)",
    what=(
        "The expected gradient is the declared one, but the exact variance of one rollout's gradient is at least ten "
        "times that of reward-to-go or of the whole return with the best scalar baseline, or a hundred times that of "
        "the Rao–Blackwellised estimator. How many rollouts it takes for one of the best is said in any case."
    ),
    why=(
        "Noise of the KL term adds to that of the reward and is paid for in rollouts. A baseline costs nothing; the "
        "Rao–Blackwellised estimator needs the next-token distributions of both models."
    ),
    example=(
        "Two tokens of two actions, π = (0.6, 0.4) at the root and after a first 0, equal to ref = (0.5, 0.5) after a "
        "first 1. The gradient of one rollout has variance 0.925526 with k1 in the loss and in the reward, 0.004577 "
        "Rao–Blackwellised, and a little less with a baseline besides: 202.9 rollouts for one of those."
    ),
    fix=(
        "Where the full next-token distributions are at hand, take the KL of the next token exactly, and charge "
        "what comes later to the token that led there; else charge each token with what comes from it on only, "
        "and subtract a baseline."
    ),
    sources=(
        "Amini, Vieira & Cotterell 2025, arXiv 2504.10637",
        "Greensmith, Bartlett & Baxter 2004, Variance reduction techniques for gradient estimates, §5",
    ),
    wrong=k1_in_both_places,
    mended=rao_blackwell,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
