"""KL104: the value of the term in the reward is right and its gradient is not."""

from kltest.identify.findings import Findings, Row, when_current

# The derivative of no estimator of the KL contains these.
NO_DERIVATIVE = frozenset({"to_sampler_kl", "from_sampler_kl", "entropy", "local_entropy", "expected_reward"})


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a sum of two named gradients or more, each of which has a derivative."""
    if row.identified is None or min(len(row.identified), len(when_current(row.identified))) < 2:
        return False
    return not row.identified.keys() & NO_DERIVATIVE


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if the term is a loss, else None."""
    return "the term is not placed in the reward" if findings.placement == "loss" else None
