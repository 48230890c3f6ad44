"""KL501: numbers at padded positions get into the loss."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from kltest.checks.check import Found
from kltest.checks.demonstrations import gradient, of_calls, rollout, value
from kltest.checks.hygiene.padding import LOG_PROBS, exchange, no_padding
from kltest.counterexample.demonstration import Demonstration
from kltest.identify.findings import Findings

HUGE = 1e4

moot = no_padding


def examine(findings: Findings) -> Found | None:
    """Fill padding with other legal numbers and with huge ones."""
    return exchange(
        findings,
        {
            "other log-probs and token ids": _others,
            f"{HUGE:g} for the policy and −{HUGE:g} for the others": lambda name, dead: _signed(name, dead, HUGE),
            f"−{HUGE:g} for the policy and {HUGE:g} for the others": lambda name, dead: _signed(name, dead, -HUGE),
        },
    )


def _others(name: str, dead: Tensor) -> Tensor:
    if name == "tokens":
        # One id less, or 1 for 0: legal in every vocabulary.
        return torch.where(dead > 0, dead - 1, dead + 1)
    # A different change for every field, so that no log-ratio stays.
    apart = 1 + 0.3 * LOG_PROBS.index(name)
    steps = apart * torch.arange(1, dead.numel() + 1, dtype=dead.dtype).reshape(dead.shape)
    return (dead + steps.sin()).log_softmax(-1) if dead.dim() > 1 else dead - steps / 3


def _signed(name: str, dead: Tensor, size: float) -> Tensor:
    if name == "tokens":
        return dead
    return torch.full_like(dead, size if name in ("logp", "logits") else -size)


def unmasked(logp, ref_logp):
    return ((logp - ref_logp).square() / 2).sum(-1)


def masked(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0)
    return (log_ratio.square() / 2).sum(-1)


def demonstrate() -> Demonstration:
    calm, other = (rollout((log(0.8), log(0.5)), (log(0.5), log(padded)), mask=(1.0, 0.0)) for padded in (0.5, 0.25))
    return of_calls(
        "one live token, π = 0.8, ref = 0.5, and one of padding, π = 0.5",
        {"as written": unmasked, "fixed": masked},
        {
            "value, ref = 0.5 in the padding": (calm, value),
            "value, ref = 0.25 in the padding": (other, value),
            "gradient at the padding": (other, gradient(1)),
        },
    )
