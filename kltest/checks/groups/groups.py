"""Experiments on a group: what becomes of the KL part when its rewards tie, or it has one rollout, or one more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kltest.checks.group_fixture import Bench, bench, called, limit, norm
from kltest.environments.policies import softmax_gradient
from kltest.errors import KltestError
from kltest.identify.case import target
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import instances
from kltest.moments.batches import groups_of

# So many rollouts are looked at as groups of their own.
SINGLES = 3
# So many groups are called one by one where they have to be.
FEW = 60
PAIR_AND_TRIPLE = (2, 3)


def masks_tied_groups(findings: Findings) -> bool:
    """Whether the KL part of a group is gone when all of its rewards are the same, and is there when they are not.

    Only the rewards, and the advantages that follow from them, are exchanged; the rollouts stay.
    """
    return findings.once(_masks_tied_groups)


def _masks_tied_groups(findings: Findings) -> bool:
    if not sees_rewards(findings):
        return False
    place = bench(findings)

    def size(rewards: list[float]) -> float:
        return norm(place.kl_part(place.rollout(place.different, rewards)))

    there = min(size(place.untied), size([1 - reward for reward in place.untied]))
    return there > 0 and min(size([reward] * place.size) for reward in (0.0, 1.0)) <= limit(findings) * there


def sees_rewards(findings: Findings) -> bool:
    """Whether anything tells the loss which rewards a group got."""
    return bool(findings.observed.uses & {"reward", "advantage"})


def lost_to_ties(row: Row, findings: Findings) -> tuple[float, float | None]:
    """(probability that a group of the row's world ties, ‖E[1{tied}·KL part]‖ / ‖E[KL part]‖), on the first instance.

    The KL part of every group is taken with rewards exchanged for such as do not tie; None where that takes too many
    calls.
    """
    case = findings.measure.case(row)
    instance = case.instances[0]
    paths, rewards = instance.paths, instance.environment.returns(instance.paths)
    every = list(groups_of(instance, case.sampler, row.batch))
    groups, chances = np.array([rows for rows, _ in every]), np.array([chance for _, chance in every])
    tied = np.ptp(rewards[groups], axis=1) == 0
    place = Bench(findings.loss, instance, row.batch, findings.seed, case.sampler)
    parts = _parts(place, groups, limit(findings))
    if parts is None:
        return float(chances[tied].sum()), None

    def expected(chosen: np.ndarray) -> np.ndarray:
        table, weighted = np.zeros(instance.policy.shape), chances[chosen, None, None, None] * parts[chosen]
        rows = groups[chosen]
        np.add.at(table, (paths.contexts[rows], paths.tokens[rows]), weighted[..., 0])
        np.add.at(table, paths.contexts[rows], weighted[..., 1:])
        return softmax_gradient(table, instance.policy)

    return float(chances[tied].sum()), norm(expected(tied)) / norm(expected(tied | True))


def _parts(place: Bench, groups: np.ndarray, small: float) -> np.ndarray | None:
    """(G, n, T, 1 + V) the KL part of each group (G, n), rewards untied: in one call if that is seen to be the same."""
    count, size = groups.shape
    numbers = np.arange(count).repeat(size).tolist()
    try:
        together = place.kl_part(place.rollout(groups.reshape(-1), place.untied * count, numbers))
        alone = [place.kl_part(place.rollout(groups[spot], place.untied)) for spot in (0, count // 2, -1)]
        for share in (count, 1):
            parts = share * together.reshape(count, size, *together.shape[1:])
            own = np.stack([parts[spot] for spot in (0, count // 2, -1)])
            if norm(own - np.stack(alone)) <= small * norm(own):
                return parts
    except KltestError:  # made for one group a call
        pass
    if count > FEW:
        return None
    return np.stack([place.kl_part(place.rollout(rows, place.untied)) for rows in groups])


def share_by_size(row: Row, findings: Findings) -> dict[int, float]:
    """The share of the declared gradient that lies in the expected one of batches of two and of three, in a bandit.

    Of two, a baseline that contains the rollout and a divisor that is taken twice leave one half both; of three, the
    one leaves two thirds and the other one third. Empty where the loss takes no batch of one of these sizes.
    """
    shares = {}
    for size in PAIR_AND_TRIPLE:
        instance = instances("bandit", findings.seed, size if findings.measure.sizes.grouped else None)[0]
        wanted = target(findings.expect, instance)
        try:
            found = findings.measure.expected(replace(row, batch=size), instance).gradient
        except KltestError:
            return {}
        if not wanted.any():
            return {}
        shares[size] = float((found * wanted).sum() / (wanted**2).sum())
    return shares


def silent_alone(findings: Findings) -> str | None:
    """What reads zero in groups of one rollout although it does not when the same rollout is a whole group.

    A baseline taken from the group leaves nothing of a group of equal rollouts either: there the rewards differ, and
    nothing else, so that what a term is masked by lets it through.
    """
    return findings.once(_silent_alone)


def _silent_alone(findings: Findings) -> str | None:
    if not (findings.coupled or sees_rewards(findings)):
        return None
    place = bench(findings)
    parts: list[tuple[float, float]] = []
    logged: list[tuple[float, float]] = []
    for row in place.different[:SINGLES]:
        try:
            alone = [place.rollout([row], [reward]) for reward in (0.0, 1.0)]
            together = place.rollout([row] * place.size, place.untied)
            parts.append((max(norm(place.kl_part(one)) for one in alone), norm(place.kl_part(together))))
            metrics = [called(findings.loss, one).outcome.metric for one in (*alone, together)]
        except KltestError:  # it fails on one rollout, or on equal ones: then it is not silent
            return None
        sizes = [float(metric.abs().max()) for metric in metrics if metric is not None]
        if len(sizes) == len(metrics):
            logged.append((max(sizes[:2]), sizes[2]))
    silent = [what for what, found in (("KL term", parts), ("logged KL", logged)) if _vanishes(found, limit(findings))]
    return " and the ".join(silent) or None


def _vanishes(pairs: list[tuple[float, float]], small: float) -> bool:
    """Whether the first of each pair is nothing beside the second."""
    return bool(pairs) and all(together > 0 and alone <= small * together for alone, together in pairs)
