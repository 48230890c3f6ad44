"""KL502: NaN or infinity at a padded position comes through."""

from __future__ import annotations

from math import log, nan
from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import padding

    return padding.not_finite(findings)


def moot(findings: Findings) -> str | None:
    from kltest.checks.hygiene import padding

    return padding.why_not(findings)


def multiplied(logp, ref_logp, mask):
    kl = (logp - ref_logp).square() / 2
    return (kl * mask).sum(-1)


def cut_out(logp, ref_logp, mask):
    kl = (logp - ref_logp).where(mask != 0, 0.0).square() / 2
    return kl.sum(-1)


def demonstrate() -> Demonstration:
    from kltest.checks.demonstrations import gradient, of_calls, rollout, value

    calm, broken = (rollout((log(0.8), log(0.5)), (log(0.5), padded), mask=(1.0, 0.0)) for padded in (log(0.5), nan))
    return of_calls(
        "one live token, π = 0.8, ref = 0.5, and one of padding, π = 0.5",
        {"as written": multiplied, "mended": cut_out},
        {
            "value, ref = 0.5 in the padding": (calm, value),
            "value, NaN in the padding": (broken, value),
            "gradient at the padding": (broken, gradient(1)),
        },
    )


CHECK = Check(
    code="KL502",
    name="padding-nan",
    title="NaN or infinity at a padded position comes through",
    what=(
        "With NaN, +inf or −inf at padded positions of the log-probs the value or the gradient changes, or the "
        "gradient there is not exactly zero."
    ),
    why=(
        "0·NaN is NaN: multiplying by the mask does not cut anything out. Nor does a where around the result: its "
        "derivative multiplies the NaN derivative inside by zero. One −inf of a filtered pad token, and every "
        "parameter of the network is NaN after the next step."
    ),
    example=(
        "One live token with π = 0.8 and ref = 0.5, one padded position with NaN as its reference. (kl * mask).sum() "
        "is nan, and so is the gradient at the padding; cut out before the arithmetic the value is "
        "(ln 1.6)²/2 = 0.110452 and the gradient there 0."
    ),
    fix=(
        "Put 0 in the place of the log-ratio at padded positions, before anything is computed from it: "
        "(logp - ref_logp).where(mask != 0, 0.0). Not afterwards, and not by multiplication."
    ),
    sources=("JAX FAQ, Gradients contain NaN where using where",),
    wrong=multiplied,
    mended=cut_out,
    options={"expect": "local_reverse_kl"},
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
