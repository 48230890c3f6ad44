"""KL503: legal log-ratios give a value or a gradient that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found

if TYPE_CHECKING:
    from kltest.checks.demonstrations import Reading
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings
    from kltest.rollout import Rollout


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import extremes

    return extremes.overflow(findings)


def moot(findings: Findings) -> str | None:
    from kltest.checks.hygiene import repeat

    return repeat.why_not(findings)


def k3_with_ratio(logp, ref_logp, old_logp):
    log_ratio = logp - ref_logp
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return (logp - old_logp).exp() * k3


def k2_with_ratio(logp, ref_logp, old_logp):
    log_ratio = logp - ref_logp
    return (logp - old_logp).exp().detach() * log_ratio.square() / 2


def demonstrate() -> Demonstration:
    from kltest.checks.demonstrations import gradient, of_calls, rollout, value

    rows: dict[str, tuple[Rollout, Reading]] = {}
    for size in (5, 1000):
        batch = rollout((-0.5 - size,), (-0.5,))
        rows[f"value at u = −{size}"] = (batch, value)
        rows[f"gradient at u = −{size}"] = (batch, gradient(0))
    return of_calls(
        "one token, u = logp − ref_logp, the sampler is the policy",
        {"as written": k3_with_ratio, "mended": k2_with_ratio},
        rows,
    )


CHECK = Check(
    code="KL503",
    name="overflow",
    title="Legal log-probs give a value or a gradient that is not finite",
    what=(
        "With log-probs of at most 0 and log-ratios of ±5, ±30, ±100 and ±1000, the importance ratio being 1, the "
        "value or the gradient is NaN or infinite."
    ),
    why=(
        "exp(ref_logp − logp) has no place in float64 below a log-ratio of −709, in float32 below −88. One token that "
        "the policy has all but ruled out, or a filter set to −1e9, ends the run; clamping the result afterwards "
        "leaves the NaN in the gradient."
    ),
    example=(
        "The differentiable ratio times k3 has the gradient ρ·u, sample by sample: −5 at u = −5, for this and for the "
        "detached ratio times k2. At u = −1000 it is computed as inf − inf = nan, where k2 gives −1000."
    ),
    fix=(
        "Use a form that needs no exponential of the log-ratio: k2 as the loss, or k1 in the reward. Multiplied by the "
        "detached ratio, k2 has the same gradient as k3 multiplied by the differentiable one. A clamp of the exponent "
        "makes it finite, at the price of a dead zone (KL504)."
    ),
    sources=("DeepSeek-V3.2, arXiv 2512.02556, §3.1", "Schulman 2020, Approximating KL Divergence"),
    wrong=k3_with_ratio,
    mended=k2_with_ratio,
    options={"expect": "local_reverse_kl", "sampler": "current"},
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
