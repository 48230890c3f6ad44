"""Registered policy losses: what each SPEC says is ascended, by hand over all groups, and as the grade finds it."""

from itertools import product

import numpy as np
import pytest
import torch
from moments_plain import every_multiset, moments_by_hand, plain
from typer.testing import CliRunner
from weekly import first

import kltest
from kltest.cli import app
from kltest.environments.samplers import drawn_by
from kltest.estimators import find, registry
from kltest.estimators.advantages import clipped, of_tokens
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.moments import exact
from kltest.truth import gradient
from kltest.truth.utilities import group_weight

POLICIES = registry("policy")
# Of each mechanism one: a group's deviation, a mask of rollouts, and a batch that is whitened whole.
FIRST = ("grpo", "mis-sequence", "off-policy-sequence-mask")
ORDERED = [*FIRST, *(name for name in POLICIES if name not in FIRST)]
# Sums of some hundred float64 terms; 1e-8 beside a deviation of one half leaves a few times 1e-8.
EXACT, CONSTANT = 1e-11, 1e-7


def expectation(name, environment, sampler):
    """(instance, expected gradient), by one backward pass for each rollout or group through a table of logits."""
    spec, function = POLICIES[name].spec, POLICIES[name].function
    (instance, *_) = drawn_by(sampler, instances(environment, 0, 4 if spec.couples else None)[:1])
    if spec.couples:
        return instance, moments_by_hand(function, instance, 4, sampler, every_multiset)[0]
    return instance, plain(function, instance, sampler)[0]


@pytest.mark.parametrize("name", first(len(FIRST), ORDERED))
def test_the_ascent_by_hand_is_what_the_spec_says(name):
    spec = POLICIES[name].spec
    for sampler, environment in product(spec.identified, ("bandit", "sequence", "ragged", "mdp")):
        claimed = spec.expectation(environment, sampler)
        if claimed is None:
            continue
        instance, found = expectation(name, environment, sampler)
        wanted = sum(coefficient * gradient(each, instance) for each, coefficient in claimed.items())
        limit = CONSTANT if "epsilon" in POLICIES[name].function.__code__.co_varnames else EXACT
        assert np.abs(found + wanted).max() < limit * np.abs(wanted).max(), (environment, sampler)


@pytest.mark.parametrize("name", first(len(FIRST), ORDERED))
def test_the_grade_finds_what_the_spec_says_and_no_more(name):
    spec = POLICIES[name].spec
    asked = ("both", "engine") if "engine" in spec.identified else ("both",)
    for sampler in asked:
        report = kltest.grade(name, environment="bandit,sequence,ragged,mdp", sampler=sampler, select="KL902")
        assert "It follows what its SPEC names." in report.notes or not any(
            spec.expectation(row.environment, row.sampler) for row in report.gradients
        )
        assert report.expect == "expected_reward"
        batches = max(row.batch for row in report.gradients)
        for row in report.gradients:
            if spec.expectation(row.environment, row.sampler) is None and row.batch == batches:
                assert row.identified is None, row


@pytest.mark.parametrize(
    ("bug", "name"),
    [
        ("a deviation left out", "grpo"),
        ("a deviation over n", "dapo"),
        ("the rollout itself in the mean", "reinforce-leave-one-out"),
        ("a weight of tokens for one of rollouts", "tis-sequence"),
    ],
)
def test_a_planted_bug_is_not_what_the_spec_says(bug, name, monkeypatch):
    instead = {
        "a deviation left out": "grpo-without-std",
        "a deviation over n": "gspo",
        "the rollout itself in the mean": "dr-grpo",
        "a weight of tokens for one of rollouts": "tis-token",
    }[bug]
    environment, sampler = ("sequence", "engine") if "weight" in bug else ("bandit", "current")
    claimed = POLICIES[name].spec.expectation(environment, sampler)
    instance, found = expectation(instead, environment, sampler)
    if bug == "a deviation over n":
        found = found / 0.75**0.5
    wanted = sum(coefficient * gradient(each, instance) for each, coefficient in claimed.items())
    assert np.abs(found + wanted).max() > 1e-3 * np.abs(wanted).max()


def test_what_grpo_ascends_is_the_closed_form_in_the_success_rate_and_the_group_size():
    """w_G(p)·∇p with √((G − 1)/G) for torch.std, in every instance of a bandit."""
    for size, instance in product((2, 3, 5), instances("bandit", 0, 4)):
        found = moments_by_hand(POLICIES["grpo"].function, instance, size, "current", every_multiset)[0]
        rate = float(instance.environment.expected_returns(instance.policy)[0])
        wanted = group_weight(rate, size, deviation=1) * gradient("expected_reward", instance)
        assert np.abs(found + wanted).max() < CONSTANT


@pytest.mark.parametrize("lam", [0.5, 0.95])
def test_generalised_advantages_from_the_true_values_ascend_the_reward_for_any_lambda(lam):
    """δ_t = V(s_(t+1)) − V(s_t), R for the last: each δ has mean zero given its prefix and token but the own one's."""
    instance = instances("sequence", 0)[0]
    environment, paths = instance.environment, instance.paths
    values, chances = np.zeros(environment.n_contexts), np.exp(instance.policy)
    for _ in range(environment.horizon):
        onward = np.where(environment.successors >= 0, values[environment.successors], 0.0) * environment.probabilities
        values = (chances * (environment.reward + onward.sum(axis=2))).sum(axis=1)
    along = values[paths.contexts]
    after = np.concatenate([along[:, 1:], np.zeros((len(paths), 1))], axis=1)
    delta = environment.reward[paths.contexts, paths.tokens] + after - along
    advantage = np.zeros_like(delta)
    for step in range(delta.shape[1]):
        advantage[:, step] = (lam ** np.arange(delta.shape[1] - step) * delta[:, step:]).sum(axis=1)
    given = {tuple(row): torch.from_numpy(each) for row, each in zip(paths.tokens.tolist(), advantage, strict=True)}

    def with_the_true_values(logp, old_logp, mask, tokens):
        credit = torch.stack([given[tuple(row)] for row in tokens.tolist()])
        return of_tokens(clipped(logp, old_logp, credit, 0.2, 0.2), mask)

    found = exact(bind(with_the_true_values), instance, "current").gradient
    assert found == pytest.approx(-gradient("expected_reward", instance), abs=1e-12)
    constant = exact(bind(find("gae").function), instance, "current").gradient
    assert np.abs(constant + gradient("expected_reward", instance)).max() > 1e-3


def test_a_registered_policy_loss_is_listed_explained_and_graded_as_one():
    def run(*words):
        return CliRunner().invoke(app, [*words])

    assert all(name in run("list", "policies").output for name in POLICIES)
    assert "Liu et al. 2025" in run("explain", "dr-grpo").output
    found = run("grade", "reinforce-leave-one-out", "--environment", "bandit")
    assert found.exit_code == 0, found.output
    assert run("grade", "reinforce-leave-one-out", "--placement", "reward").exit_code == 2
