"""KL802: another estimator of the same target is much less noisy."""

from __future__ import annotations

from kltest.grading.checks.check import Check, Found
from kltest.grading.checks.losses import squared_sum
from kltest.grading.demonstration import Demonstration, SmallWorld
from kltest.grading.findings import Findings


def moot(findings: Findings) -> str | None:
    from kltest.grading.laboratory import variance

    if not any(row.agrees for row in findings.rows):
        return "no row agrees with the declared gradient, so there is nothing to be efficient at"
    return variance.unknown_target(findings)


def examine(findings: Findings) -> Found | None:
    from kltest.grading.laboratory import variance

    compared = findings.once(variance.comparisons)
    if not compared:
        return Found("the best estimator known is exact in one call in the worlds that were graded", "skip")
    worse = [one for one in compared if one.rollouts >= variance.MANY]
    if not worse:
        return None
    words = "; ".join(
        f"{one.row.where}: {one.rollouts:.3g} rollouts for one of {variance.WORDS[one.name]} (variance {one.own:.3g} "
        f"against {one.other:.3g}, in units of ‖∇KL(π‖ref)‖²)"
        for one in worse
    )
    return Found(f"It takes, in {words}.")


def rao_blackwell(logp, logits, ref_logits, mask):
    live = mask != 0
    log_pi, log_ref = (part.where(live.unsqueeze(-1), 0.0) for part in (logits, ref_logits))
    next_kl = (log_pi.exp() * (log_pi - log_ref)).sum(-1).where(live, 0.0)
    following = next_kl.detach().flip(-1).cumsum(-1).flip(-1) - next_kl.detach()
    return (next_kl + following * logp.where(live, 0.0)).sum(-1)


WORLD = SmallWorld(policy=[(0.8, 0.2), (0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5)] * 3, length=2)


def demonstrate() -> Demonstration:
    from kltest.grading.laboratory import variance

    return variance.demonstrate(WORLD, {"as written": squared_sum, "mended": rao_blackwell})


CHECK = Check(
    code="KL802",
    name="inefficient",
    title="Another estimator of the same gradient needs far fewer rollouts (a warning)",
    what=(
        "The expected gradient is the declared one, but the exact variance of one rollout's gradient is at least ten "
        "times that of the least noisy estimator known: of the Rao–Blackwellised one, of reward-to-go, and of the "
        "whole return, each with its best scalar baseline."
    ),
    why=(
        "Noise of the KL term adds to that of the reward and is paid for in rollouts. Below a factor of ten the "
        "cheaper formula may be worth it: the Rao–Blackwellised one needs the next-token distributions of both "
        "models."
    ),
    example=(
        "Two tokens of two actions, π = (0.8, 0.2) at the root and after a first 0, equal to ref = (0.5, 0.5) after a "
        "first 1. The gradient of one rollout has variance 0.242081 if the whole log-ratio is charged to every token, "
        "0.016219 Rao–Blackwellised, and a little less with a baseline besides: 15.1 rollouts for one of those."
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
    wrong=squared_sum,
    mended=rao_blackwell,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
