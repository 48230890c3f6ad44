"""Lengths of rollouts, and influence of the other rollouts of a batch: through their lengths, or their log-ratios."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kltest.checks.batches import group_fixture, limit, norm
from kltest.environments import Instance
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import instances
from kltest.moments.tolerances import Tolerances
from kltest.rollout import Rollout, elsewhere
from kltest.truth import is_of_lengths
from kltest.truth.recursions import from_signal, of_length

VARYING = "ragged"


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


@shared
def of_lengths_alone(findings: Findings) -> str:
    """Return in words that an unnamed gradient is ∇E_π[w(L)], of the lengths of rollouts alone; "" if it is none.

    k1 as a loss leaves it, whatever a rollout's tokens are divided by: 1/(L + p) with a prompt of p tokens, 1/√L.
    """
    row = findings.measure.alone(VARYING, "current")
    if row is None or row.identified is not None or not row.gradients:
        return ""
    columns = [_of_each_length(instance) for instance in row.case.instances]
    matrix, found = np.concatenate(columns, axis=1).T, np.concatenate([one.ravel() for one in row.gradients])
    weights = np.linalg.lstsq(matrix, found, rcond=None)[0]
    if np.linalg.norm(matrix @ weights - found) > limit(findings) * np.linalg.norm(found):
        return ""
    steps = ", ".join(f"w({length}) − w({len(weights) + 1}) = {step:.4g}" for length, step in enumerate(weights, 1))
    return (
        f"What has no name is ∇E_π[w(L)], a function of the length alone, with {steps}: the reference does not occur."
    )


def _of_each_length(instance: Instance) -> np.ndarray:
    """Return the gradients of the probabilities of all lengths but the last, each as a row."""
    environment, policy = instance.environment, instance.policy
    each = np.eye(environment.horizon)[:-1]
    return np.stack([from_signal(of_length(environment, policy, one)[0], policy).ravel() for one in each])


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
        or not all(map(is_of_lengths, varying.identified or ()))  # as k1 as a loss leaves it
    ):
        return False
    single = findings.measure.alone("bandit", row.sampler, row.batch)
    unit = sum(map(abs, single.identified.values())) if single and single.identified else 1.0
    size = sum(map(abs, fixed.identified.values()))
    return "zero" not in fixed.identified and abs(size * (fixed.length or 1) - unit) < Tolerances.factor * unit
