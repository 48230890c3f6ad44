"""The experiment on decision processes: rest points by hand, environments by definition, wrong results called so."""

import math
from itertools import pairwise

import numpy as np
import pytest
from trial import Trial

from kltest.truth import gradient

TRIAL = Trial("tabular-mdp")
analysis, experiment = TRIAL.modules("claims", "experiment")
GAMMA = experiment.CONTINUES


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Every part, with few steps; all coefficients, since ends are counted over them."""
    return [
        *TRIAL.computed("part=environments,estimators,picture", "horizon=1,3", "slip=0,0.5,1"),
        *TRIAL.computed("part=length", "reference=0.02"),
    ]


@pytest.mark.scheduled
def test_rest_points_of_going_on_by_hand(rows):
    """One state, so the reward and the KL of a policy are one over the chance of ending: differences of their sums."""
    reference, step = 0.02, 1e-4

    def objective(p, beta):
        kl = p * math.log(p / reference) + (1 - p) * math.log((1 - p) / (1 - reference))
        return (p - beta * kl) / (1 - GAMMA * p)

    for row in rows:
        if row["part"] != "length" or row["chance"] > 0.99:
            continue
        p, beta = row["chance"], row["beta"]
        if row["followed"] == "reverse_kl":
            # A maximum of the objective; a central difference by log p, accurate to step² = 1e-8.
            slope = (objective(p * math.exp(step), beta) - objective(p * math.exp(-step), beta)) / (2 * step)
            assert abs(slope) < 1e-7
        else:
            waits = 1 / (1 - GAMMA * p)
            assert math.log(p / (1 - p)) == pytest.approx(
                math.log(reference / (1 - reference)) + waits / beta, abs=1e-9
            )


@pytest.mark.parametrize("reference", [0.005, 0.02, 0.1, 0.3, 0.46])
def test_the_band_of_two_ends_by_a_scan_and_by_dynamic_programming(reference):
    """1/β at rest is (1 − γp)(logit p − logit ref), whose two turns are the band's ends; training counts as many ends.

    A grid errs by its step squared, 1e-7, at a turn.
    """
    x = np.linspace(-6, 8, 100_001)
    curve = (1 - GAMMA / (1 + np.exp(-x))) * (x - math.log(reference / (1 - reference)))
    turns = np.flatnonzero(np.diff(np.sign(np.diff(curve)))) + 1
    low, high = experiment.band_of(reference)
    assert sorted(1 / curve[turns]) == pytest.approx([low, high], rel=1e-7)
    aside = 0.1 * (high / low - 1)
    for edge, below, above in ((low, 1, 2), (high, 2, 1)):
        for beta, stable in ((edge * (1 - aside), below), (edge * (1 + aside), above)):
            rests = experiment.token_level(beta, reference)
            signs = []
            for logit in (rests[0] - 1, *((one + other) / 2 for one, other in pairwise(rests)), rests[-1] + 1):
                instance = experiment.going_on(reference, logit)
                push = gradient("expected_reward", instance) - beta * gradient("local_reverse_kl", instance)
                signs.append(push[0, 1] > 0)
            assert signs == [True, False] * stable


def test_a_reference_that_goes_on_often_has_no_band():
    """From logit ref = log(1/(1 − γ)) − 2(2 − γ)/γ on: where the folds meet, at p = 1/(2 − γ) and β = γ/(4(1 − γ))."""
    cusp = 1 / (1 + math.exp(2 * (2 - GAMMA) / GAMMA - math.log(1 / (1 - GAMMA))))
    assert experiment.band_of(cusp * (1 + 1e-9)) == []
    assert experiment.band_of(cusp * (1 - 1e-9)) == pytest.approx([GAMMA / (4 * (1 - GAMMA))] * 2, rel=1e-3)


@pytest.mark.scheduled
@pytest.mark.parametrize(("start", "end"), [(0.02, "lower"), (0.9, "upper")])
def test_training_ends_where_it_is_said_to(rows, start, end):
    """Plain steps along what a token-level loss follows, to either side of the tipping point at β = 0.7."""
    beta = 0.7
    rests = [
        row
        for row in rows
        if (row["part"], row.get("followed"), row.get("beta")) == ("length", "local_reverse_kl", beta)
    ]
    low, tipping, high = sorted(row["chance"] for row in rests)
    assert [row["stable"] for row in sorted(rests, key=lambda row: row["chance"])] == [True, False, True]
    assert low < tipping < high
    logit = math.log(start / (1 - start))
    for _ in range(100):
        instance = experiment.going_on(0.02, logit)
        push = gradient("expected_reward", instance) - beta * gradient("local_reverse_kl", instance)
        stop, go = np.exp(instance.policy[0])
        # In the natural direction, so that it takes no thousand steps where a policy is all but certain.
        logit += 0.3 / beta * push[0, 1] / (stop * go / (1 - GAMMA * go))
    expected = low if end == "lower" else high
    assert logit == pytest.approx(math.log(expected / (1 - expected)), abs=1e-3)


def test_an_action_that_slips_is_a_random_one():
    firm, loose = (
        experiment.environment("chain", 3, slip, 0).transition.toarray().reshape(9, 3, 9) for slip in (0.0, 0.3)
    )
    assert np.abs(loose - (0.7 * firm + 0.3 * firm.mean(axis=1, keepdims=True))).max() < 1e-15
    assert firm[0, 0, 0] == firm[4, 2, 5] == firm[8, 2, 8] == 1


@pytest.mark.scheduled
def test_the_policy_of_the_picture_is_the_reference_but_near_the_coin(rows):
    cells = [row for row in rows if row["part"] == "picture"]
    for cell in cells:
        near = 1 <= cell["away"] <= 2
        assert (cell["kl"] > 1e-3) == near
        assert (cell["local_size"] > 1e-6) == near
    assert sum(cell["reward"] for cell in cells) == 1
    start = next(cell for cell in cells if cell["start"])
    assert start["whole_right"] < -0.01  # down the true gradient one turns back before KL is paid


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
