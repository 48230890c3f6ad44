"""Environments: what they enumerate, in which order, with which probabilities, and that samples follow these."""

import itertools

import numpy as np
import pytest
from moments_plain import by_hand
from scipy import stats

from kltest import errors
from kltest.environments import END, Instance, bandit, mdp, ngram, ragged, sequence, tabular
from kltest.environments import environment as module
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError

PROMPTS = np.array([0.2, 0.5, 0.3])
ENVIRONMENTS = {
    "bandit": bandit(4),
    "bandits": bandit(3, prompts=PROMPTS),
    "sequence": sequence(3, 3),
    "sequences": sequence(2, 4, prompts=PROMPTS),
    "never-prompted": sequence(2, 2, prompts=np.array([0.5, 0.0, 0.5])),
    "ragged": ragged(3, 4),
    "raggeds": ragged(3, 3, prompts=PROMPTS),
    "ends-on-first": sequence(3, 3, end_token=0),
    "mdp": mdp(5, 3, 3, seed=3),
    "mdp-wide": mdp(4, 2, 4, branches=4, seed=4),
    "ngram": ngram(3, 5, 2),
    "ngram-ragged": ngram(3, 5, 3, end_token=1),
    "sometimes-ends": tabular(
        np.array([[[1, END], [0, 1]], [[END, 0], [1, END]]]),
        np.array([[[0.5, 0.5], [0.25, 0.75]], [[1.0, 0.0], [0.4, 0.6]]]),
        np.ones((2, 2)),
        4,
        start=np.array([0.6, 0.4]),
    ),
}


def rows(paths):
    """Each rollout as it is written by hand, without its chance."""
    for row in range(len(paths)):
        live = paths.mask[row]
        yield (
            int(paths.prompt[row]),
            list(zip(paths.contexts[row][live].tolist(), paths.tokens[row][live].tolist(), strict=True)),
        )


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_enumeration_is_what_a_person_would_write_down(label):
    environment = ENVIRONMENTS[label]
    paths = environment.enumerate()
    expected = list(by_hand(environment))
    found = list(rows(paths))
    order = sorted(range(len(expected)), key=lambda row: expected[row][:2])
    assert sorted(found) == [expected[row][:2] for row in order]
    chances = np.array([chance for *_, chance in expected])[order]
    again = np.exp(paths.log_weight)[sorted(range(len(found)), key=lambda row: found[row])]
    np.testing.assert_allclose(again, chances, rtol=1e-14)
    assert environment.count() == len(paths) == len(expected)


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_rollouts_stand_in_prefix_order(label):
    """The rows that share their first t contexts and tokens stand together, for every t."""
    found = [(prompt, *itertools.chain.from_iterable(steps)) for prompt, steps in rows(ENVIRONMENTS[label].enumerate())]
    for length in range(1, 2 * ENVIRONMENTS[label].horizon + 2):
        heads = [head for head, _ in itertools.groupby(row[:length] for row in found)]
        assert len(heads) == len(set(heads))


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_padding_is_zero_and_masks_are_prefixes(label):
    paths = ENVIRONMENTS[label].enumerate()
    assert paths.mask[:, 0].all()
    assert not (paths.mask[:, 1:] & ~paths.mask[:, :-1]).any()
    assert not paths.contexts[~paths.mask].any()
    assert not paths.tokens[~paths.mask].any()


def test_counting_does_not_enumerate():
    assert ngram(10, 300, 2).count() == pytest.approx(1e300)
    assert ngram(10, 10_000, 2).count() == np.inf
    assert sequence(2, 16).count() == 2**16


@pytest.mark.parametrize(
    ("environment", "count"),
    [(ngram(8, 40, 2), "1.32923e\\+36"), (mdp(1000, 4, 100), "e\\+"), (ngram(10, 10_000, 2), "inf")],
)
def test_what_does_not_fit_is_refused_with_its_size(environment, count):
    with pytest.raises(InvalidEnvironmentError, match=f"{count}.* rollouts.*GiB.*dynamic programming"):
        environment.enumerate()


def test_the_limit_is_half_of_the_memory(monkeypatch):
    environment = sequence(4, 6)
    monkeypatch.setattr(module, "memory_limit", lambda: 1e5)
    with pytest.raises(InvalidEnvironmentError, match="4096 rollouts of up to 6 tokens"):
        environment.enumerate()
    monkeypatch.setattr(module, "memory_limit", lambda: 1e8)
    assert len(environment.enumerate()) == 4096


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_samples_follow_the_exact_probabilities(label):
    """Pearson's χ² of 20,000 rollouts: one seed of 100,000 would fail in any environment. The seed is fixed."""
    environment = ENVIRONMENTS[label]
    instance = Instance.draw(environment, 1)
    expected = instance.rollout_weights("stale")
    found = environment.sample(instance.sampler, 20_000, np.random.default_rng(12))
    assert _p_value(instance.paths, expected, found) > 1e-5 / len(ENVIRONMENTS)


@pytest.mark.parametrize("label", ["sequence", "ragged", "mdp"])
def test_a_wrong_sampler_is_noticed(label):
    environment = ENVIRONMENTS[label]
    instance = Instance.draw(environment, 1)
    found = environment.sample(instance.policy, 20_000, np.random.default_rng(12))
    assert _p_value(instance.paths, instance.rollout_weights("stale"), found) < 1e-6


def _p_value(paths, expected, found):
    number = {(prompt, tuple(steps)): row for row, (prompt, steps) in enumerate(rows(paths))}
    counts = np.bincount([number[prompt, tuple(steps)] for prompt, steps in rows(found)], minlength=len(number))
    expected = expected * len(found)
    # The χ² approximation wants at least 5 expected in a cell: the rarest rollouts share one.
    rare = expected < 5
    cells = [np.append(each[~rare], each[rare].sum()) if rare.any() else each for each in (counts, expected)]
    return stats.chisquare(*cells).pvalue


def test_sampling_is_seeded():
    environment, policy = ENVIRONMENTS["mdp"], Instance.draw(ENVIRONMENTS["mdp"], 0).policy
    one, again, other = (environment.sample(policy, 50, np.random.default_rng(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.tokens, again.tokens)
    np.testing.assert_array_equal(one.contexts, again.contexts)
    assert (one.tokens != other.tokens).any()


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_sampled_rollouts_know_their_probability(label):
    environment = ENVIRONMENTS[label]
    instance = Instance.draw(environment, 2)
    found = environment.sample(instance.policy, 200, np.random.default_rng(0))
    known = dict(
        zip(((p, tuple(s)) for p, s in rows(instance.paths)), instance.rollout_weights("current"), strict=True)
    )
    expected = [known[prompt, tuple(steps)] for prompt, steps in rows(found)]
    np.testing.assert_allclose(np.exp(found.log_probability(instance.policy)), expected, rtol=1e-12)


def test_prompts_are_environments_of_their_own():
    """P prompts at once are the P environments one by one, context after context."""
    together, alone = sequence(3, 2, prompts=PROMPTS), sequence(3, 2)
    paths, single = together.enumerate(), alone.enumerate()
    for prompt in range(len(PROMPTS)):
        part = paths.take(np.flatnonzero(paths.prompt == prompt))
        np.testing.assert_array_equal(part.tokens, single.tokens)
        np.testing.assert_array_equal(part.contexts, single.contexts + prompt * alone.n_contexts)
        np.testing.assert_allclose(np.exp(part.log_weight), PROMPTS[prompt], rtol=1e-15)


@pytest.mark.parametrize("end_token", [None, 2])
@pytest.mark.parametrize("order", [3, 4])
def test_an_ngram_that_remembers_everything_is_a_sequence(order, end_token):
    """For order ≥ length every prefix has its own context; numbering differs only where an end token prunes."""
    length = 3
    short, long = ngram(3, length, order, end_token=end_token), sequence(3, length, end_token=end_token)
    shared, separate = short.enumerate(), long.enumerate()
    np.testing.assert_array_equal(shared.tokens, separate.tokens)
    np.testing.assert_array_equal(shared.mask, separate.mask)
    pairs = set(zip(shared.contexts[shared.mask].tolist(), separate.contexts[separate.mask].tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) == long.n_contexts


def test_an_ngram_sees_its_last_tokens_only():
    label = ngram(3, 6, 3)
    paths = label.enumerate()
    for steps in (contexts for _, contexts in itertools.islice(rows(paths), 0, None, 37)):
        tokens = [token for _, token in steps]
        for step, (context, _) in enumerate(steps):
            history = tokens[max(0, step - 2) : step]
            offset = (3 ** len(history) - 1) // 2
            assert context == offset + int("".join(map(str, history)) or "0", 3)


def test_returns_sum_the_reward_of_live_tokens():
    reward = np.random.default_rng(0).standard_normal((7, 3))
    label = ragged(3, 3, reward=reward)
    paths = label.enumerate()
    expected = [sum(reward[context, token] for context, token in steps) for _, steps in rows(paths)]
    np.testing.assert_allclose(label.returns(paths), expected, rtol=1e-14)


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_transition_is_the_dynamics(label):
    environment = ENVIRONMENTS[label]
    dense = environment.transition.toarray().reshape(*environment.reward.shape, environment.n_contexts)
    for context, token in np.ndindex(environment.reward.shape):
        expected = np.zeros(environment.n_contexts)
        for after, chance in zip(
            environment.successors[context, token], environment.probabilities[context, token], strict=True
        ):
            if after != END:
                expected[after] += chance
        np.testing.assert_allclose(dense[context, token], expected, rtol=1e-15)


@pytest.mark.parametrize("label", ENVIRONMENTS)
def test_drawn_instances_are_mild_but_not_trivial(label):
    for seed in range(5):
        instance = Instance.draw(ENVIRONMENTS[label], seed)
        paths = instance.paths
        for other, bound in ((instance.reference, 2.0), (instance.sampler, 1.0)):
            apart = np.abs(paths.log_probability(instance.policy) - paths.log_probability(other)).max()
            assert 0.05 < apart < bound


def test_instances_depend_on_their_seed_alone():
    one, again, other = (Instance.draw(ENVIRONMENTS["mdp"], seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.reference, again.reference)
    assert (one.reference != other.reference).any()


BAD = {
    "no token": (lambda: bandit(0), "at least 1"),
    "no length": (lambda: sequence(3, 0), "at least 1"),
    "end token": (lambda: sequence(3, 3, end_token=3), "end token must lie in 0 … 2"),
    "order": (lambda: ngram(3, 3, 0), "order"),
    "prompts sum": (lambda: sequence(3, 2, prompts=np.array([0.5, 0.6])), "sum to 1"),
    "prompts NaN": (lambda: sequence(3, 2, prompts=np.array([np.nan, 1.0])), "sum to 1"),
    "prompts negative": (lambda: sequence(3, 2, prompts=np.array([1.5, -0.5])), "negative"),
    "reward shape": (lambda: sequence(3, 2, reward=np.zeros((2, 3))), r"shape \(4, 3\), not \(2, 3\)"),
    "reward NaN": (lambda: bandit(2, reward=np.array([[0, np.nan]])), "NaN"),
    "branches": (lambda: mdp(3, 2, branches=4), "1 to 3 branches"),
    "contexts": (lambda: sequence(10, 20), r"1.11111e\+19 contexts"),
    "length": (lambda: sequence(10, 2000), "inf contexts"),
    "ngram contexts": (lambda: ngram(50, 10_000, 9), "lower order"),
}


def process(successors=((1,), (0,)), probabilities=((1.0,), (1.0,)), reward=((0.0,), (0.0,)), horizon=2, start=(1, 0)):
    """Two states, one action; each argument can be wrong."""
    return tabular(
        np.array(successors).reshape(2, 1, -1),
        np.array(probabilities).reshape(2, 1, -1),
        np.array(reward),
        horizon,
        start=np.array(start),
    )


BAD |= {
    "horizon": (lambda: process(horizon=0), "horizon must be at least 1"),
    "start length": (lambda: process(start=(1, 0, 0)), "2 states"),
    "start sum": (lambda: process(start=(1, 1)), "sum to 1"),
    "unknown successor": (lambda: process(successors=((2,), (0,))), "context below 2"),
    "below the end": (lambda: process(successors=((-2,), (0,))), "context below 2"),
    "chances": (lambda: process(probabilities=((0.9,), (1.0,))), "sum to 1"),
    "chance NaN": (lambda: process(probabilities=((np.nan,), (1.0,))), "NaN"),
    "shapes": (lambda: process(probabilities=((0.5, 0.5), (0.5, 0.5))), "differ in shape"),
    "twice": (
        lambda: process(successors=((1, 1), (0, 1)), probabilities=((0.5, 0.5), (0.5, 0.5))),
        "same successor twice",
    ),
    "flat": (lambda: tabular(np.zeros((2, 2)), np.ones((2, 2)), np.zeros((2, 2)), 3, start=[0.5, 0.5]), "branches"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_environment_that_cannot_be_is_refused(what):
    make, message = BAD[what]
    with pytest.raises(InvalidEnvironmentError, match=message):
        make()


def test_a_process_that_is_right_passes():
    assert process().count() == 1
    # An unlikely repetition is no repetition.
    assert process(successors=((1, 1), (0, 0)), probabilities=((1.0, 0.0), (0.0, 1.0))).count() == 1


@pytest.mark.parametrize("which", ["policy", "reference", "sampler"])
def test_policies_of_the_wrong_shape_or_content_are_refused(which):
    good = {what: np.zeros((1, 3)) for what in ("policy", "reference", "sampler")}
    with pytest.raises(InvalidEnvironmentError, match=rf"{which}.*\(1, 4\)"):
        Instance.of(bandit(3), **{**good, which: np.zeros((1, 4))})
    with pytest.raises(InvalidEnvironmentError, match=rf"{which}.*NaN"):
        Instance.of(bandit(3), **{**good, which: np.array([[0, np.nan, 0]])})
    with pytest.raises(InvalidEnvironmentError, match=rf"{which}"):
        Instance.of(bandit(3), **{**good, which: np.zeros(3)})


def test_tables_are_normalised():
    logits = np.random.default_rng(0).standard_normal((4, 6)) * 30
    np.testing.assert_allclose(np.exp(table(logits)).sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(table(logits + 1000), table(logits), rtol=1e-12)


def test_the_former_name_of_the_error_is_read_with_a_warning():
    with pytest.warns(DeprecationWarning, match="InvalidEnvironmentError"):
        assert errors.WorldError is InvalidEnvironmentError
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        errors.nothing_of_the_kind  # noqa: B018
