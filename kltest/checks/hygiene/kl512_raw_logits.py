"""KL512: what is taken as logits has to be normalised."""

import torch

from kltest.checks.batches import apart, as_array, limit, usual_batch
from kltest.checks.check import Found
from kltest.checks.demonstrations import Demonstration, Losses
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.identify.findings import Findings

FIELDS = frozenset({"logits", "ref_logits", "old_logits"})


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check: no parameter is called logits, or calls cannot be compared."""
    return not_comparable(findings) if _fields(findings) else "no parameter is called logits"


def _fields(findings: Findings) -> list[str]:
    return sorted({field for name, field in findings.loss.fields.items() if field in FIELDS and "logits" in name})


def examine(findings: Findings) -> Found | None:
    """Add a constant to all logits of a position, another one for each position and policy; rows share prefixes."""
    batch = usual_batch(findings)
    shape, generator = (1, batch.peek("mask").shape[1], 1), torch.Generator().manual_seed(findings.seed)
    shifted = {
        name: batch.peek(name).detach() + torch.randn(shape, generator=generator, dtype=torch.float64)
        for name in _fields(findings)
    }
    before, after = (as_array(findings.measure.differentiate(one), batch) for one in (batch, batch.replace(**shifted)))
    off = apart(after, before)
    if off <= limit(findings):
        return None
    return Found(f"With a constant added to all logits of a position the gradient differs by {off:.2g} of its size.")


def of_raw_logits(logits, ref_logits, mask):
    kl = (logits.exp() * (logits - ref_logits)).sum(-1)
    return kl.where(mask != 0, 0.0).sum(-1)


def of_normalised_logits(logits, ref_logits, mask):
    live = mask != 0
    policy, reference = (part.where(live.unsqueeze(-1), 0.0).log_softmax(-1) for part in (logits, ref_logits))
    kl = (policy.exp() * (policy - reference)).sum(-1)
    return kl.where(live, 0.0).sum(-1)


def demonstrate(losses: Losses) -> Demonstration:
    """Value of each loss with normalised logits, and with 1 added to those of the policy."""
    policy, reference = (torch.tensor([[row]], dtype=torch.float64).log() for row in ((0.8, 0.2), (0.5, 0.5)))
    mask = torch.ones(1, 1, dtype=torch.float64)
    added = {"value, normalised": 0.0, "value, 1 added to the policy's": 1.0}
    rows: list[tuple[str | float, ...]] = [
        (name, *(float(loss(policy + number, reference, mask).sum()) for loss in losses.values()))
        for name, number in added.items()
    ]
    return Demonstration("one token, π = (0.8, 0.2), ref = (0.5, 0.5)", ("", *losses), tuple(rows))
