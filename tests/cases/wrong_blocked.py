"""Losses whose gradient never reaches the policy."""

import torch
from cases.table import wrong


def through_numbers(logp, ref_logp, mask):
    """Read out with .item(), as for a log, and made into a tensor again."""
    totals = [
        sum((p - q).item() for p, q in zip(own[live], other[live], strict=True))
        for own, other, live in zip(logp, ref_logp, mask.bool(), strict=True)
    ]
    return torch.tensor([total**2 / 2 for total in totals], dtype=logp.dtype)


@torch.inference_mode()
def in_inference_mode(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2


class FrozenPolicy:
    """The penalty of a trainer that keeps the policy's log-probs as data."""

    def __call__(self, logp, ref_logp, mask, beta):
        log_probs = logp.data.clone()
        return beta * (log_probs - ref_logp).masked_fill(mask == 0, 0.0).sum(1).square().mean() / 2


CASES = [
    wrong("KL509", through_numbers),
    wrong("KL509", in_inference_mode),
    wrong("KL509", FrozenPolicy(), also=("KL506",)),
]
