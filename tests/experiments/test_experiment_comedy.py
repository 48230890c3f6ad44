"""The comedy experiment: its types by brute force, its moments by hand, and that a wrong result is called wrong."""

import itertools
import math

import numpy as np
import pytest
from enumerated import value_again
from trial import Trial

from kltest.errors import InvalidEnvironmentError
from kltest.truth import value

TRIAL = Trial("comedy")
(pairs,) = TRIAL.modules("pairs")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return TRIAL.computed("length=5,10,11,20", "samples=200", "pairs=60", "every=5")


def counts(tokens) -> tuple[int, ...]:
    """First token, and how often 00, 01, 10 and 11 occur."""
    both = list(itertools.pairwise(tokens))
    return (tokens[0], *(both.count(pair) for pair in itertools.product((0, 1), repeat=2)))


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_every_type_once_with_the_number_of_its_sequences(length):
    wanted: dict[tuple[int, ...], int] = {}
    for tokens in itertools.product((0, 1), repeat=length):
        wanted[counts(tokens)] = wanted.get(counts(tokens), 0) + 1
    paths = pairs.types(length)
    found = {
        counts(tuple(tokens)): round(math.exp(weight))
        for tokens, weight in zip(paths.tokens.tolist(), paths.log_weight, strict=True)
    }
    assert found == wanted
    assert len(paths) == len(wanted)


def by_hand(instance, length: int) -> dict[tuple[str, str], tuple[np.ndarray, float]]:
    """Mean and second moment of each of the nine, sequence by sequence, formulas written out."""
    policy, u = np.exp(instance.policy), instance.policy - instance.reference
    values = {"k1-loss": u, "k2-loss": u**2 / 2, "k3-loss": np.exp(-u) - 1 + u}
    slopes = {"k1-loss": np.ones_like(u), "k2-loss": u, "k3-loss": 1 - np.exp(-u)}
    total = {which: [np.zeros((3, 2)), 0.0] for which in itertools.product(values, ("loss", "reward", "both"))}
    for tokens in itertools.product((0, 1), repeat=length):
        steps = list(zip([0, *(1 + token for token in tokens[:-1])], tokens, strict=True))
        chance = math.prod(policy[step] for step in steps)
        for name in values:
            score, loss = np.zeros((3, 2)), np.zeros((3, 2))
            for context, token in steps:
                g = np.eye(2)[token] - policy[context]
                score[context] += g
                loss[context] += slopes[name][context, token] * g
            reward = score * sum(values[name][step] for step in steps)
            for placement, gradient in (("loss", loss), ("reward", reward), ("both", loss + reward)):
                total[name, placement][0] += chance * gradient
                total[name, placement][1] += chance * (gradient**2).sum()
    return {which: (mean, second) for which, (mean, second) in total.items()}


def test_bias_and_spread_by_hand(rows):
    instance = pairs.at_distance(5, 0.8)
    found = by_hand(instance, 5)
    truth = found["k1-loss", "reward"][0]
    size = np.linalg.norm(truth)
    cell = [r for r in rows if r["part"] == "length" and (r["length"], r["kl"], r["hold"]) == (5, 0.8, "kl")]
    assert len(cell) == 9
    for row in cell:
        mean, second = found[row["estimator"], row["placement"]]
        # Sums of 32 terms of order one.
        assert row["bias"] == pytest.approx(np.linalg.norm(mean - truth) / size, abs=1e-13)
        assert row["std"] == pytest.approx(math.sqrt(second - (mean**2).sum()) / size, rel=1e-12)


def test_the_distance_is_as_asked():
    for length, kl in ((5, 0.05), (9, 0.8)):
        assert value_again("kl", pairs.at_distance(length, kl)) == pytest.approx(kl, rel=1e-12)
    assert value("kl", pairs.at_distance(pairs.ANCHOR, 0.8, "pair")) == pytest.approx(0.8, rel=1e-12)
    one, other = (pairs.at_distance(length, 0.8, "pair") for length in (5, 12))
    assert np.array_equal(one.policy, other.policy)
    with pytest.raises(InvalidEnvironmentError, match="never come to a KL"):
        pairs.at_distance(1, 1.0)


def test_where_the_noise_is_equal_it_is(rows):
    (row,) = (row for row in rows if row["part"] == "order" and row["length"] == 5)
    found = by_hand(pairs.at_distance(5, row["equal_at"]), 5)
    loss, reward = (second - (mean**2).sum() for mean, second in (found["k1-loss", "loss"], found["k1-loss", "reward"]))
    assert loss == pytest.approx(reward, rel=1e-9)


def test_rollouts_of_one_type_are_found_to_be_alike():
    instance = pairs.at_distance(6, 0.8)
    paths = instance.environment.sample(instance.policy, 500, np.random.default_rng(0))
    some, like = pairs.types_of(paths)
    assert len({counts(tuple(row)) for row in some.tokens.tolist()}) == len(some)
    assert [counts(tuple(row)) for row in some.tokens[like].tolist()] == [
        counts(tuple(row)) for row in paths.tokens.tolist()
    ]


def test_every_claim_agrees(rows):
    assert TRIAL.agree(rows)


def test_claims_without_their_rows_are_not_run():
    assert TRIAL.may_lack([]) == {None}
    assert TRIAL.modules("claims")[0].tables([]) == {}
    assert TRIAL.may_lack(TRIAL.computed("part=length", "length=7", "hold=pair", "kl=0.3")) == {None, True}


def test_each_claim_can_fail(rows):
    TRIAL.claims_can_fail(rows)
