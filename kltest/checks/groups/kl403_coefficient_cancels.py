"""KL403: advantages are divided by a deviation to which the KL term itself contributes."""

from kltest.checks.check import Found
from kltest.checks.hygiene.kl510_coefficient_ignored import coefficient
from kltest.checks.hygiene.kl510_coefficient_ignored import moot as no_coefficient
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True if the coefficient cancels."""
    return coefficient(findings).kind == "cancels"


def examine(findings: Findings) -> Found | None:
    """Report a KL part of tied groups that is the same at every β."""
    if coefficient(findings).kind != "cancels":
        return None
    return Found(
        "In a group of equal rewards the KL part of the gradient is the same at β = 0.02, 0.2 and 2; in other groups "
        "it is not proportional to β either."
    )


moot = no_coefficient


def normalised_with_the_kl(logp, ref_logp, mask, rewards, kl_coef):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    value = rewards - kl_coef * cost
    advantages = (value - value.mean()) / (value.std() + 1e-4)
    return -(advantages * logp.where(mask != 0, 0.0).sum(-1)).mean()


def normalised_without_the_kl(logp, ref_logp, mask, rewards, kl_coef):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio.square() / 2 - advantages * logp.where(mask != 0, 0.0).sum(-1)).mean()
