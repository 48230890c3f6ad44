"""KL204: one mean over the tokens of the whole batch, or another coupling of its rows."""

from kltest.checks.check import Found
from kltest.checks.sequences.larger_batches import examine_larger, noisier
from kltest.checks.sequences.lengths import divided_by_length, divided_by_lengths_of_others
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for gradients divided by lengths of other rollouts of the batch."""
    if not divided_by_lengths_of_others(findings):
        return False
    return (row.batch > 1 and row.identified is None) or divided_by_length(row, findings)


def examine(findings: Findings) -> Found | None:
    """Report a coupling of rows in batches that are larger than the graded ones."""
    return None if noisier(findings) else examine_larger(findings)
