"""What must hold in every environment: random ones, with random policies, by hypothesis.

Nothing here knows the right gradient; each test changes what must not matter, or goes a second way.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weekly import examples

from kltest.environments import Environment, Instance, bandit, mdp, ngram, ragged, sequence
from kltest.estimators import registry
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.truth import ATLAS, gradient

# Sums of the same few hundred terms in another order, in float64.
EXACT = 1e-11
PROPERTY = settings(deadline=None, max_examples=examples(100), derandomize=True)

PROMPTS = np.array([0.25, 0.75])


@st.composite
def environments(draw):
    """A random environment of at most a few hundred rollouts, with rewards."""
    kind = draw(st.sampled_from(["bandit", "sequence", "ragged", "ngram", "mdp"]))
    vocabulary, length, seed = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 999))
    prompts = draw(st.sampled_from([None, PROMPTS]))
    build = {
        "bandit": lambda: bandit(vocabulary, prompts=prompts),
        "sequence": lambda: sequence(vocabulary, length, prompts=prompts),
        "ragged": lambda: ragged(vocabulary, length, prompts=prompts),
        "ngram": lambda: ngram(vocabulary, length, draw(st.integers(1, 2))),
        "mdp": lambda: mdp(draw(st.integers(2, 4)), vocabulary, length, seed=seed),
    }
    environment = build[kind]()
    reward = np.random.default_rng(seed).standard_normal(environment.reward.shape)
    return replace(environment, reward=reward)


@st.composite
def instances(draw):
    return Instance.draw(draw(environments()), draw(st.integers(0, 9999)))


SAMPLERS = st.sampled_from(["current", "stale"])
ALONE = sorted(name for name, estimator in registry().items() if not estimator.spec.couples)
ESTIMATORS = st.sampled_from(ALONE)
NAMES = st.sampled_from([name for name in ATLAS if name != "zero"])


def same(one, other, scale):
    np.testing.assert_allclose(one, other, rtol=0, atol=EXACT * max(scale, 1.0))


def size(moments):
    return float(np.sqrt(moments.second_moment))


def tables(instance, change):
    return replace(
        instance, policy=change(instance.policy), reference=change(instance.reference), sampler=change(instance.sampler)
    )


@PROPERTY
@given(instances(), ESTIMATORS, SAMPLERS, st.integers(0, 99))
def test_a_shift_of_the_logits_changes_nothing(instance, name, sampler, seed):
    generator = np.random.default_rng(seed)
    shifted = Instance.of(
        instance.environment,
        *(
            table + 5 * generator.standard_normal((len(table), 1))
            for table in (instance.policy, instance.reference, instance.sampler)
        ),
    )
    loss = resolve(name)
    before, after = exact(loss, instance, sampler), exact(loss, shifted, sampler)
    same(before.gradient, after.gradient, size(before))
    assert after.variance == pytest.approx(before.variance, rel=1e-9, abs=1e-12)


@PROPERTY
@given(instances(), ESTIMATORS, SAMPLERS, NAMES, st.integers(0, 99))
def test_new_names_for_actions_and_contexts_only_rename_the_gradient(instance, name, sampler, truth, seed):
    generator = np.random.default_rng(seed)
    environment = instance.environment
    actions, contexts = generator.permutation(environment.vocabulary), generator.permutation(environment.n_contexts)
    new_name = np.argsort(contexts)

    def moved(table):
        return table[contexts][:, actions]

    successors = moved(environment.successors)
    renamed = Environment(
        name=environment.name,
        horizon=environment.horizon,
        start=new_name[environment.start],
        prompts=environment.prompts,
        successors=np.where(successors >= 0, new_name[successors], successors),
        probabilities=moved(environment.probabilities),
        reward=moved(environment.reward),
        tree=environment.tree,
    )
    other = replace(tables(instance, moved), environment=renamed)
    same(moved(gradient(truth, instance)), gradient(truth, other), 1.0)
    # What reads the actions in the order of their numbers (which of two equal ones is in the head) is not invariant;
    # random policies have no ties.
    before, after = exact(resolve(name), instance, sampler), exact(resolve(name), other, sampler)
    same(moved(before.gradient), after.gradient, size(before))


@PROPERTY
@given(instances(), st.sampled_from(["return", "to-go"]))
def test_credit_to_go_is_the_whole_return_when_the_sampler_is_the_policy(instance, credit):
    """What was paid before a token does not depend on it: E[g_t · (past)] = 0."""

    def k1(logp, ref_logp):
        return logp - ref_logp

    found = exact(bind(k1, Call(placement="reward", credit=credit)), instance)
    same(found.gradient, gradient("reverse_kl", instance), size(found))


@PROPERTY
@given(instances(), st.floats(-3, 3))
def test_a_constant_in_the_reward_of_a_rollout_changes_nothing_in_expectation(instance, constant):
    """A constant a token would: it pays for length."""

    def k1(logp, ref_logp, mask):
        return (logp - ref_logp).where(mask != 0, 0.0).sum(-1) + constant

    found = exact(bind(k1, Call(placement="reward")), instance)
    same(found.gradient, gradient("reverse_kl", instance), size(found))


@PROPERTY
@given(instances(), st.floats(-2, 2).filter(lambda c: abs(c) > 1e-3), ESTIMATORS)
def test_the_expected_gradient_is_linear_in_the_loss(instance, factor, name):
    inner = registry()[name]
    if inner.spec.placement != "loss":
        return
    loss = resolve(name)

    class Scaled:
        def __getattr__(self, attribute):
            return getattr(loss, attribute)

        def __call__(self, rollout):
            outcome = loss(rollout)
            rows = None if outcome.rows is None else factor * outcome.rows
            return replace(outcome, objective=factor * outcome.objective, rows=rows)

    one, other = exact(loss, instance), exact(Scaled(), instance)
    same(factor * one.gradient, other.gradient, size(one))
