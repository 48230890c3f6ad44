"""KL401: groups without a reward signal are masked, and their KL term with them."""

import numpy as np

from kltest.checks.batches import group_fixture, limit, norm
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row, shared
from kltest.loss.placement import ROW_FIELDS
from kltest.moments.batches import groups_of


def explains(row: Row, findings: Findings) -> str:
    """Return the probability of a tie in words if the KL part of tied groups is masked, else the empty string."""
    if row.batch == 1 or not _masks_tied_groups(findings):
        return ""
    case = row.case
    instance = case.instances[0]
    rewards = instance.environment.returns(instance.paths)
    groups = groups_of(instance, case.sampler, row.batch)
    ties = sum(chance for rows, chance in groups if np.ptp(rewards[np.array(rows)]) == 0)
    return f"a group of {row.batch} ties with probability {ties:.3g}, and with it E[1{{tied}}·KL term] is lost"


def examine(findings: Findings) -> Found | None:
    """Report a KL part that vanishes with equal rewards and only then."""
    if not _masks_tied_groups(findings):
        return None
    return Found(
        "In a group whose rewards are all the same the KL part of the gradient is zero; with other rewards, and "
        "nothing else changed, it is not. With P(r) the probability of a reward, a group of n ties with probability "
        "Σ_r P(r)^n, and E[1{tied}·KL term] is lost."
    )


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if the loss sees no rewards, else None."""
    return None if findings.observed.uses & ROW_FIELDS else "the loss sees neither rewards nor advantages"


@shared
def _masks_tied_groups(findings: Findings) -> bool:
    """Return True if the KL part of a group vanishes when its rewards are equal, and only then.

    Only the rewards, and the advantages that follow from them, are exchanged; the rollouts stay. Rows of that reward
    have a KL part in groups that do not tie: else single rows are masked by their reward.
    """
    fixture = group_fixture(findings)

    def parts(rewards: list[float]) -> np.ndarray:
        return fixture.kl_part(fixture.rollout(fixture.different, rewards))

    mixed = [fixture.untied, [1 - reward for reward in fixture.untied]]
    untied = [parts(rewards) for rewards in mixed]
    least = limit(findings) * min(map(norm, untied))
    return any(
        least > 0
        and norm(parts([reward] * fixture.size)) <= least
        and all(norm(part[np.array(rewards) == reward]) > least for rewards, part in zip(mixed, untied, strict=True))
        for reward in (0.0, 1.0)
    )
