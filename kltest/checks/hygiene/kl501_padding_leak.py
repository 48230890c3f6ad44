"""KL501: numbers at padded positions get into the loss."""

import torch
from torch import Tensor

from kltest.checks.batches import apart, as_array, limit, usual_batch
from kltest.checks.check import Found, shared
from kltest.checks.hygiene.padding import LOG_PROBS, exchange, not_exchangeable, numbers
from kltest.identify.findings import Findings
from kltest.moments.differentiate import differentiate

# The least log-prob that is written: those of sampled tokens in training are above it.
LEAST = -50.0

moot = not_exchangeable


@shared
def examine(findings: Findings) -> Found | None:
    """Fill padding with other legal numbers: near those that stood there, and as far apart as the usual ones get.

    Then put padding between live tokens.
    """
    leak = exchange(
        findings,
        {
            "other log-probs and token ids": _others,
            "0 for the policy and −50 for the others": lambda name, dead: numbers(name, dead, 0.0, LEAST),
            "−50 for the policy and 0 for the others": lambda name, dead: numbers(name, dead, LEAST, 0.0),
        },
    )
    return leak or _between(findings)


def _between(findings: Findings) -> Found | None:
    """Compare the gradient if a masked column stands last, and if it comes second."""
    right = all(row.agrees is True for row in findings.rows)
    if not right or "mask" not in findings.observed.uses:
        return None
    last = usual_batch(findings).wider(1, findings.seed)
    width = last.peek("mask").shape[1]
    places = [0, width - 1, *range(1, width - 1)]
    fields = {name: last.peek(name).detach() for name in last}
    second = last.replace(**{name: field[:, places] for name, field in fields.items() if field.dim() > 1})
    expected, found = (as_array(differentiate(findings.loss, one, None), one) for one in (last, second))
    findings.reach.holes = True
    off = apart(found, expected[:, places])
    if off <= limit(findings):
        return None
    return Found(
        f"With a masked column between live tokens the gradient differs by {off:.3g} of its size from that with the "
        "same column behind them: what stands in the gap counts, or a live token behind it does not. It matters if "
        "rollouts have tool output or several turns, whose masks have such gaps; packed tokens that come with lengths "
        "or cu_seqlens cannot have any.",
        level="warning",
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
