"""KL602: the logged KL is multiplied by something."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def moot(findings: Findings) -> str | None:
    from kltest.checks.logged_values import logged

    return logged.no_kl(findings)


def examine(findings: Findings) -> Found | None:
    from kltest.checks.logged_values import logged
    from kltest.checks.logged_values import stored_metrics as recorded

    # What was changed in place changes with whatever it was multiplied by; it is right once it is logged as a copy.
    if findings.once(recorded.mutation):
        return None
    found = findings.once(logged.factors)
    return Found(f"It is multiplied by {'; and by '.join(factor.words for factor in found)}.") if found else None


def logs_the_scaled_term(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": (beta * log_ratio).mean()}


def logs_the_bare_kl(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": log_ratio.mean()}


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    from kltest.checks.logged_values import logged

    losses = {"as written": logs_the_scaled_term, "mended": logs_the_bare_kl}
    return logged.demonstrate(WORLD, losses, beta=0.1)


CHECK = Check(
    code="KL602",
    name="metric-reweighted",
    title="The logged KL is multiplied by something else",
    what=(
        'The logged "kl" is one of the KLs times something: a ratio to the sampler that does not make it right '
        "off-policy, an advantage or a reward, the coefficient β, or a constant."
    ),
    why=(
        "What is logged then changes with that factor while the policy stays where it is. A KL that carries β "
        "looks ten times smaller after β was made ten times smaller, and a curve of it says nothing of how far the "
        "policy has moved; one that carries a ratio per token is a KL under no distribution."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), β = 0.1. KL(π‖ref) = 0.192745; the term as it enters the "
        "loss logs 0.019274."
    ),
    fix="Log the KL before it is multiplied: by β, by an importance ratio, by an advantage, by a count of tokens.",
    sources=(
        "TRL #4638 and #6586: the per-token KL is multiplied by the importance ratio and logged afterwards",
        "DeepSeek-V3.2, arXiv 2512.02556, §3.1",
    ),
    wrong=logs_the_scaled_term,
    mended=logs_the_bare_kl,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
