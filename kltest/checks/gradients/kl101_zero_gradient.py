"""KL101: the term has no effect in expectation."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified == {"zero": 1.0} and not findings.observed.blocked


def moot(findings: Findings) -> str | None:
    return "zero was declared" if set(findings.expect) <= {"zero"} else None
