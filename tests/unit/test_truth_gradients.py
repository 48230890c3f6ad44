"""The atlas as properties over one table: every name × every environment × several seeds."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from enumerated import value_again
from weekly import spread

from kltest.environments import END, Instance, bandit, mdp, ngram, ragged, sequence, tabular
from kltest.errors import UsageError
from kltest.truth import (
    ATLAS,
    VALUES,
    combine,
    divergences,
    gradient,
    gradient_again,
    gradients,
    off_policy,
    recursions,
    value,
)

# Both routes sum at most 10^4 terms of size 1; their gradients are of size 0.01 to 1.
EXACT = 1e-11
SEEDS = range(3)


def _reward(environment):
    return np.random.default_rng(11).standard_normal(environment.reward.shape)


def _paid(make, *arguments, **options):
    return make(*arguments, **options, reward=_reward(make(*arguments, **options)))


ENVIRONMENTS = {
    "bandit": _paid(bandit, 4),
    "bandits": _paid(bandit, 3, prompts=np.array([0.2, 0.5, 0.3])),
    "sequence": _paid(sequence, 3, 3),
    "sequences": _paid(sequence, 2, 4, prompts=np.array([0.35, 0.65])),
    "ragged": _paid(ragged, 3, 4),
    "raggeds": _paid(ragged, 3, 3, prompts=np.array([0.5, 0.5])),
    "ragged-first": _paid(sequence, 3, 3, end_token=0),
    "mdp": mdp(5, 3, 4, seed=3),
    "mdp-wide": mdp(4, 2, 4, branches=3, seed=4),
    "ngram": _paid(ngram, 3, 5, 2),
    "ngram-ragged": _paid(ngram, 3, 5, 3, end_token=1),
    "unigram": _paid(ngram, 3, 5, 1),
}
SHARED = [name for name, environment in ENVIRONMENTS.items() if not environment.tree]


def _absorbing(environment):
    """The same process, where a token may also end the rollout by chance."""
    successors = environment.successors.copy()
    successors[::2, :, -1] = END
    start = environment.start_distribution()
    return tabular(successors, environment.probabilities, environment.reward, environment.horizon, start=start)


ENVIRONMENTS["mdp-ending"] = _absorbing(ENVIRONMENTS["mdp"])


def _ends_early(environment):
    return bool((recursions.ending(environment) * (environment.horizon > 1)).any())


def draw(environment, seed):
    return Instance.draw(ENVIRONMENTS[environment], seed)


def relative(found, expected):
    """‖found − expected‖ over ‖expected‖; over 1 where that is zero but for rounding."""
    size = np.linalg.norm(expected)
    return np.linalg.norm(found - expected) / (size if size > 1e-12 else 1.0)


@cache
def everywhere():
    """Every environment with every seed, and the instance drawn so."""
    return {(environment, seed): draw(environment, seed) for environment in ENVIRONMENTS for seed in SEEDS}


@pytest.mark.parametrize("name", spread(14, ATLAS))
def test_two_routes_agree(name):
    for place, instance in everywhere().items():
        assert relative(gradient(name, instance), gradient_again(name, instance)) < EXACT, place


@pytest.mark.parametrize("name", VALUES)
def test_two_routes_to_a_value_agree(name):
    for place, instance in everywhere().items():
        assert value(name, instance) == pytest.approx(value_again(name, instance), rel=EXACT, abs=1e-15), place


def _shortened(environment, weights, true=recursions.visits):
    return list(true(environment, weights))[:-1]


def _without_past(environment, chances, cost, state):
    return recursions.forward(environment, chances, state) * np.eye(1, state.shape[1])


# What goes wrong: (module, function, its wrong version, a name, an environment).
PLANTED = {
    "only the horizon ends rollouts": (
        recursions,
        "ending",
        lambda e: np.zeros_like(e.reward),
        "last_token_reverse_kl",
        "ragged",
    ),
    "time is one step short": (recursions, "visits", _shortened, "local_reverse_kl", "sequence"),
    "no future": (recursions, "onward", lambda e, values: np.zeros_like(e.reward), "reverse_kl", "mdp"),
    "policies swapped": (divergences, "difference", lambda p, q: np.exp(q) - np.exp(p), "forward_kl", "ngram"),
    "no past": (gradients, "carry", _without_past, "squared_log_ratio", "sequences"),
    "no past of the sampler": (recursions, "carry", _without_past, "reverse_kl@rollouts", "mdp"),
    "earlier tokens forgotten": (
        off_policy,
        "earlier",
        lambda environment, log_probs, cost: np.zeros((len(cost), 1)),
        "other_tokens_forward_kl@rollouts",
        "ragged",
    ),
    "every rollout has the longest length": (
        recursions,
        "ending",
        lambda e: np.zeros_like(e.reward),
        "inverse_length",
        "mdp-ending",
    ),
    "the rollouts' own length forgotten": (
        off_policy,
        "of_length",
        lambda *given: (0 * recursions.of_length(*given)[0], *recursions.of_length(*given)[1:]),
        "inverse_length@rollouts",
        "ragged",
    ),
    "the other rollouts of a batch are of one token": (
        recursions,
        "lengths",
        lambda environment, log_probs: np.eye(environment.horizon)[0],
        "inverse_length_of3",
        "ragged",
    ),
    "a mean over all prompts": (
        off_policy,
        "_OF_LOG_RATIO",
        off_policy._OF_LOG_RATIO | {"centred_reverse_kl": lambda total, _, chance: total - chance @ total},
        "centred_reverse_kl@rollouts",
        "raggeds",
    ),
    "own ratio as in the gradient": (
        gradients,
        "OFF_POLICY",
        off_policy.OFF_POLICY | {"sampler": off_policy._no_ratio},
        "reverse_kl@sampler",
        "sequence",
    ),
    "padding counts": (
        off_policy,
        "along",
        lambda instance, table: table[instance.paths.contexts, instance.paths.tokens],
        "local_forward_kl@mean_ratio",
        "ragged",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_breaks_the_agreement(bug, monkeypatch):
    module, function, wrong, name, environment = PLANTED[bug]
    instance = draw(environment, 0)
    assert relative(gradient(name, instance), gradient_again(name, instance)) < EXACT
    monkeypatch.setattr(module, function, wrong)
    assert relative(gradient(name, instance), gradient_again(name, instance)) > 1e-3


def for_one_token(name):
    """The name that a named gradient has where rollouts have one token: no prefix, no later token, one ratio."""
    base, _, at = name.partition("@")
    if base.startswith(("future", "exact_future", "other_tokens")):
        return "zero"
    stem = base.removeprefix("local_").removeprefix("last_token_").removesuffix("_sum")
    return f"{stem}@rollouts" if at == "rollouts" else stem


@pytest.mark.parametrize("name", [name for name in ATLAS if for_one_token(name) != name])
def test_names_that_coincide_for_one_token_and_differ_for_more(name):
    bandits, sequence = draw("bandits", 1), draw("sequence", 1)
    assert relative(gradient(name, bandits), gradient(for_one_token(name), bandits)) < EXACT
    assert relative(gradient(name, sequence), gradient(for_one_token(name), sequence)) > 1e-2


def test_the_atlas_tells_its_names_apart():
    """No named gradient is a multiple of another where the horizon is above 1 and there is a sampler."""
    instance = draw("raggeds", 2)
    rows = np.stack([gradient(name, instance).ravel() for name in ATLAS if name != "zero"])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    alike = np.abs(rows @ rows.T) - np.eye(len(rows))
    assert alike.max() < 1 - 1e-6


@pytest.mark.parametrize("environment", [name for name in ENVIRONMENTS if not _ends_early(ENVIRONMENTS[name])])
def test_at_one_length_an_inverse_length_is_no_column_made_of_rounding(environment):
    instance = draw(environment, 0)
    assert not gradient("inverse_length", instance).any()
    share = -gradient("from_sampler_kl", instance) / instance.environment.horizon
    assert relative(gradient("inverse_length@rollouts", instance), share) < EXACT


# Central differences of a smooth function with step h: error h² from the third derivative, 1e-16/h from rounding.
STEP, DIFFERENCED = 1e-5, 1e-7


def _moved(instance, cell, by):
    logits = instance.policy.copy()
    logits[cell] += by
    return Instance.of(instance.environment, logits, instance.reference, instance.sampler)


def _differences(function, instance):
    """d function / d logits by central differences, over all cells."""
    cells = list(np.ndindex(instance.policy.shape))
    return np.stack(
        [
            (np.asarray(function(_moved(instance, cell, STEP))) - function(_moved(instance, cell, -STEP))) / (2 * STEP)
            for cell in cells
        ]
    )


FIELDS = [name for name, row in ATLAS.items() if row.field and name != "zero"]
SMALL = {
    "bandits": ENVIRONMENTS["bandits"],
    "sequence": _paid(sequence, 2, 3),
    "ragged": _paid(ragged, 3, 2),
    "mdp": mdp(3, 2, 3, seed=3),
    "ngram": _paid(ngram, 2, 4, 2),
}


@pytest.mark.parametrize("name", [name for name in FIELDS if name in VALUES])
def test_gradients_are_the_finite_differences_of_their_values(name):
    for label, environment in SMALL.items():
        instance = Instance.draw(environment, 5)
        found = _differences(lambda moved: value(name, moved), instance).reshape(instance.policy.shape)
        assert relative(found, gradient(name, instance)) < DIFFERENCED, label


def _asymmetry(name, environment):
    instance = Instance.draw(SMALL[environment], 5)
    jacobian = _differences(lambda moved: gradient(name, moved).ravel(), instance)
    size = np.linalg.norm(jacobian)  # exactly 0 where a gradient vanishes everywhere
    return np.linalg.norm(jacobian - jacobian.T) / size if size else 0.0


@pytest.mark.parametrize("name", spread(8, FIELDS))
def test_a_gradient_field_has_a_symmetric_jacobian(name):
    for environment in SMALL:
        assert _asymmetry(name, environment) < DIFFERENCED, environment


@pytest.mark.parametrize("name", [name for name, row in ATLAS.items() if not row.field])
def test_what_is_no_gradient_field_has_none(name):
    for environment in SMALL.keys() - {"bandits"}:
        assert _asymmetry(name, environment) > 1e-2, environment


@pytest.mark.parametrize("environment", SHARED)
def test_checkpoints_give_the_same_as_keeping_everything(environment, monkeypatch):
    instance = draw(environment, 0)
    kept = [gradient(name, instance) for name in ("reverse_kl", "squared_log_ratio", "chi_square")]
    monkeypatch.setattr(recursions, "MEMORY", 0)
    again = [gradient(name, instance) for name in ("reverse_kl", "squared_log_ratio", "chi_square")]
    assert all(np.array_equal(one, other) for one, other in zip(kept, again, strict=True))


def _endless(instance):
    """The same rollouts, whose last tokens lead on to contexts that lie beyond the horizon."""
    environment = instance.environment
    successors = np.where(environment.successors == END, environment.n_contexts, environment.successors)
    successors = np.concatenate([successors, np.full_like(successors[:1], END)])
    longer = replace(
        environment,
        successors=successors,
        probabilities=np.ones(successors.shape),
        reward=np.concatenate([environment.reward, environment.reward[:1]]),
    )
    policies = (np.concatenate([one, one[:1]]) for one in (instance.policy, instance.reference, instance.sampler))
    return Instance(longer, *policies)


@pytest.mark.parametrize("name", ["reverse_kl", "local_reverse_kl", "entropy", "expected_reward", "forward_kl"])
def test_all_steps_at_once_give_the_same_as_one_after_another(name, monkeypatch):
    """Where each context has a time step of its own; not where contexts follow the last time step."""
    trees = [draw(environment, 0) for environment in ENVIRONMENTS if ENVIRONMENTS[environment].tree]
    fixed = Instance.draw(sequence(2, 4), 0)
    instances = [*trees, fixed, _endless(fixed)]
    wanted = [gradient(name, instance) for instance in instances]
    at_once = []
    true = recursions.powers
    monkeypatch.setattr(recursions, "LONG", 0)
    monkeypatch.setattr(recursions, "powers", lambda *given: (at_once.append(true(*given)), at_once[-1])[1])
    for instance, one in zip(instances, wanted, strict=True):
        at_once.clear()
        np.testing.assert_allclose(gradient(name, instance), one, rtol=0, atol=1e-14)
        assert at_once
        assert all((squared is None) == (instance is instances[-1]) for squared in at_once), instance.environment.name
    np.testing.assert_allclose(wanted[-1][:-1], wanted[-2], rtol=0, atol=1e-14)


class Counted:
    """A state that knows its time step; `alive` of them are kept by somebody, `most` at once."""

    nbytes, alive, most = 8, 0, 0

    def __init__(self, step):
        self.step = step
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self):
        Counted.alive -= 1


# The room for states, and how many times each may be computed: more often only where fewer than √count fit.
@pytest.mark.parametrize(("room", "times"), [(2, 10), (32, 2), (2**40, 1)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 10, 17, 100, 1000])
def test_time_runs_backwards_over_every_state_once(count, room, times, monkeypatch):
    monkeypatch.setattr(recursions, "MEMORY", room * Counted.nbytes)
    Counted.most, calls = 0, []

    def step(state):
        calls.append(1)
        return Counted(state.step + 1)

    assert [state.step for state in recursions.backwards(step, Counted(0), count)] == list(range(count))[::-1]
    assert len(calls) <= (count - 1) * times
    assert Counted.most <= room * max(times, 1) + 2, "memory does not grow with the number of steps"


ENUMERATED = {
    "total_variation",
    *(f"{name}@rollouts" for name in off_policy._OF_LOG_RATIO),
    *(name for name in ATLAS if name.endswith("@mean_ratio")),
}


@pytest.mark.parametrize("name", spread(6, [name for name in ATLAS if name not in ENUMERATED]))
def test_work_grows_linearly_with_the_horizon(name, monkeypatch):
    """One sparse product a step and direction, two where a second moment is carried; never an enumeration."""
    done = []
    for function in ("forward", "onward"):
        true = getattr(recursions, function)
        counted = lambda *given, true=true: (done.append(1), true(*given))[1]  # noqa: E731
        monkeypatch.setattr(recursions, function, counted)
        for module in (gradients, off_policy):
            monkeypatch.setattr(module, function, counted, raising=False)

    def products(length):
        done.clear()
        gradient(name, Instance.draw(ngram(2, length, 2), 0))
        return len(done)

    assert products(60) <= 4 * 60
    assert products(60) - products(40) == products(80) - products(60)


def test_every_atlas_row_is_described():
    assert list(ATLAS)[:3] == ["reverse_kl", "local_reverse_kl", "future_reverse_kl"]
    assert list(ATLAS)[-1] == "zero"
    assert len({row.formula for row in ATLAS.values()}) == len(ATLAS)
    for name, row in ATLAS.items():
        assert row.name == name
        assert row.meaning
        assert row.stale == ("@" in name or "sampler" in name)
        assert ("μ" in row.formula) == row.stale


STALE = [name for name, row in ATLAS.items() if row.stale]


@pytest.mark.parametrize("name", spread(8, STALE))
def test_a_fresh_sampler_makes_a_stale_name_a_combination_of_others(name):
    row = ATLAS[name]
    assert not any(ATLAS[other].stale for other in row.on_policy)
    for place, instance in everywhere().items():
        fresh = Instance(instance.environment, instance.policy, instance.reference, instance.policy)
        scale = np.linalg.norm(gradient("reverse_kl", fresh))
        assert np.linalg.norm(gradient(name, fresh) - combine(row.on_policy, fresh)) < EXACT * scale, place
        if place[0] in ("sequence", "raggeds"):  # it is μ = π that makes them equal
            assert np.linalg.norm(gradient(name, instance) - combine(row.on_policy, instance)) > 1e-3 * scale, place


@pytest.mark.parametrize("ask", [gradient, gradient_again, value, value_again])
def test_an_unknown_name_is_a_usage_error(ask):
    with pytest.raises(UsageError, match="revers_kl"):
        ask("revers_kl", draw("bandit", 0))
