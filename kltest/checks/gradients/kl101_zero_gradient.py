"""KL101: the term has no effect in expectation."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a gradient that is zero though no `detach` blocks it."""
    return row.identified == {"zero": 1.0} and not findings.observed.blocked


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if zero is what was declared, else None."""
    return "zero was declared" if set(findings.expect) <= {"zero"} else None
