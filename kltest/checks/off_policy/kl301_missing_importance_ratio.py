"""KL301: rollouts of the sampler are used as if they were the policy's own."""

from kltest.checks.off_policy.ratios import sampler_has_influence
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a gradient without ratios from another sampler, if the sampler's log-probs have no influence.

    The influence is read off the environment with the most tokens: on one token the ratio of the others is missing, and
    a ratio of the whole rollout is the token's own.
    """
    if row.sampler == "current":
        return False
    without = row.identified is None or any(name.endswith("@rollouts") for name in row.identified)
    if not (without or findings.measure.right_when_current(row)):
        return False
    return not sampler_has_influence(findings, _longest(findings), row.sampler != "stale")


def _longest(findings: Findings) -> str:
    """Return the environment of the row with the most tokens in a rollout, on average."""
    rows = [row for row in findings.rows if row.sampler != "current"]
    return max(rows, key=lambda row: row.case.instances[0].paths.lengths.mean()).environment


moot = Findings.why_not_stale
