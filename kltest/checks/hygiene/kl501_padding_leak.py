"""KL501: what stands at padded positions gets into the loss."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import padding

    return padding.leak(findings)


def moot(findings: Findings) -> str | None:
    from kltest.checks.hygiene import padding

    return padding.why_not(findings)


def unmasked(logp, ref_logp):
    return ((logp - ref_logp).square() / 2).sum(-1)


def masked(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0)
    return (log_ratio.square() / 2).sum(-1)


def demonstrate() -> Demonstration:
    from kltest.checks.demonstrations import gradient, of_calls, rollout, value

    calm, other = (rollout((log(0.8), log(0.5)), (log(0.5), log(padded)), mask=(1.0, 0.0)) for padded in (0.5, 0.25))
    return of_calls(
        "one live token, π = 0.8, ref = 0.5, and one of padding, π = 0.5",
        {"as written": unmasked, "mended": masked},
        {
            "value, ref = 0.5 in the padding": (calm, value),
            "value, ref = 0.25 in the padding": (other, value),
            "gradient at the padding": (other, gradient(1)),
        },
    )


CHECK = Check(
    code="KL501",
    name="padding-leak",
    title="What stands at padded positions gets into the loss",
    what=(
        "The value, the gradient at live tokens or the gradient at padded positions depends on numbers that no "
        "token stands for. They were exchanged for others, and for huge ones, in every field."
    ),
    why=(
        "Padding holds whatever the framework left there: the log-probs of pad tokens, of prompts, of the batch "
        "before. The penalty then pushes on tokens that were never sampled, more so the shorter a rollout is beside "
        "its batch."
    ),
    example=(
        "One live token with π = 0.8 and ref = 0.5, one padded position with π = 0.5. Summed without the mask the "
        "value is (ln 1.6)²/2 = 0.110452 if the padding holds ref = 0.5, and 0.350678 if it holds ref = 0.25; the "
        "gradient at the padding is ln 2 = 0.693147 and has to be 0."
    ),
    fix=(
        "Take the mask and cut padding out before any arithmetic: log_ratio = (logp - ref_logp).where(mask != 0, 0.0). "
        "A function that returns one number a token may leave it to its caller."
    ),
    sources=("verl, verl/utils/torch_functional.py: masked_sum, masked_mean",),
    wrong=unmasked,
    mended=masked,
    options={"expect": "local_reverse_kl"},
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
