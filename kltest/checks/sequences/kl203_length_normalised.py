"""KL203: each sequence is divided by its own length."""

from kltest.checks.batches import limit
from kltest.checks.check import Found
from kltest.checks.scale import widened
from kltest.checks.sequences.lengths import divided_by_length, divided_by_lengths_of_others, only_one_token
from kltest.checks.stress import late
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for the declared gradient over each rollout's own length."""
    if divided_by_lengths_of_others(findings) or not divided_by_length(row, findings):
        return False
    return widened(findings)[0] <= limit(findings)  # else the columns are counted, padding and all: KL207 or KL501


def examine(findings: Findings) -> Found | None:
    """Report a factor that long rollouts only have."""
    found = late(findings, "KL203")
    return found if found and widened(findings)[0] <= limit(findings) else None


moot = only_one_token


def per_token(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2 / mask.sum(-1)
