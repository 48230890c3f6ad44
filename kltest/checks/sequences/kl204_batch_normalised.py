"""KL204: one mean over the tokens of the whole batch."""

from __future__ import annotations

from kltest.checks.sequences.lengths import divided_by_length, only_one_token
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if not findings.observed.coupled_by_length:
        return False
    if row.batch > 1:
        return row.identified is None
    return divided_by_length(row, findings)


moot = only_one_token


def mean_over_tokens(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).sum() / mask.sum()
