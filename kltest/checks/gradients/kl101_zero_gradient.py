"""KL101: the term has no effect in expectation."""

from kltest.identify.findings import Findings, Row

# Of a term that sees whole distributions and not the log-prob of the drawn token under the reference.
AS_A_BASELINE = (
    "0: what a token is charged does not depend on which token was drawn, as a baseline does not, and E[∇log π] is 0"
)


def explains(row: Row, findings: Findings) -> bool | str:
    """Return True, or a sentence that says why, for a gradient that is zero though no `detach` blocks it."""
    if row.identified != {"zero": 1.0} or findings.observed.blocked:
        return False
    takes = findings.loss.takes
    return AS_A_BASELINE if "ref_logits" in takes and not takes & {"ref_logp", "tokens", "rollout"} else True


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if zero is what was declared, else None."""
    return "zero was declared" if set(findings.expect) <= {"zero"} else None
