"""The noise of an estimator against the best known and the tail of its weights, by hand and by other routes."""

import numpy as np
import pytest
from cases.parts import live
from weekly import spread

from kltest.checks.variance import kl802_inefficient as variance
from kltest.environments import Instance, ragged, sequence
from kltest.grading.grader import grade
from kltest.identify.instances import instances
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.truth import gradient


def result(report, code):
    return next(check for check in report.checks if check.code == code)


TAILS = [
    ("k1-reward", {}, ""),
    ("k2-loss", {"expect": "local_reverse_kl"}, ""),
    ("k2-loss-sequence", {}, ""),
    ("full-loss", {"expect": "local_reverse_kl"}, ""),
    ("rao-blackwell", {}, ""),
    ("k3-clamped", {}, ""),
    ("abs-loss", {}, ""),
    ("k3-loss", {}, "log π/ref → −∞"),
    ("k3-loss-sequence", {}, "log π/ref → −∞"),
    ("k3-reward", {}, "log π/ref → −∞"),
    ("k3-inverted", {}, "log π/ref → ∞"),
    ("k2-ratio", {}, "log π/μ → ∞"),
    ("k1-reward-sequence-ratio", {}, "log π/μ → ∞"),
    ("k2-prefix-ratio", {}, "log π/μ → ∞"),
]


@pytest.mark.parametrize(("name", "options", "direction"), spread(5, TAILS), ids=[name for name, _, _ in TAILS])
def test_exponential_weights_are_named_by_their_direction_and_powers_are_no_tail(name, options, direction):
    found = result(grade(name, select="KL801", environment="sequence", **options), "KL801")
    assert found.message.count("the gradient of a rollout grows") == bool(direction)
    assert f"With {direction} the gradient" in found.message or not direction


def test_a_geometric_mean_of_ratios_grows_too_slowly_to_matter():
    """With three tokens it is e^(log ρ/3), and e^(2/3·log ρ) times the chance e^(−log ρ) falls."""

    def geometric(logp, ref_logp, old_logp, mask):
        log_rho = live(logp - old_logp, mask).sum(-1) / mask.sum(-1)
        return log_rho.exp().detach() * live(logp - ref_logp, mask).sum(-1).pow(2) / 2

    assert result(grade(geometric, select="KL801", environment="sequence"), "KL801").status == "pass"


def test_growth_and_part_of_a_weight_that_is_known():
    """The weight ref/π alone: e^x/(what the softmax renormalises), and its square times the chance of the token."""

    def weight(logp, ref_logp):
        return -(ref_logp - logp).exp().detach() * logp

    instance = instances("bandit", 0)[0]
    found = result(grade(weight, environment="bandit", expect="local_forward_kl", select="KL801"), "KL801")

    def size(log_probs):
        """‖w·(e_0 − π)‖ of the first action."""
        return np.exp(instance.reference[0][0] - log_probs[0]) * np.linalg.norm(np.eye(4)[0] - np.exp(log_probs))

    for distance in (5.0, 10.0, 20.0):
        moved = instance.policy[0] - distance * np.eye(4)[0]
        moved -= np.log(np.exp(moved).sum())
        growth = size(moved) / size(instance.policy[0])
        for number in (growth, growth**2 * np.exp(moved[0] - instance.policy[0][0])):
            assert f"{number:.2g}" in found.message


TARGETS = ("reverse_kl", "local_reverse_kl", "forward_kl", "local_forward_kl")


def drawn():
    """Environments beyond those that are graded: other sizes, ragged, farther apart."""
    for seed in range(3):
        yield Instance.draw(sequence(2, 4), seed, distance=4.0, staleness=2.0)
        yield Instance.draw(ragged(4, 3), seed, distance=3.0)


@pytest.mark.parametrize("target", spread(4, [*TARGETS, "local_reverse_kl@sampler", "local_forward_kl@sampler"]))
@pytest.mark.parametrize("sampler", ["current", "stale"])
def test_each_is_unbiased(target, sampler):
    if "@" in target and sampler == "current":
        pytest.skip("prefixes of the sampler are not drawn on-policy")
    for instance in drawn():
        weights, truth = instance.rollout_weights(sampler), gradient(target, instance)
        known = variance.estimators(target, instance, sampler)
        assert known
        for each in known.values():
            # A few hundred terms of size one.
            assert np.einsum("n,ncv->cv", weights, each) == pytest.approx(truth, abs=1e-12)


def test_on_policy_the_best_baseline_of_the_return_is_the_known_formula():
    instance = Instance.draw(sequence(3, 2), 5)
    weights = instance.rollout_weights("current")
    u = np.where(instance.paths.mask, instance.paths.chosen(instance.policy - instance.reference), 0.0).sum(axis=1)
    score = variance._score(instance, "current")
    square = (score**2).sum(axis=(1, 2))
    baseline = (weights @ (square * u)) / (weights @ square)
    by_formula = variance._variance((u - baseline)[:, None, None] * score, weights, np.zeros(score.shape))
    each = variance.estimators("reverse_kl", instance, "current")["return"]
    assert variance._variance(each, weights, score) == pytest.approx(by_formula)


def test_the_best_of_all_counts_since_rao_blackwell_may_be_the_noisier_one():
    """A first token that is rare leads to another rare one: its exact KL is large, while a draw is nearly always 0."""
    policy = np.log([[0.01, 0.99], [0.01, 0.99], [0.5, 0.5]])
    reference = np.log([[0.99, 0.01], [0.99, 0.01], [0.5, 0.5]])
    instance = Instance.of(sequence(2, 2), policy, reference)
    known = variance.variances({"reverse_kl": 1.0}, instance, "current")
    assert set(known) == set(variance.WORDS)
    assert 10 * known["to-go"] < known["rao-blackwell"]
    # The registered estimators, enumerated by themselves, have the same noise before any baseline.
    plain = variance.estimators("reverse_kl", instance, "current")
    for name, registered in (("rao-blackwell", "rao-blackwell"), ("to-go", "k1-reward-to-go"), ("return", "k1-reward")):
        own = exact(resolve(registered, Call()), instance).variance
        each, weights = plain[name], instance.rollout_weights("current")
        assert variance._variance(each, weights, np.zeros(each.shape)) == pytest.approx(own, rel=1e-10)
    doubled = variance.variances({"reverse_kl": 2.0}, instance, "current")
    assert doubled == pytest.approx({name: 4 * number for name, number in known.items()})


def test_targets_of_which_no_estimator_is_known_are_skipped():
    found = result(grade("abs-loss", expect="2*local_total_variation", environment="sequence", select="KL802"), "KL802")
    assert (found.status, found.message) == (
        "skip",
        "no estimator of local_total_variation is known to compare it with",
    )
    refuted = result(grade("k3-loss", select="KL802"), "KL802")
    assert refuted.status == "skip"


def test_the_ratio_of_a_graded_row_is_the_worst_over_its_instances():
    report = grade("k1-reward", environment="sequence", select="KL802")
    ratios = []
    for instance in instances("sequence", 0):
        own, best = (exact(resolve(name, Call()), instance).variance for name in ("k1-reward", "rao-blackwell"))
        weights, score = instance.rollout_weights("current"), variance._score(instance, "current")
        each = variance.estimators("reverse_kl", instance, "current")["rao-blackwell"]
        assert variance._variance(each, weights, np.zeros(each.shape)) == pytest.approx(best, rel=1e-10)
        ratios.append(own / variance._variance(each, weights, score))
    assert f"sequence (current): {max(ratios):.3g} rollouts" in result(report, "KL802").message
