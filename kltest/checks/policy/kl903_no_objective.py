"""KL903: what the policy part follows is the gradient of no function."""

from kltest.checks.policy.objectives import ASYMMETRIC, asymmetry, open_field
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> str | None:
    """Give the asymmetry of the Jacobian of an unnamed row, if it is none of a gradient."""
    if not open_field(row, findings):
        return None
    found = asymmetry(findings, row)
    return f"no function has it for a gradient: ‖J − Jᵀ‖/‖J‖ is about {found:.2g}" if found > ASYMMETRIC else None


def discounted(logp, reward, mask):
    """Each token is credited with the reward, discounted by the tokens that are left."""
    left = mask.flip(-1).cumsum(-1).flip(-1) - 1
    return -((0.5**left) * reward.unsqueeze(-1) * logp).where(mask != 0, 0.0).sum(-1)


def undiscounted(logp, reward, mask):
    return -(reward.unsqueeze(-1) * logp).where(mask != 0, 0.0).sum(-1)
