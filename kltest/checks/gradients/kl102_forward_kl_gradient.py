"""KL102: the gradient is the other KL's."""

from kltest.identify.findings import Findings, Row, when_current

FORWARD = frozenset({"forward_kl", "local_forward_kl"})


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a multiple of the gradient of a forward KL."""
    plain = when_current(row.besides_entropy)
    return len(plain) == 1 and set(plain) <= FORWARD


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if a forward KL was declared, else None."""
    return "a forward KL was declared" if when_current(findings.expect).keys() & FORWARD else None
