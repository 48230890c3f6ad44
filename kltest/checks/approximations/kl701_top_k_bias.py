"""KL701: the KL of the likeliest actions is taken for the KL of all."""

from __future__ import annotations

from kltest.checks.approximations.heads import accounts_for, beyond_the_usual_environments
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return accounts_for(row, findings, drawn=False) is not None


def tells(row: Row, findings: Findings) -> str:
    head = accounts_for(row, findings, drawn=False)
    return f"no named gradient; the loss distinguishes only {head.words}" if head else ""


def examine(findings: Findings) -> Found | None:
    return beyond_the_usual_environments(findings, drawn=False)


def over_the_head(logits, ref_logits):
    log_probs, head = logits.topk(2, dim=-1)
    ref_log_probs = ref_logits.gather(-1, head)
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)


def over_all(logits, ref_logits):
    return (logits.exp() * (logits - ref_logits)).sum(-1)
