"""KL501: numbers at padded positions get into the loss."""

import torch
from torch import Tensor

from kltest.checks.check import Found, shared
from kltest.checks.hygiene.padding import LOG_PROBS, apart, exchange, not_exchangeable
from kltest.identify.findings import Findings

# The least log-prob that is written: those of sampled tokens in training are above it.
LEAST = -50.0

moot = not_exchangeable


@shared
def examine(findings: Findings) -> Found | None:
    """Fill padding with other legal numbers: near those that stood there, and as far apart as the usual ones get."""
    return exchange(
        findings,
        {
            "other log-probs and token ids": _others,
            "0 for the policy and −50 for the others": lambda name, dead: apart(name, dead, 0.0, LEAST),
            "−50 for the policy and 0 for the others": lambda name, dead: apart(name, dead, LEAST, 0.0),
        },
    )


def _others(name: str, dead: Tensor) -> Tensor:
    if name == "tokens":
        # One id less, or 1 for 0: legal in every vocabulary.
        return torch.where(dead > 0, dead - 1, dead + 1)
    # A different change for every field, so that no log-ratio stays.
    scale = 1 + 0.3 * LOG_PROBS.index(name)
    steps = scale * torch.arange(1, dead.numel() + 1, dtype=dead.dtype).reshape(dead.shape)
    return (dead + steps.sin()).log_softmax(-1) if dead.dim() > 1 else (dead - steps / 3).clamp(LEAST, 0.0)


def unmasked(logp, ref_logp):
    return ((logp - ref_logp).square() / 2).sum(-1)
