"""The batch on which checks try a loss: rollouts of every length, with padding and different rewards."""

from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.rollout import Rollout

ROWS = 12


def no_padding(findings: Findings) -> str | None:
    """Return a reason to skip checks of padding if no graded environment has any, else None."""
    padded = any(instances(environment, findings.seed)[0].paths.padded for environment in findings.environments)
    return None if padded else "only environments without padding were graded"


def usual_batch(findings: Findings, sampler: str = "stale") -> Rollout:
    """Rollouts of every length with different rewards; groups of two, three, four or six divide their number."""
    instance = instances("ragged", findings.seed)[0]
    lengths = instance.paths.mask.sum(axis=1)
    rows = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))[:ROWS]
    return Rollout.of(instance, sampler=sampler, padding=findings.seed, centre="batch").take(sorted(rows))


def single_tokens(findings: Findings) -> Rollout:
    """As many rollouts of one token, in a batch of one column."""
    instance = instances("bandit", findings.seed)[0]
    rows = [row % len(instance.paths.mask) for row in range(ROWS)]
    return Rollout.of(instance, sampler="stale", padding=findings.seed, centre="batch").take(rows)
