"""KL703: the drawn token's log-prob is taken under a distribution that was cut to its likeliest actions."""

from __future__ import annotations

from kltest.checks.approximations.heads import accounts_for, beyond_the_usual_environments
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return accounts_for(row, findings, drawn=True) is not None


def tells(row: Row, findings: Findings) -> str:
    head = accounts_for(row, findings, drawn=True)
    return f"no named gradient; log-probs of drawn tokens are taken within {head.words}" if head else ""


def examine(findings: Findings) -> Found | None:
    return beyond_the_usual_environments(findings, drawn=True)


def under_the_truncated_policy(logits, ref_logp, tokens):
    kept = logits >= logits.topk(2, dim=-1).values[..., -1:]
    log_probs = logits.where(kept, float("-inf")).log_softmax(-1)
    logp = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (logp.where(logp.isfinite(), ref_logp) - ref_logp).square() / 2


def under_the_whole_policy(logits, ref_logp, tokens):
    logp = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (logp - ref_logp).square() / 2
