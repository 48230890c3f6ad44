"""KL504: in an interval of log-ratios the gradient is exactly zero, or stands still where it should grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found
from kltest.checks.losses import squared_sum

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import extremes

    return findings.once(extremes.dead_zones)


def moot(findings: Findings) -> str | None:
    from kltest.checks.hygiene import repeat

    return repeat.why_not(findings)


def clamped(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).clamp(max=10.0)


def demonstrate() -> Demonstration:
    from kltest.checks.demonstrations import gradient, of_calls, rollout

    rows = {f"gradient at u = {u:g}": (rollout((-0.5,), (-0.5 - u,)), gradient(0)) for u in (4.0, 4.472, 4.473, 6.0)}
    return of_calls(
        "one token, u = logp − ref_logp; (ln π/ref)²/2 reaches 10 at u = √20 = 4.472136",
        {"as written": clamped, "mended": squared_sum},
        rows,
    )


CHECK = Check(
    code="KL504",
    name="dead-zone",
    title="In an interval of log-ratios the gradient is exactly zero, or no longer grows as it should",
    what=(
        "Beyond a bound nothing pulls the policy back: a clamp of the log-ratio or of the value has derivative zero, "
        "and so has a difference of large terms of which rounding leaves nothing. For a value in the reward: it no "
        "longer changes with the log-ratio. A detached log-ratio that is clamped, or Huber's loss, leaves a pull that "
        "stays the same however far the policy has gone, where the declared gradient grows."
    ),
    why=(
        "The penalty is switched off, or bounded, where it is needed most, far from the reference: a policy that has "
        "left is not pulled back as declared. The clamped k3 of common libraries (log-ratio to ±20, value to ±10) is "
        "dead below −2.6, where the policy has a 13th of the reference's probability; k3 with a differentiable ratio "
        "is below −41, where its gradient ρu is computed as e⁻ᵘ − e⁻ᵘ."
    ),
    example=(
        "(ln π/ref)²/2 clamped to at most 10: at u = 4 the gradient is 4, as it should; from u = √20 = 4.472136 on it "
        "is 0, and at u = 6 the penalty is silent where it should pull with 6."
    ),
    fix=(
        "Do not clamp what is differentiated: clamp what is logged, and bound the step by clipping the norm of the "
        "gradient; a form without exponentials (k2) needs no clamp to stay finite."
    ),
    sources=("verl and OpenRLHF: low_var_kl, clamped to ±10", "Shah et al. 2025, arXiv 2512.21852"),
    wrong=clamped,
    mended=squared_sum,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
