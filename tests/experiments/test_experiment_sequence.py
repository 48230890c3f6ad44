"""The sequence experiment: its formulas by hand and by brute force, and that a wrong result is called wrong."""

import itertools
import math

import numpy as np
import pytest
from trial import Trial, row_of

from kltest.truth import gradient

TRIAL = Trial("sequence")
analysis, experiment = TRIAL.modules("claims", "experiment")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Every part, at lengths that take no time; the circulation with nothing left out."""
    return TRIAL.computed(
        "length=1,2,100,300,1000", "vocabulary=2,4", "steering=0,0.75,0.9", "estimator=k2-loss,k3-loss,k1-reward-to-go"
    )


def brute_force(instance, vocabulary: int, length: int) -> np.ndarray:
    """E[Σ_t g_t Σ_(s>t) u_s] of a bigram by a loop over all sequences, scores written out."""
    policy, u = np.exp(instance.policy), instance.policy - instance.reference
    total = np.zeros(policy.shape)
    for tokens in itertools.product(range(vocabulary), repeat=length):
        contexts = [0, *(1 + token for token in tokens[:-1])]
        steps = list(zip(contexts, tokens, strict=True))
        chance = math.prod(policy[step] for step in steps)
        for t, (context, token) in enumerate(steps):
            score = -policy[context].copy()
            score[token] += 1
            total[context] += chance * score * sum(u[step] for step in steps[t + 1 :])
    return total


@pytest.mark.parametrize("steering", [0.0, 0.4, 0.95])
def test_the_missing_part_by_a_loop_over_sequences(steering):
    instance = experiment.persistent(3, 5, steering, seed=1)
    # A few hundred products and sums.
    assert np.abs(gradient("future_reverse_kl", instance) - brute_force(instance, 3, 5)).max() < 1e-13


def test_the_blind_root_by_hand():
    """By hand p(1 − p)·d; the departure is a coin's KL, written out here."""
    for chance, departure in ((0.3, 0.1), (0.5, 0.6)):
        instance = experiment.blind_root(chance, departure)
        q = math.exp(instance.policy[2, 1])
        assert q * math.log(2 * q) + (1 - q) * math.log(2 * (1 - q)) == pytest.approx(departure, abs=1e-12)
        assert gradient("reverse_kl", instance)[0, 1] == pytest.approx(chance * (1 - chance) * departure, abs=1e-12)


@pytest.mark.scheduled
def test_a_discount_is_what_a_discounted_return_gives(rows):
    """γ = 0 is the local gradient, so its bias is the share missed."""
    instance = experiment.persistent(experiment.VOCABULARY, experiment.CREDIT_LENGTH, 0.9, 0)
    whole, local = gradient("reverse_kl", instance), gradient("local_reverse_kl", instance)
    share = np.linalg.norm(whole - local) / np.linalg.norm(whole)
    assert row_of(rows, part="credit", steering=0.9, discount=0.0)["bias"] == pytest.approx(share, rel=1e-12)


def test_the_circulation_by_hand(rows):
    """Σ over the edges of the missing early component, −∮ KL(y) dp, needs the two logistic functions only."""
    (x0, x1), (y0, y1) = experiment.CORNERS
    p = [1 / (1 + math.exp(-x)) for x in (x0, x1)]

    def kl(logit):
        q = 1 / (1 + math.exp(-logit))
        return math.log(2) + q * math.log(q) + (1 - q) * math.log(1 - q)

    found = next(row for row in rows if row.get("field") == "local_reverse_kl")
    assert found["circulation"] == pytest.approx((p[1] - p[0]) * (kl(y1) - kl(y0)), abs=1e-13)


def test_claims_agree_and_each_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
