"""KL401: groups without a reward signal are masked, and their KL term with them."""

from __future__ import annotations

import numpy as np

from kltest.checks.check import Found
from kltest.checks.group_fixture import GroupFixture, group_fixture, limit, norm, sees_rewards
from kltest.environments.policies import softmax_gradient
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.moments.batches import groups_of

# The most groups that are called one by one.
FEW = 60


def explains(row: Row, findings: Findings) -> bool:
    return row.batch > 1 and findings.once(_masks_tied_groups)


def tells(row: Row, findings: Findings) -> str:
    ties, lost = _lost_to_ties(row, findings)
    share = "" if lost is None else f", {lost:.3g} of the KL term's gradient"
    return f"a group of {row.batch} ties with probability {ties:.3g}, and with it E[1{{tied}}·KL term] is lost{share}"


def examine(findings: Findings) -> Found | None:
    if not findings.once(_masks_tied_groups):
        return None
    return Found(
        "In a group whose rewards are all the same the KL part of the gradient is zero; with other rewards, and "
        "nothing else changed, it is not. With P(r) the probability of a reward, a group of n ties with probability "
        "Σ_r P(r)^n, and E[1{tied}·KL term] is lost."
    )


def moot(findings: Findings) -> str | None:
    return None if sees_rewards(findings) else "the loss sees neither rewards nor advantages"


def _masks_tied_groups(findings: Findings) -> bool:
    """Return True if the KL part of a group vanishes when its rewards are equal, and only then.

    Only the rewards, and the advantages that follow from them, are exchanged; the rollouts stay.
    """
    if not sees_rewards(findings):
        return False
    fixture = group_fixture(findings)

    def size(rewards: list[float]) -> float:
        return norm(fixture.kl_part(fixture.rollout(fixture.different, rewards)))

    untied = min(size(fixture.untied), size([1 - reward for reward in fixture.untied]))
    return untied > 0 and min(size([reward] * fixture.size) for reward in (0.0, 1.0)) <= limit(findings) * untied


def _lost_to_ties(row: Row, findings: Findings) -> tuple[float, float | None]:
    """(probability that a group ties, ‖E[1{tied}·KL part]‖ / ‖E[KL part]‖), on the first instance of the row.

    The KL part of every group is taken with rewards that do not tie; None if that takes too many calls.
    """
    case = findings.measure.case(row)
    instance = case.instances[0]
    paths, rewards = instance.paths, instance.environment.returns(instance.paths)
    every = list(groups_of(instance, case.sampler, row.batch))
    groups, chances = np.array([rows for rows, _ in every]), np.array([chance for _, chance in every])
    tied = np.ptp(rewards[groups], axis=1) == 0
    fixture = GroupFixture(findings.measure, instance, row.batch, findings.seed, case.sampler)
    parts = _parts(fixture, groups, limit(findings))
    if parts is None:
        return float(chances[tied].sum()), None

    def expected(chosen: np.ndarray) -> np.ndarray:
        table, weighted = np.zeros(instance.policy.shape), chances[chosen, None, None, None] * parts[chosen]
        rows = groups[chosen]
        np.add.at(table, (paths.contexts[rows], paths.tokens[rows]), weighted[..., 0])
        np.add.at(table, paths.contexts[rows], weighted[..., 1:])
        return softmax_gradient(table, instance.policy)

    return float(chances[tied].sum()), norm(expected(tied)) / norm(expected(tied | True))


def _parts(fixture: GroupFixture, groups: np.ndarray, small: float) -> np.ndarray | None:
    """(G, n, T, 1 + V) KL part of each group (G, n) with untied rewards; in one call if single groups agree with it."""
    count, size = groups.shape
    numbers = np.arange(count).repeat(size).tolist()
    try:
        together = fixture.kl_part(fixture.rollout(groups.reshape(-1), fixture.untied * count, numbers))
        alone = [fixture.kl_part(fixture.rollout(groups[spot], fixture.untied)) for spot in (0, count // 2, -1)]
        for share in (count, 1):
            parts = share * together.reshape(count, size, *together.shape[1:])
            own = np.stack([parts[spot] for spot in (0, count // 2, -1)])
            if norm(own - np.stack(alone)) <= small * norm(own):
                return parts
    except KltestError:  # the loss takes one group a call
        pass
    if count > FEW:
        return None
    return np.stack([fixture.kl_part(fixture.rollout(rows, fixture.untied)) for rows in groups])


def masked_where_tied(logp, ref_logp, mask, rewards, group):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    differs = (rewards[:, None] != rewards) & (group[:, None] == group)
    return (log_ratio.square() / 2).where(differs.any(-1), 0.0)


def kept_where_tied(logp, ref_logp, mask, rewards, group):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2
