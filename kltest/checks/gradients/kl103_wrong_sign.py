"""KL103: the term pushes the policy away from the reference."""

from kltest.identify.findings import Findings, Row, local_form, proportion, when_current
from kltest.loss.placement import ROW_FIELDS


def other_reading(findings: Findings) -> str:
    """Return the sentence that names the other reading, if no reward tells which one is meant."""
    loss = findings.loss
    if loss.placement != "reward" or loss.spec is not None or findings.observed.uses & ROW_FIELDS:
        return ""
    if loss.shaped:
        return "What it returns was taken as a reward, higher being better; a cost has --placement reward."
    return (
        "What it returns was taken as a cost, lower being better; what is left of a reward after a penalty "
        "(-beta * kl) has --placement shaped-reward."
    )


remark = other_reading


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a negative multiple of the declared gradient, its local form, or the forward KL in its place."""
    named = (row.besides_entropy, when_current(row.besides_entropy))
    meant = [row.expected, local_form(row.expected)]
    if row.expected.keys() & {"reverse_kl", "local_reverse_kl"}:
        meant += [{"forward_kl": 1.0}, {"local_forward_kl": 1.0}]
    return any((proportion(found, target) or 0) < 0 for target in meant for found in named)


def subtracted(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return -log_ratio.square() / 2
