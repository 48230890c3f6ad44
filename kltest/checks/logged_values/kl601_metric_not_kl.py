"""KL601: what is logged as the KL is none."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def moot(findings: Findings) -> str | None:
    from kltest.checks.logged_values import logged

    return logged.no_kl(findings)


def examine(findings: Findings) -> Found | None:
    from kltest.checks.logged_values import logged

    if reason := logged.unknown(findings):
        return Found(reason, "inconclusive")
    found = logged.no_kl_at_all(findings)
    return Found(" ".join(found)) if found else None


def logs_its_penalty(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = log_ratio.square() / 2
    return penalty, {"kl": penalty.mean()}


def logs_the_kl(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = log_ratio.square() / 2
    return penalty, {"kl": log_ratio.mean()}


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    from kltest.checks.logged_values import logged

    return logged.demonstrate(WORLD, {"as written": logs_its_penalty, "mended": logs_the_kl})


CHECK = Check(
    code="KL601",
    name="metric-not-kl",
    title="What is logged as the KL is none",
    what=(
        'In expectation over the policy\'s rollouts the logged "kl" is neither the KL of whole rollouts, E[Σu], nor '
        "the KL per token, E[Σu]/E[L], nor the mean over rollouts of the mean per token, E[Σu/L]."
    ),
    why=(
        "Adaptive coefficients, early stopping and every comparison between runs go by this number. The term "
        "whose gradient is right need not have the KL as its value: ½u² has the right gradient and is biased as "
        "a KL, the more the further the policy is from the reference."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5). KL(π‖ref) = 0.192745; a loss that logs its own penalty ½u² "
        "logs 0.172320 in expectation."
    ),
    fix=(
        "Log an estimate of the KL itself, whatever the loss is made of: k1 = logp − ref_logp, or "
        "k3 = exp(ref_logp − logp) − 1 − (ref_logp − logp), which is never negative and less noisy near the reference, "
        "summed over live tokens."
    ),
    sources=("Schulman 2020, Approximating KL Divergence", "Tang & Munos 2025, arXiv 2506.09477, §3"),
    wrong=logs_its_penalty,
    mended=logs_the_kl,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
