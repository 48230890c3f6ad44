"""KL511: the gradient of a multiple or of a sum of losses is no multiple or sum of their gradients."""

from collections.abc import Callable
from contextlib import suppress
from math import log
from typing import Any

import torch

from kltest.checks.batches import apart, gradient_beside, gradient_of_times, limit, nearest_multiple, usual_batch
from kltest.checks.check import Found
from kltest.checks.demonstrations import Demonstration, Losses, one_row
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.errors import KltestError
from kltest.identify.findings import Findings

# What scales a loss: coefficients, and losses of half precision by 2¹⁶ (which float16 itself has no number for).
FACTORS = (2.0, 2.0**16, 2.0**-16)


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if the term is placed in the reward, or if calls cannot be compared."""
    return "a value in the reward needs no gradient" if findings.placement == "reward" else not_comparable(findings)


def examine(findings: Findings) -> Found | None:
    """Compare gradients of multiples of the loss with multiples of its gradient; then that of a sum of two losses."""
    batch = usual_batch(findings)
    once = gradient_of_times(findings.measure, 1.0, batch)
    if not once.any():
        return None
    for factor in (2.0,) if findings.observed.dtype == "float16" else FACTORS:
        times = gradient_of_times(findings.measure, factor, batch) / factor
        if (off := apart(times, once)) > limit(findings):
            share = factor * nearest_multiple(times, once)
            return Found(
                f"The gradient of {factor:.4g}·loss is {share:.4g} times that of the loss, off by {off:.2g} of it."
            )
    with suppress(KltestError):  # torch refuses what is written over, loudly
        added = gradient_beside(findings.measure, batch, batch.take(range(len(batch))[::-1]).near_reference())
        if (off := apart(added, once)) > limit(findings):
            return Found(
                "Of two calls whose losses are added up before one backward pass, the gradient of the first one is off "
                f"by {off:.2g} of what it is alone."
            )
    return None


def without_upstream(logp, ref_logp, mask):
    class HalfSquare(torch.autograd.Function):
        @staticmethod
        def forward(context, log_ratio):
            context.save_for_backward(log_ratio)
            return log_ratio.sum(-1).square() / 2

        @staticmethod
        def backward(context, upstream):
            (log_ratio,) = context.saved_tensors
            return log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)

    return HalfSquare.apply((logp - ref_logp).where(mask != 0, 0.0))


def with_upstream(logp, ref_logp, mask):
    class HalfSquare(torch.autograd.Function):
        @staticmethod
        def forward(context, log_ratio):
            context.save_for_backward(log_ratio)
            return log_ratio.sum(-1).square() / 2

        @staticmethod
        def backward(context, upstream):
            (log_ratio,) = context.saved_tensors
            return upstream[:, None] * log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)

    return HalfSquare.apply((logp - ref_logp).where(mask != 0, 0.0))


def demonstrate(losses: Losses) -> Demonstration:
    """Gradient of each loss, and of twice as much."""

    def gradient(loss: Callable[..., Any], factor: float) -> float:
        logp = one_row((log(0.8),)).requires_grad_()
        (found,) = torch.autograd.grad(factor * loss(logp, one_row((log(0.5),)), one_row((1.0,))).sum(), logp)
        return float(found[0, 0])

    times = {"gradient of the loss": 1.0, "gradient of twice the loss": 2.0}
    rows: list[tuple[str | float, ...]] = [
        (name, *(gradient(loss, factor) for loss in losses.values())) for name, factor in times.items()
    ]
    return Demonstration("one token, π = 0.8, ref = 0.5", ("", *losses), tuple(rows))
