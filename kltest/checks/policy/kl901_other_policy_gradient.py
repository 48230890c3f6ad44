"""KL901: the policy part follows something else than the gradient of the expected reward."""

from kltest.checks.policy.objectives import asymmetry, open_field
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> str | None:
    """Say of an unnamed row, for which no other check accounts, that it is the gradient of some function."""
    if not open_field(row, findings):
        return None
    return (
        f"no named gradient; its Jacobian is symmetric up to {asymmetry(findings, row):.1g}, so that it is a gradient"
    )


def with_entropy_bonus(logp, reward, mask):
    score = logp.where(mask != 0, 0.0).sum(-1)
    return -reward * score + 0.1 * score.detach() * score


def reward_alone(logp, reward, mask):
    return -reward * logp.where(mask != 0, 0.0).sum(-1)
