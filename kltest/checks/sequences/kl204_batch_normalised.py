"""KL204: one mean over the tokens of the whole batch, or another coupling of its rows."""

from kltest.checks.check import Found
from kltest.checks.sequences.larger_batches import examine_larger, noisier
from kltest.checks.sequences.lengths import divided_by_length
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if not findings.observed.coupled_by_length:
        return False
    if row.batch > 1:
        return row.identified is None
    return divided_by_length(row, findings)


def examine(findings: Findings) -> Found | None:
    """Report a coupling of rows in batches that are larger than the graded ones."""
    return None if noisier(findings) else examine_larger(findings)
