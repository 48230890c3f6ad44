"""Training follows the gradients that enumeration gives, and ends at the predicted fixed points."""

import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from fixed_points import sequence_k3_fixed_point, token_k3_fixed_point
from training_problems import problem
from weekly import first, spread

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.estimators import registry
from kltest.loss.resolve import resolve
from kltest.moments import exact, exact_batches
from kltest.training import Problem, Run, train
from kltest.training.batch import softmax
from kltest.truth import gradient, optimum, token_level_fixed_point, value

ENVIRONMENTS = ("bandit", "prompts", "sequence", "ragged", "mdp", "ngram")
# Gradients are of order 1 and added up in another order.
SAME = 1e-12


def instance_of(which: Problem, logits=None, sampler=None) -> Instance:
    return Instance.of(which.environment, which.start if logits is None else logits, which.reference, sampler)


# Every estimator where lengths differ; one of each placement everywhere.
PLACED = ("k3-loss", "full-loss", "k1-reward-to-go", "k3-both")


@pytest.mark.parametrize(
    ("name", "environment"),
    spread(8, [*product(registry(), ("ragged",)), *product(PLACED, ("prompts", "mdp", "ngram"))]),
)
def test_exact_training_follows_the_enumerated_gradient(name, environment):
    assert_first_step_is_exact(name, environment)


def assert_first_step_is_exact(name, environment):
    which, beta, rate = problem(environment), 0.7, 0.5
    moved = train([Run(which, name, beta=beta, learning_rate=rate)], steps=1, optima=False).logits[0]
    instance = instance_of(which)
    penalty = exact(resolve(name), instance, "current").gradient
    assert np.abs((moved - which.start) / rate - ascent(instance, beta, penalty)).max() < SAME


def ascent(instance, beta, penalty):
    return gradient("expected_reward", instance) - beta * penalty


@pytest.mark.parametrize(
    ("name", "environment"),
    spread(6, [*product(registry(), ("ragged",)), *product((*PLACED, "k3-ratio"), ("mdp",))]),
)
def test_stale_exact_training_follows_the_enumerated_gradient_under_the_sampler(name, environment):
    which, beta, rate = problem(environment), 0.4, 0.3
    runs = [Run(which, name, beta=beta, learning_rate=rate)]
    # With the ratio of the whole sequence the reward part is that of the policy, whatever the sampler.
    settings = {"inner_steps": 2, "ratio": "sequence", "optima": False}
    once, twice = (train(runs, steps=steps, **settings).logits[0] for steps in (1, 2))
    instance = instance_of(which, once, which.start)
    penalty = exact(resolve(name), instance, "stale").gradient
    assert np.abs((twice - once) / rate - ascent(instance, beta, penalty)).max() < SAME


def test_the_sampler_is_renewed_after_inner_steps():
    which = problem("sequence")
    runs = [Run(which, "k2-loss", beta=0.4, learning_rate=0.3)]
    stale = [train(runs, steps=steps, inner_steps=2).logits[0] for steps in (2, 3)]
    instance = instance_of(which, stale[0])
    expected = ascent(instance, 0.4, exact(resolve("k2-loss"), instance).gradient)
    assert np.abs((stale[1] - stale[0]) / 0.3 - expected).max() < SAME


@pytest.mark.parametrize("ratio", spread(4, ["none", "token", "sequence", "clipped"]))
@pytest.mark.parametrize("environment", ["bandit", "sequence", "ragged"])
def test_ratios_of_the_reward_part(environment, ratio):
    which, rate = problem(environment), 3.0
    runs = [Run(which, None, learning_rate=rate)]
    once, twice = (train(runs, steps=steps, inner_steps=2, ratio=ratio).logits[0] for steps in (1, 2))
    assert np.abs((twice - once) / rate - surrogate_gradient(which, once, ratio)).max() < SAME
    if ratio == "clipped":
        assert np.abs((twice - once) / rate - surrogate_gradient(which, once, "token")).max() > 1e-3


def surrogate_gradient(which, logits, ratio, clip=0.2):
    """∇ of the surrogate loss as PPO and its relatives write it, by autograd over all rollouts."""
    instance = instance_of(which, logits, which.start)
    paths = instance.paths
    parameters = torch.tensor(logits, requires_grad=True)
    live = torch.from_numpy(paths.mask)
    log_ratio = (parameters.log_softmax(1) - torch.from_numpy(instance.sampler))[
        torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
    ]
    log_ratio = torch.where(live, log_ratio, 0.0)
    chances = torch.from_numpy(instance.rollout_weights("stale"))
    reward = torch.from_numpy(which.environment.returns(paths))
    advantage = (reward - (chances * reward).sum())[:, None]
    if ratio == "none":
        surrogate = log_ratio * advantage
    elif ratio == "token":
        surrogate = log_ratio.exp() * advantage
    elif ratio == "sequence":
        surrogate = log_ratio.sum(1, keepdim=True).exp() * advantage / live.sum(1, keepdim=True)
    else:
        rho = log_ratio.exp()
        surrogate = torch.minimum(rho * advantage, rho.clamp(1 - clip, 1 + clip) * advantage)
    (chances[:, None] * torch.where(live, surrogate, 0.0)).sum().backward()
    return parameters.grad.numpy()


@pytest.mark.parametrize(
    "name", spread(4, ["group-mean", "leave-one-out", "tied-groups-masked", "k2-loss", "token-mean"])
)
@pytest.mark.parametrize("environment", ["bandit", "prompts"])
def test_exact_groups_follow_the_gradient_over_all_groups(name, environment):
    which, size = problem(environment, reward="binary"), 3
    start = train([Run(which, name, beta=0.6)], steps=1, group_size=size).logits[0]
    instance = instance_of(which)
    penalty = exact_batches(resolve(name), instance, size=size, grouped=True).gradient
    assert np.abs(start - which.start - ascent(instance, 0.6, penalty)).max() < SAME


def test_a_whole_loss_is_followed_alone():
    """group-std holds reward and KL: four rollouts of a bandit, written out over all 4⁴ ordered groups."""
    which, beta = problem("bandit"), 0.3
    moved = train([Run(which, "group-std", beta=beta, whole=True)], steps=1, group_size=4).logits[0] - which.start
    policy, reference = table(which.start)[0], which.log_reference[0]
    earned = which.environment.reward[0] - beta * (policy - reference)
    expected = np.zeros(4)
    for group in np.ndindex(4, 4, 4, 4):
        rows = np.array(group)
        centred = earned[rows] - earned[rows].mean()
        weights = centred / (np.sqrt((centred**2).sum() / 3) + 1e-4) / 4
        score = np.bincount(rows, weights, 4) - np.exp(policy) * weights.sum()
        expected += np.exp(policy[rows].sum()) * score
    assert np.abs(moved[0] - expected).max() < SAME


# Ascent converges linearly, with a rate that the rarest context sets; ends are compared where it has.
ENDS = {
    "k1-reward": lambda *asked: optimum(*asked).policy,
    "k2-loss-sequence": lambda *asked: optimum(*asked).policy,
    "rao-blackwell": lambda *asked: optimum(*asked).policy,
    "k2-loss": token_level_fixed_point,
    "full-loss": token_level_fixed_point,
    "k3-loss": token_k3_fixed_point,
    "k3-loss-sequence": sequence_k3_fixed_point,
}


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("environment", "rate"), first(1, [(bandit(4), 4.0), (sequence(3, 2), 3.0), (ragged(2, 3), 2.0)])
)
def test_exact_ascent_ends_at_the_fixed_point(environment, rate):
    which = Problem.draw(environment, 3, distance=0.0, reward="normal")
    which = Problem(replace(environment, reward=which.environment.reward / 2), which.start, which.reference)
    runs = [Run(which, name, beta=1.0, learning_rate=rate) for name in ENDS]
    history = train(runs, steps=400, optima=False)
    for name, ended in zip(ENDS, history.logits, strict=True):
        expected = np.exp(ENDS[name](which.environment, which.reference, 1.0))
        assert np.abs(np.exp(table(which.start)) - expected).max() > 0.05, name
        assert np.abs(np.exp(table(ended)) - expected).max() < 1e-4, name


def test_k1_in_the_loss_trains_as_if_there_were_no_penalty():
    runs = [Run(problem("sequence"), name, beta=0.5) for name in ("k1-loss", None)]
    logits = train(runs, steps=50).logits
    assert np.abs(logits[0] - logits[1]).max() < 1e-11


@pytest.mark.scheduled
def test_who_reaches_the_optimum():
    """V = 5, L = 4, β = .5: k1 in the reward and sequence k2 do (KL < 1e-6), the others do not.

    The contexts of the first two tokens start at the reference, the others, met too seldom for a short ascent,
    at the optimum: whoever follows the true gradient leaves them there.
    """
    environment, beta = sequence(5, 4), 0.5
    drawn = Problem.draw(environment, 0, distance=0.0)
    environment = replace(environment, reward=np.random.default_rng(0).standard_normal(drawn.start.shape) / 4)
    start = optimum(environment, drawn.reference, beta).policy.copy()
    start[:6] = drawn.reference[:6]
    names = ["k1-reward", "k2-loss-sequence", "k3-loss-sequence", "k3-loss", "k1-loss"]
    runs = [Run(Problem(environment, start, drawn.reference), name, beta=beta, learning_rate=8.0) for name in names]
    history = train(runs, steps=330)
    distance = dict(zip(names, history.kl_to_optimum[-1], strict=True))
    assert min(history.kl_to_optimum[0]) > 1e-2
    assert max(distance["k1-reward"], distance["k2-loss-sequence"]) < 1e-6
    assert min(distance["k3-loss-sequence"], distance["k3-loss"], distance["k1-loss"]) > 1e-3


@pytest.mark.parametrize("environment", first(2, ENVIRONMENTS))
def test_measurements_are_the_truth(environment):
    which, beta = problem(environment), 0.7
    history = train([Run(which, "k2-loss", beta=beta)], steps=2, record=1)
    for index, steps in enumerate((0, 1, 2)):
        logits = train([Run(which, "k2-loss", beta=beta)], steps=steps).logits[0]
        instance = instance_of(which, logits)
        expected = {
            "reward": value("expected_reward", instance),
            "kl": value("reverse_kl", instance),
            "entropy": value("entropy", instance),
        }
        best = optimum(which.environment, which.reference, beta)
        expected["objective"] = expected["reward"] - beta * expected["kl"]
        # J* − J_β = β·KL(π‖π*), for any environment.
        expected["gap"] = best.value - expected["objective"]
        expected["kl_to_optimum"] = expected["gap"] / beta
        expected["gradient_norm"] = np.linalg.norm(ascent(instance, beta, exact(resolve("k2-loss"), instance).gradient))
        expected["logged"] = exact(resolve("k2-loss"), instance).value.mean
        for name, number in expected.items():
            assert getattr(history, name)[index, 0] == pytest.approx(number, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize("bug", ["no projection", "half the penalty", "another softmax"])
def test_planted_bugs_are_seen(bug, monkeypatch):
    loop, tokens = sys.modules["kltest.training.train"], sys.modules["kltest.training.penalty"]
    if bug == "no projection":
        monkeypatch.setattr(loop, "softmax_gradient", lambda weights, policy: weights)
    elif bug == "half the penalty":
        monkeypatch.setattr(tokens, "weighted", lambda values, weights: values * weights / 2)
    else:
        monkeypatch.setattr(loop, "softmax", lambda logits, into=None: softmax(logits * (1 + 1e-9)))
    with pytest.raises(AssertionError):
        assert_first_step_is_exact("k2-loss", "sequence")


def test_bad_input_is_refused_in_words():
    which = problem("bandit")
    run = Run(which, "k2-loss")
    for words, settings in {
        "steps must be": {"steps": -1},
        "batch_size must be": {"batch_size": 0},
        "cannot be cut": {"batch_size": 6, "group_size": 4},
        "the ratio": {"ratio": "prefix"},
        "after update 9": {"record": [9]},
        "every 1 update": {"record": 0},
    }.items():
        with pytest.raises(UsageError, match=words):
            train([run], **{"steps": 2, **settings})
    with pytest.raises(UsageError, match="no run"):
        train([], steps=1)
    with pytest.raises(InvalidEnvironmentError, match="share contexts"):
        train([run, Run(problem("sequence"), "k2-loss")], steps=1)
    with pytest.raises(InvalidEnvironmentError, match="logits have shape"):
        Problem(bandit(4), np.zeros((1, 3)), np.zeros((1, 4)))
    with pytest.raises(UsageError, match="coefficient"):
        Run(which, "k2-loss", beta=-1.0)
    with pytest.raises(UsageError, match="learning rate"):
        Run(which, "k2-loss", learning_rate=float("nan"))
    with pytest.raises(UsageError, match="no estimator called"):
        train([Run(which, "k4-loss")], steps=1)
    with pytest.raises(UsageError, match="no parameter"):
        train([Run(which, "k2-loss", options={"lam": 0.3})], steps=1)
    with pytest.raises(InvalidEnvironmentError, match="groups of 12 rollouts"):
        train([Run(problem("ragged"), "group-mean")], steps=1, group_size=12)


def test_a_run_without_a_penalty_is_measured_at_its_coefficient():
    history = train([Run(problem("bandit"), None, beta=0.3), Run(problem("bandit"), "k2-loss", beta=0.0)], steps=5)
    assert np.array_equal(history.logits[0], history.logits[1])
    assert history.gap[-1, 0] > 0
    assert np.isnan(history.gap[-1, 1])
