"""KL508: half precision where it costs the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found
from kltest.checks.losses import squared_sum

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import precision

    return precision.too_low(findings)


def moot(findings: Findings) -> str | None:
    from kltest.checks.hygiene import repeat

    return repeat.why_not(findings)


def in_bfloat16(logp, ref_logp, mask):
    log_ratio = logp.bfloat16() - ref_logp.bfloat16()
    return log_ratio.where(mask != 0, 0.0).sum(-1).square() / 2


def demonstrate() -> Demonstration:
    from kltest.checks.demonstrations import gradient, of_calls, rollout

    rows = {}
    for reference in (-12.03, -12.04):
        rows[f"gradient, ref_logp = {reference:g}".replace("-", "−")] = (
            rollout((-12.0,), (reference,)),
            gradient(0),
        )
    return of_calls("one token, logp = −12", {"as written": in_bfloat16, "mended": squared_sum}, rows)


CHECK = Check(
    code="KL508",
    name="low-precision",
    title="The loss loses its digits in half precision",
    what=(
        "Given float64 it computes in bfloat16 or float16; or, given half precision, its gradient is not finite or "
        "further from float64 on the same numbers than a loss that takes care of its digits."
    ),
    why=(
        "A log-ratio is a small difference of large numbers: between log-probs of −12, bfloat16 knows the "
        "differences 0 and 0.0625 and nothing between. The penalty is then mostly rounding noise, with a bias where "
        "an exponential is taken of it."
    ),
    example=(
        "logp = −12 and ref_logp = −12.03: the log-ratio is 0.03, and so is the gradient of its half square. In "
        "bfloat16 both are −12, and the gradient is 0; with ref_logp = −12.04 it is 0.0625 instead of 0.04."
    ),
    fix=(
        "Convert log-probs with .float() before they are subtracted, and keep the loss in float32; better, compute "
        "them from the logits in float32 already."
    ),
    sources=("Qi et al. 2025, Defeating the Training-Inference Mismatch via FP16, arXiv 2510.26788",),
    wrong=in_bfloat16,
    mended=squared_sum,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
