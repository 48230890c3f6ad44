"""The short way for estimators that value each token by itself ends where the long way through rollouts does."""

import sys

import numpy as np
import pytest
from weekly import first, spread

from kltest.environments import bandit, mdp, ragged, sequence
from kltest.estimators import find, registry
from kltest.training import Problem, Run, train
from kltest.training.penalty import Penalty, TokenPenalty, penalty_of
from kltest.training.problems import Runs

loop = sys.modules["kltest.training.train"]
ENVIRONMENTS = {"sequence": sequence(3, 3), "ragged": ragged(3, 3), "mdp": mdp(4, 2, 3)}
SETTINGS = {
    "exact": {"batch_size": None, "inner_steps": 2},
    "drawn": {"batch_size": 8, "inner_steps": 2},
    "grouped": {"batch_size": 8, "group_size": 4},
}
SHORT = [
    name for name in registry() if isinstance(penalty_of(Runs([Run(Problem.draw(bandit(4), 0), name)])), TokenPenalty)
]


def runs_of(name, environment, **options):
    problems = [Problem.draw(ENVIRONMENTS[environment], seed, reward="normal") for seed in range(3)]
    return [Run(problems[seed], name, beta=0.2 + seed, learning_rate=0.2, seed=seed, **options) for seed in range(3)]


def assert_same_end(monkeypatch, runs, settings):
    """Up to rounding of 1e-16 an update at each of a few dozen rows."""
    short = train(runs, steps=5, record=1, **settings)
    monkeypatch.setattr(loop, "penalty_of", Penalty)
    long = train(runs, steps=5, record=1, **settings)
    assert np.abs(short.logits - long.logits).max() < 1e-11
    assert np.abs(short.logits - short.logits[0]).max() > 1e-3
    np.testing.assert_allclose(short.logged, long.logged, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", spread(5, SETTINGS))
@pytest.mark.parametrize("name", spread(4, SHORT))
def test_both_ways_end_at_the_same_logits(name, settings, monkeypatch):
    for environment in ("ragged", "mdp"):
        assert_same_end(monkeypatch, runs_of(name, environment), SETTINGS[settings])
        monkeypatch.undo()


@pytest.mark.parametrize("credit", first(1, ["return", "to-go", "immediate"]))
@pytest.mark.parametrize("placement", ["loss", "reward", "both"])
def test_every_placement_and_credit(placement, credit, monkeypatch):
    assert_same_end(monkeypatch, runs_of("k3-loss", "ragged", placement=placement, credit=credit), SETTINGS["drawn"])


def test_options_and_whole_losses(monkeypatch):
    narrow = runs_of("k3-clamped", "sequence", options={"log_bound": 0.3, "bound": 0.02})
    assert_same_end(monkeypatch, narrow, SETTINGS["drawn"])
    monkeypatch.undo()
    assert_same_end(monkeypatch, runs_of("k2-loss", "sequence", whole=True), SETTINGS["drawn"])


def test_a_cost_that_goes_to_the_wrong_tokens_is_seen(monkeypatch):
    charged = TokenPenalty._charged
    monkeypatch.setattr(TokenPenalty, "_charged", lambda self, batch, cost: charged(self, batch, cost)[::-1])
    with pytest.raises(AssertionError):
        assert_same_end(monkeypatch, runs_of("k1-reward-to-go", "sequence"), SETTINGS["drawn"])


def test_who_goes_the_short_way():
    """Those that say per token, and take nothing but log-probs of the token; nobody's own function, which may lie."""
    assert {"k1-loss", "k2-loss", "k3-loss", "k1-reward-to-go", "k3-both", "k3-ratio", "lambda-baseline"} <= set(SHORT)
    assert not set(SHORT) & {"full-loss", "top-k", "k2-loss-sequence", "length-normalised", "group-mean", "last-token"}
    assert all(find(name).spec.per_token for name in SHORT)
    problem = Problem.draw(bandit(4), 0)
    own = Run(problem, lambda logp, ref_logp: (logp - ref_logp).square() / 2)
    assert not isinstance(penalty_of(Runs([own])), TokenPenalty)
