"""The groups experiment: its closed forms by brute force, its claims able to fail, its parts apart."""

import itertools

import numpy as np
import pytest
from trial import Trial, row_of

TRIAL = Trial("groups")
(MODULE,) = TRIAL.modules("experiment")
MASKING = [{"part": "masking", "group_size": size, "success": 0.2, "seed": 0} for size in (1, 2, 3)]
PUSH = [{"part": "std", "push": push, "seed": 0} for push in (1e-6, 1e-5, 1e-2, 1.0)]


def training(estimator, beta=0.7, **changed):
    one = {"part": "training", "estimator": estimator, "success": 0.3, "beta": beta, "batch_size": 0}
    return {**one, "steps": 400, "seed": 0, **changed}


@pytest.fixture(scope="module")
def rows():
    runs = [
        training(name)
        for name in ("k2-loss-sequence", "tied-groups-masked", "group-mean", "leave-one-out", "group-std")
    ]
    return TRIAL.tidied([MASKING, PUSH, runs])


@pytest.mark.scheduled
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_lost_share_by_brute_force(rows, size):
    """Every ordered group, each with the mean over its rows of the KL term, where all rewards are equal."""
    instance = MODULE.instance_of(0.2, 0)
    policy, u = np.exp(instance.policy[0]), (instance.policy - instance.reference)[0]
    truth, lost = np.zeros(4), np.zeros(4)
    for group in itertools.product(range(4), repeat=size):
        chance = np.prod(policy[list(group)])
        step = sum(chance * u[one] * (np.eye(4)[one] - policy) / size for one in group)
        truth += step
        lost += step * (len({one == 0 for one in group}) == 1)
    row = row_of(rows, part="masking", group_size=size)
    assert row["lost"] == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(truth), rel=1e-12)


@pytest.mark.scheduled
def test_where_training_ends(rows):
    ends = {row["estimator"]: row for row in rows if row["part"] == "training"}
    reference, beta, size = 0.3, 0.7, 4
    for name, coefficient in (
        ("k2-loss-sequence", beta),
        ("leave-one-out", beta),
        ("group-mean", beta * (1 - 1 / size)),
    ):
        odds = reference / (1 - reference) * np.exp(1 / coefficient)
        assert ends[name]["right"] == pytest.approx(odds / (1 + odds), rel=1e-9)
        assert ends[name]["predicted"] == pytest.approx(odds / (1 + odds), rel=1e-12)
    right = ends["tied-groups-masked"]["right"]
    hit, miss = 1 - right**3, 1 - (1 - right) ** 3
    both = beta * (hit * np.log(right / reference) - miss * np.log((1 - right) / (1 - reference)))
    assert both == pytest.approx(1, rel=1e-9)
    assert ends["group-std"]["predicted"] is None


@pytest.mark.scheduled
def test_claims_agree_and_those_without_rows_are_not_run(rows):
    found = TRIAL.verdicts(rows)
    sampled = {claim for claim in found if claim.startswith("sampled")}
    assert {claim for claim, agrees in found.items() if agrees is None} == sampled
    assert False not in found.values()


@pytest.mark.scheduled
def test_each_claim_can_fail(rows):
    TRIAL.claims_can_fail(rows)
