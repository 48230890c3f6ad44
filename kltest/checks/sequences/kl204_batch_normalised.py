"""KL204: one mean over the tokens of the whole batch."""

from kltest.checks.sequences.lengths import divided_by_length, only_one_token
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if not findings.observed.coupled_by_length:
        return False
    if row.batch > 1:
        return row.identified is None
    return divided_by_length(row, findings)


moot = only_one_token
