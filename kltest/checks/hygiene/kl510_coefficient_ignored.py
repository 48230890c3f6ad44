"""KL510: the KL part of the gradient is not proportional to the coefficient."""

from kltest.checks.check import Found
from kltest.checks.groups.coefficient import coefficient, no_coefficient
from kltest.identify.findings import Findings, Row, proportion


def explains(row: Row, findings: Findings) -> bool | str:
    kind = coefficient(findings).kind
    if kind == "ignored":
        return row.identified in (None, {"zero": 1.0}) and "the loss at β is the loss without it"
    return kind == "other" and (row.identified is None or proportion(row.identified, row.expected) is not None)


def examine(findings: Findings) -> Found | None:
    found = coefficient(findings)
    if found.kind not in ("ignored", "other"):
        return None
    if found.kind == "ignored":
        return Found("The loss takes a coefficient, and neither its value nor its gradient changes with it.")
    words = ", ".join(f"{strength:.4g} at β = {beta:g}" for beta, strength in found.strength.items())
    return Found(f"What β adds to the gradient, as a multiple of what it adds at the β of this grading: {words}.")


moot = no_coefficient


def squared_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio).square() / 2


def plain_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return kl_coef * log_ratio.square() / 2
