"""Lengths of rollouts, and influence of the other rollouts of a batch: through their lengths, or their log-ratios."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kltest.checks.batches import group_fixture, limit, norm
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import instances
from kltest.moments.tolerances import Tolerances
from kltest.rollout import Rollout, elsewhere

VARYING = "ragged"
# What k1 as a loss leaves if it is divided by the length: no divergence from the reference.
LENGTH_ALONE = frozenset({"inverse_length", "inverse_length@rollouts"})


class Influence(NamedTuple):
    """If a rollout's KL term changes with the lengths of the others, or with the reference's log-probs of them."""

    lengths: bool
    log_ratios: bool


@shared
def influence(findings: Findings) -> Influence:
    """Exchange the rollouts beside one, and their log-probs under the reference; nothing else in the batch changes."""
    fixture = replace(group_fixture(findings), instance=instances(VARYING, findings.seed)[0])
    shortest, middle, longest = (int(np.argmax(fixture.instance.paths.lengths == length)) for length in (1, 2, 3))

    def own(rollout: Rollout) -> np.ndarray:
        return fixture.kl_part(rollout)[0]

    def beside(other: int) -> Rollout:
        return fixture.rollout([middle, *[other] * (fixture.size - 1)], fixture.untied)

    long = beside(longest)
    moved = {}
    for name in ("ref_logp", "ref_logits"):
        moved[name] = long.peek(name).detach().clone()
        moved[name][1:] = elsewhere(moved[name][1:])
    base = own(long)
    others = own(beside(shortest)), own(long.replace(**moved))
    return Influence(*(norm(other - base) > limit(findings) * norm(base) for other in others))


def only_one_token(findings: Findings) -> str | None:
    """Return a reason to skip checks of sequences if no graded environment has any, else None."""
    return "only environments of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def divided_by_lengths_of_others(findings: Findings) -> bool:
    """Return True if rows are coupled by their lengths alone: in no other environment, or in no other way."""
    if findings.observed.coupled_by_length or not findings.observed.coupled:
        return findings.observed.coupled
    return influence(findings) == Influence(lengths=True, log_ratios=False)


def divided_by_length(row: Row, findings: Findings) -> bool:
    """Return True if the coefficients at length T are 1/T of those at length one, and varying lengths leave no such.

    They leave a gradient without a name, or one of the length alone.
    """
    if row.length == 1:
        return False
    fixed, varying = (
        findings.measure.alone(environment, row.sampler, row.batch) for environment in ("sequence", "ragged")
    )
    if row.length is not None:
        fixed = row
    if (
        varying is None
        or fixed is None
        or fixed.identified is None
        or not set(varying.identified or ()) <= LENGTH_ALONE
    ):
        return False
    single = findings.measure.alone("bandit", row.sampler, row.batch)
    unit = sum(map(abs, single.identified.values())) if single and single.identified else 1.0
    size = sum(map(abs, fixed.identified.values()))
    return "zero" not in fixed.identified and abs(size * (fixed.length or 1) - unit) < Tolerances.factor * unit
