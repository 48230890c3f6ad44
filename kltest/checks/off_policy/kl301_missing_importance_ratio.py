"""KL301: rollouts of the sampler are used as if they were the policy's own."""

from kltest.checks.off_policy.ratios import sampler_has_influence
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a gradient without ratios from a stale sampler, if the sampler's log-probs have no influence."""
    if row.sampler != "stale":
        return False
    without = row.identified is None or any(name.endswith("@rollouts") for name in row.identified)
    if not (without or findings.measure.right_when_current(row)):
        return False
    return not sampler_has_influence(findings, row.environment)


moot = Findings.why_not_stale
