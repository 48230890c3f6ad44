"""KL204: one mean over the tokens of the whole batch, or another coupling of its rows."""

from kltest.checks.check import Found
from kltest.checks.sequences.larger_batches import examine_larger, noisier
from kltest.checks.sequences.lengths import divided_by_length, divided_by_lengths_of_others
from kltest.identify.findings import Findings, Row
from kltest.truth import is_of_lengths


def explains(row: Row, findings: Findings) -> bool:
    """Return True for gradients divided by lengths of other rollouts of the batch."""
    if not divided_by_lengths_of_others(findings):
        return False
    # Without a name, or of the lengths alone, as k1 as a loss leaves it.
    of_others = row.batch > 1 and all(map(is_of_lengths, row.identified or ()))
    return of_others or divided_by_length(row, findings)


def examine(findings: Findings) -> Found | None:
    """Report a coupling of rows in batches that are larger than the graded ones."""
    return None if noisier(findings) else examine_larger(findings)
