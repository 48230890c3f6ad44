"""Truth at the edges of float64, against definitions written out in mpmath."""

from functools import cache

import mpmath
import numpy as np
import pytest
from weekly import first

from kltest.environments import Instance, bandit, mdp, ngram, ragged, sequence
from kltest.environments.policies import softmax_gradient, table
from kltest.errors import InvalidEnvironmentError
from kltest.truth import ATLAS, VALUES, gradient, value

# 50 digits are left after the 35 that a policy of certainty 1 − e^(−80) costs, and after the 300 of e^(−690).
DIGITS = {"forty": 50 + 35, "tiny": 50 + 600}
# A float64 log-probability of size x is known to x·1e-16, so a chance of e^(−80) is known to 1e-14 and one of e^(−690)
# to 1e-13; three tokens, their sums, and a margin of a few.
TOLERANCE = {"forty": 1e-12, "tiny": 1e-12}


def log_softmax(row):
    largest = max(row)
    total = mpmath.log(sum(mpmath.exp(x - largest) for x in row))
    return [x - largest - total for x in row]


class Definition:
    """Every named gradient as Σ_y p(y)·Σ_t weight_t·g_t, and every value, in mpmath, from logits."""

    def __init__(self, environment, policy, reference, sampler):
        self.environment, self.paths, self.means = environment, environment.enumerate(), {}
        self.policy, self.reference, self.sampler = (
            [log_softmax([mpmath.mpf(float(x)) for x in row]) for row in logits]
            for logits in (policy, reference, sampler)
        )
        self.kls = [
            mpmath.fsum(mpmath.exp(p) * (p - q) for p, q in zip(*rows, strict=True))
            for rows in zip(self.policy, self.reference, strict=True)
        ]
        self.rollouts = list(self.each())

    def each(self):
        """(chance of everything but the policy, [(context, token)]) for each rollout.

        Chances of the dynamics are normalised here: float64 ones sum to 1 within 1e-16 only, and a gradient may be
        smaller than that.
        """
        environment = self.environment
        for row in range(len(self.paths)):
            live = self.paths.mask[row]
            contexts, tokens = self.paths.contexts[row][live].tolist(), self.paths.tokens[row][live].tolist()
            chance = mpmath.mpf(float(environment.prompts[self.paths.prompt[row]])) / mpmath.fsum(
                map(float, environment.prompts)
            )
            for step, (context, token) in enumerate(zip(contexts, tokens, strict=True)):
                if step < environment.horizon - 1:
                    after = contexts[step + 1] if step + 1 < len(contexts) else -1
                    branches = [mpmath.mpf(float(x)) for x in environment.probabilities[context, token]]
                    taken = environment.successors[context, token].tolist().index(after)
                    chance *= branches[taken] / sum(branches)
            yield chance, list(zip(contexts, tokens, strict=True))

    def weights(self, name, steps):
        """The chance of a rollout (without dynamics) and the weight of each of its scores.

        Every token is charged with the whole rollout wherever the formula allows it: the formulas of the atlas are
        those of the same weights, on rollouts of the policy or of the sampler, with the ratio that the name states.
        """
        log_policy, log_sampler, log_reference = (
            [log_probs[c][v] for c, v in steps] for log_probs in (self.policy, self.sampler, self.reference)
        )
        u = [a - b for a, b in zip(log_policy, log_reference, strict=True)]
        own = [a - b for a, b in zip(log_policy, log_sampler, strict=True)]
        total, count, longest = sum(u), len(u), self.environment.horizon
        k3 = [1 - mpmath.exp(-x) for x in u]
        kl = [self.kls[c] for c, _ in steps]
        reward = sum(mpmath.mpf(float(self.environment.reward[c, v])) for c, v in steps)
        base, _, at = name.partition("@")
        weights = {
            "reverse_kl": lambda: [total] * count,
            "local_reverse_kl": lambda: u,
            "future_reverse_kl": lambda: [sum(u[t + 1 :]) for t in range(count)],
            "last_token_reverse_kl": lambda: [x * (t == count - 1) for t, x in enumerate(u)],
            "forward_kl": lambda: [1 - mpmath.exp(-total)] * count,
            "local_forward_kl": lambda: k3,
            "squared_log_ratio": lambda: [total + total * total / 2] * count,
            "squared_log_ratio_sum": lambda: [x + sum(y * y for y in u) / 2 for x in u],
            "local_squared_log_ratio": lambda: [x + x * x / 2 for x in u],
            "chi_square": lambda: [mpmath.exp(total) - 1] * count,
            "local_chi_square": lambda: [mpmath.exp(x) - 1 for x in u],
            "total_variation": lambda: [mpmath.sign(total) / 2] * count,
            "local_total_variation": lambda: [mpmath.sign(x) / 2 for x in u],
            "centred_reverse_kl": lambda: [total - self.mean(steps[0][0])] * count,
            "exact_future_reverse_kl": lambda: [sum(kl[t + 1 :]) for t in range(count)],
            "other_tokens_forward_kl": lambda: [sum(k3) - x for x in k3],
            "from_sampler_kl": lambda: [1 - mpmath.exp(-sum(own))] * count,
            "to_sampler_kl": lambda: [sum(own)] * count,
            "expected_reward": lambda: [reward] * count,
            "entropy": lambda: [-sum(log_policy)] * count,
            "local_entropy": lambda: [-x for x in log_policy],
            # On-policy a constant adds nothing: less that of the longest rollout, one length leaves exactly 0.
            "inverse_length": lambda: [mpmath.mpf(1) / count - (0 if at else mpmath.mpf(1) / longest)] * count,
            "zero": lambda: [mpmath.mpf(0)] * count,
        }[base]()
        factors = {"sampler": own, "mean_ratio": [sum(own) / count] * count}.get(at, [0] * count)
        chance = mpmath.exp(sum(log_sampler if at else log_policy))
        return chance, [mpmath.exp(f) * w for f, w in zip(factors, weights, strict=True)]

    def mean(self, first):
        """The sampler's mean log-ratio of rollouts that start in a context."""
        if first in self.means:
            return self.means[first]
        chance = total = mpmath.mpf(0)
        for dynamics, steps in self.rollouts:
            if steps[0][0] == first:
                own = dynamics * mpmath.exp(sum(self.sampler[c][v] for c, v in steps))
                chance += own
                total += own * sum(self.policy[c][v] - self.reference[c][v] for c, v in steps)
        self.means[first] = total / chance
        return self.means[first]

    def gradient(self, name):
        contexts, vocabulary = self.environment.reward.shape
        weighed = [[mpmath.mpf(0)] * vocabulary for _ in range(contexts)]
        for dynamics, steps in self.rollouts:
            chance, weights = self.weights(name, steps)
            for (context, token), weight in zip(steps, weights, strict=True):
                weighed[context][token] += dynamics * chance * weight
        # The score of a token is one at its own logit, less the chance of each.
        result = [
            [own - mpmath.exp(log) * mpmath.fsum(row) for own, log in zip(row, logs, strict=True)]
            for row, logs in zip(weighed, self.policy, strict=True)
        ]
        return np.array([[float(x) for x in row] for row in result])

    def kl(self):
        total = mpmath.mpf(0)
        for dynamics, steps in self.rollouts:
            u = sum(self.policy[c][v] - self.reference[c][v] for c, v in steps)
            total += dynamics * mpmath.exp(sum(self.policy[c][v] for c, v in steps)) * u
        return float(total)


def environments():
    generator = np.random.default_rng(7)
    return {
        "bandit": bandit(4, reward=generator.standard_normal((1, 4))),
        "sequence": sequence(2, 3, prompts=np.array([0.25, 0.75]), reward=generator.standard_normal((14, 2))),
        "ragged": ragged(3, 2, reward=generator.standard_normal((3, 3))),
        "mdp": mdp(3, 2, 3, seed=1),
        "ngram": ngram(3, 3, 2, reward=generator.standard_normal((4, 3))),
    }


def extreme(kind, shape, generator):
    """Logits of ±40 beside ordinary ones, or of −690 beside ordinary ones."""
    ordinary = generator.standard_normal(shape)
    if kind == "forty":
        return np.where(generator.random(shape) < 0.6, generator.choice([-40.0, 40.0], size=shape), 0) + ordinary
    logits = np.where(generator.random(shape) < 0.4, -690.0, 0) + ordinary
    logits[:, 0] = ordinary[:, 0]
    return logits


OF_WHOLE_RATIOS = (
    "chi_square",
    "forward_kl@rollouts",
    "local_forward_kl@mean_ratio",
    "other_tokens_forward_kl@sampler",
    "other_tokens_forward_kl@mean_ratio",
)


@cache
def case(label, kind, changed):
    """The instance, and its definition; `changed`: of the policy or the reference that has one rare token a rollout."""
    environment = environments()[label]
    shape = environment.reward.shape
    generator = np.random.default_rng(3)
    logits = [extreme(kind, shape, generator) for _ in range(3)]
    if changed is not None:
        logits[changed][1:] = generator.standard_normal((shape[0] - 1, shape[1]))
    with mpmath.workdps(DIGITS[kind]):
        return Instance.of(environment, *logits), Definition(environment, *logits)


@pytest.mark.parametrize("kind", ["forty", "tiny"])
@pytest.mark.parametrize("label", first(1, ["ragged", "sequence", "mdp", "ngram"]))
def test_every_gradient_is_exact_with_extreme_policies(label, kind):
    for name in ATLAS:
        # e^±U of two tokens of 1e-300 is not a float64 (see the next test): one such token a rollout.
        two = kind == "tiny" and name.startswith(OF_WHOLE_RATIOS)
        instance, definition = case(label, kind, int("forward" not in name) if two else None)
        with mpmath.workdps(DIGITS[kind]):
            expected = definition.gradient(name)
        found = gradient(name, instance)
        # Relative to the largest entry, however small that is: 1e-17 where the policies are all but deterministic.
        assert np.abs(found - expected).max() <= TOLERANCE[kind] * np.abs(expected).max(), name


def test_what_float64_cannot_hold_is_refused_not_rounded():
    environment = sequence(2, 2)
    reference = np.zeros((3, 2))
    reference[:, 1] = -690.0
    instance = Instance.of(environment, np.zeros((3, 2)), reference)
    with pytest.raises(InvalidEnvironmentError, match=r"chi_square exceeds the range of float64"):
        gradient("chi_square", instance)
    with pytest.raises(InvalidEnvironmentError, match=r"chi_square exceeds the range of float64"):
        value("chi_square", instance)
    assert np.isfinite(gradient("local_chi_square", instance)).all()


@pytest.mark.parametrize("kind", ["forty", "tiny"])
@pytest.mark.parametrize("label", ["sequence", "ragged", "mdp", "ngram"])
def test_kl_is_exact_with_extreme_policies(label, kind):
    environment = environments()[label]
    generator = np.random.default_rng(4)
    logits = [extreme(kind, environment.reward.shape, generator) for _ in range(3)]
    with mpmath.workdps(DIGITS[kind]):
        expected = Definition(environment, *logits).kl()
    assert value("kl", Instance.of(environment, *logits)) == pytest.approx(expected, rel=TOLERANCE[kind], abs=0)


def test_kl_of_nearly_equal_and_nearly_certain_policies():
    # KL ≈ 1e-34, a difference of two numbers that agree to more digits than a float64 has.
    policy, reference = np.array([[40.0, -40.0]]), np.array([[39.0, -40.0]])
    with mpmath.workdps(100):
        p, q = (log_softmax([mpmath.mpf(float(x)) for x in row[0]]) for row in (policy, reference))
        expected = float(sum(mpmath.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
    assert 0 < expected < 1e-34
    found = value("kl", Instance.of(bandit(2), policy, reference))
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    # The textbook sum, on textbook log-probs, is wrong in its first digit: the test can fail.
    naive = np.array([-np.logaddexp(0, -80), -80.0]), np.array([-np.logaddexp(0, -79), -79.0])
    rounded = [np.round(row, 17) for row in naive]
    assert not np.isclose((np.exp(rounded[0]) * (rounded[0] - rounded[1])).sum(), expected, rtol=0.5, atol=0)


MUST_VANISH = [
    name
    for name in ATLAS
    if name.split("@")[0]
    not in ("expected_reward", "entropy", "local_entropy", "inverse_length", "from_sampler_kl", "to_sampler_kl")
]


@pytest.mark.parametrize("label", ["bandit", "sequence", "ragged", "mdp", "ngram"])
def test_equal_policies_leave_exactly_nothing(label):
    environment = environments()[label]
    generator = np.random.default_rng(0)
    policy, sampler = (3 * generator.standard_normal(environment.reward.shape) for _ in range(2))
    instance = Instance.of(environment, policy, policy, sampler)
    for name in MUST_VANISH:
        assert not gradient(name, instance).any(), name
        assert name not in VALUES or value(name, instance) == 0.0, name


@pytest.mark.parametrize("name", ["from_sampler_kl", "to_sampler_kl"])
def test_an_equal_sampler_leaves_exactly_nothing(name):
    environment = environments()["ragged"]
    policy, reference = np.random.default_rng(0).standard_normal((2, *environment.reward.shape))
    assert not gradient(name, Instance.of(environment, policy, reference, policy)).any()
    assert gradient(name, Instance.of(environment, policy, policy, reference)).any()


def test_one_token_leaves_nothing_to_choose():
    for environment in (bandit(1), ragged(1, 3), sequence(1, 4), ngram(1, 5, 2)):
        logits = np.random.default_rng(1).standard_normal((3, *environment.reward.shape)) * 40
        for name in ATLAS:
            assert not gradient(name, Instance.of(environment, *logits)).any(), (name, environment.name)


def test_log_probabilities_keep_their_digits_near_certainty():
    with mpmath.workdps(100):
        expected = [float(x) for x in log_softmax([mpmath.mpf(40), mpmath.mpf(-40), mpmath.mpf(39.5)])]
        near = float(log_softmax([mpmath.mpf(40), mpmath.mpf(-40)])[0])
    # Units in the last place of numbers up to 80.
    np.testing.assert_allclose(table(np.array([[40.0, -40.0, 39.5]]))[0], expected, rtol=3e-15)
    assert table(np.array([[40.0, -40.0]]))[0, 0] == pytest.approx(near, rel=1e-14, abs=0)
    assert near < 0


def test_chain_rule_of_softmax_against_its_jacobian():
    generator = np.random.default_rng(2)
    weights, log_probs = generator.standard_normal((3, 5)), table(40 * generator.standard_normal((3, 5)))
    p = np.exp(log_probs)
    jacobian = np.eye(5)[None] - p[:, None, :]
    np.testing.assert_allclose(
        softmax_gradient(weights, log_probs), np.einsum("cv,cvk->ck", weights, jacobian), rtol=0, atol=1e-14
    )
