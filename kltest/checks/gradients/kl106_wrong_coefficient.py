"""KL106: the gradient is the declared one times a positive factor."""

from math import isclose

from kltest.checks.batches import share_by_size
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row, local_form, proportion, when_current
from kltest.moments.tolerances import Tolerances


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a positive multiple, other than 1, of the declared gradient or of its local form."""
    whole = proportion(row.identified, row.expected)
    if whole is not None:
        return whole > 0
    partial = proportion(when_current(row.identified), local_form(row.expected))
    return partial is not None and partial > 0 and abs(partial - 1) > 1e-6


def remark(findings: Findings) -> str:
    """Say how the factor depends on the batch size, if rows are coupled and it does."""
    rows = (row for row in findings.rows if row.batch > 1 and row.method == "exact" and explains(row, findings))
    first = next(rows, None)
    shares = share_by_size(first, findings) if first is not None else {}
    if not shares or isclose(shares[2], shares[3], rel_tol=Tolerances.factor):
        return ""
    sizes = " and ".join(f"{share:.4g} of it in batches of {size}" for size, share in shares.items())
    return f"In a bandit it is {sizes}: no constant, but a number that depends on the batch size."


def examine(findings: Findings) -> Found | None:
    """A constant factor of the KL term alone is a warning: agreement up to scale was established by the rows."""
    if findings.scale is None or findings.scales_all:
        return None
    return Found(
        f"It is {findings.scale:.6g} times the declared one, at every length and batch size that was tried and also "
        "with more columns of padding.",
        level="warning",
    )


def without_the_half(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square()
