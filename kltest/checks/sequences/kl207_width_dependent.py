"""KL207: the gradient changes with the number of padded columns."""

from kltest.checks.batches import limit
from kltest.checks.check import Found
from kltest.checks.hygiene import kl501_padding_leak
from kltest.checks.scale import widened
from kltest.identify.findings import Findings, Row, multiple, shared
from kltest.moments.tolerances import Tolerances

moot = kl501_padding_leak.moot


@shared
def examine(findings: Findings) -> Found | None:
    """Report a gradient at live tokens that changes with the number of padded columns."""
    moved, columns = widened(findings)
    if moved <= limit(findings):
        return None
    if kl501_padding_leak.examine(findings):
        return Found("numbers at padded positions get into the loss (KL501)", "skip")
    return Found(
        f"With {columns} more columns of padding the gradient at live tokens of the same batch differs by "
        f"{moved:.3g} of its size."
    )


def explains(row: Row, findings: Findings) -> bool:
    """Return True for the declared gradient, or its local form, divided by the number of columns."""
    columns = row.case.instances[0].paths.shape[1]
    factor = multiple(row)
    if factor is None or abs(factor * columns - 1) > Tolerances.factor:
        return False
    found = examine(findings)
    return found is not None and found.status == "fail"


def divided_by_columns(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2 / mask.shape[-1]
