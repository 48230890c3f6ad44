"""The training-curves experiment: its curves by a loop over sequences, and each claim able to fail."""

import itertools

import numpy as np
import pytest
from trial import CHECKOUT, Trial

from kltest.reproduce.experiment import Experiment, Request

TRIAL = Trial("training-curves")
analysis, experiment = TRIAL.modules("claims", "experiment")


@pytest.fixture(scope="module")
def rows():
    few = Request(changes=("updates=400", "every=100", "runs=4"), seeds=3)
    found = Experiment(CHECKOUT, "training-curves").configurations(few)
    return TRIAL.tidied(experiment.BATCHING.batches(found))


def ascended(estimator, updates, beta, rate):
    """KL and reward after so many updates of plain ascent, with tables by prefix."""
    which = experiment.problem("sequence", 0)
    prefixes = [p for n in range(experiment.LENGTH) for p in itertools.product(range(experiment.VOCABULARY), repeat=n)]
    logits = {prefix: row.copy() for prefix, row in zip(prefixes, which.reference, strict=True)}
    earned = dict(zip(prefixes, which.environment.reward, strict=True))
    reference = {prefix: row - np.log(np.exp(row).sum()) for prefix, row in logits.items()}
    for _ in range(updates + 1):
        policy = {prefix: row - np.log(np.exp(row).sum()) for prefix, row in logits.items()}
        change, kl, reward = {prefix: np.zeros_like(row) for prefix, row in logits.items()}, 0.0, 0.0
        for tokens in itertools.product(range(experiment.VOCABULARY), repeat=experiment.LENGTH):
            steps = [(tokens[:at], token) for at, token in enumerate(tokens)]
            chance = np.exp(sum(policy[prefix][token] for prefix, token in steps))
            u = [policy[prefix][token] - reference[prefix][token] for prefix, token in steps]
            whole = sum(earned[prefix][token] for prefix, token in steps)
            kl, reward = kl + chance * sum(u), reward + chance * whole
            for at, (prefix, token) in enumerate(steps):
                own = u[at] if estimator == "k1-reward-immediate" else sum(u)
                score = np.eye(experiment.VOCABULARY)[token] - np.exp(policy[prefix])
                change[prefix] += chance * (whole - beta * own) * score
        logits = {prefix: row + rate * change[prefix] for prefix, row in logits.items()}
    return kl, reward


@pytest.mark.scheduled
@pytest.mark.parametrize("estimator", ["k1-reward", "k1-reward-immediate"])
def test_curves_of_expected_gradients_by_a_loop_over_sequences(rows, estimator):
    (row,) = (
        row
        for row in rows
        if (row["environment"], row["estimator"], row["seed"], row["update"]) == ("sequence", estimator, 0, 100)
    )
    kl, reward = ascended(estimator, 100, row["beta"], row["learning_rate"])
    assert (row["kl_exact"], row["reward_exact"]) == pytest.approx((kl, reward), rel=1e-10)


@pytest.mark.scheduled
def test_sampled_runs_lie_about_the_curve(rows):
    for row in rows:
        # Means of four runs: eight times the reach of a 95 % interval, and what a finite step adds.
        assert abs(row["reward"] - row["reward_exact"]) < 8 * row["reward_reach"] + 0.1


@pytest.mark.scheduled
def test_claims_agree_and_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
