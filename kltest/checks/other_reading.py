"""The other reading of a value in the reward: a cost, lower being better, or what is left of a reward."""

from kltest.identify.findings import Findings
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
