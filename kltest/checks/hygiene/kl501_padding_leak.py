"""KL501: numbers at padded positions get into the loss."""

import torch
from torch import Tensor

from kltest.checks.check import Found
from kltest.checks.hygiene.padding import LOG_PROBS, exchange, not_exchangeable
from kltest.identify.findings import Findings

HUGE = 1e4

moot = not_exchangeable


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
