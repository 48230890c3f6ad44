"""Sampled grading: what is subtracted has mean zero, verdicts agree with exact ones, and doubt is said to be doubt."""

import json
import math
import re
from itertools import product

import jsonschema
import numpy as np
import pytest
import torch
import weekly as cut
from cases.parts import k2 as squared
from cases.parts import total
from cases.right_sceptic import squared_sum_of_the_batch
from cases.wrong_sceptic import square_of_the_mean
from doors import SCHEMA, call, graded

import kltest
from kltest.environments import Instance, ngram, sequence
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.estimators import registry
from kltest.identify.case import Case
from kltest.identify.instances import instances
from kltest.identify.sampling import Sampling, identify_sampled, sampled_row
from kltest.loss.outcome import Call
from kltest.loss.resolve import bind, resolve
from kltest.moments import NonDeterministicError, dynamic, exact, exact_batches
from kltest.samples import drawing
from kltest.samples.blocks import Interval, Sample
from kltest.samples.bounded import EmpiricalBernstein
from kltest.samples.controls import COSTS, KNOWN, Controls
from kltest.samples.drawing import Drawing, Draws
from kltest.samples.fits import distance
from kltest.samples.sampled import RANK, Sampled, sampled
from kltest.truth import combine, gradient

ENVIRONMENTS = ("bandit", "sequence", "ragged")
GROUPED = ("group-mean", "group-std", "leave-one-out", "tied-groups-masked")


def first(environment):
    return instances(environment, 0)[0]


def compared(loss, instance, sampler="current", *, margin=0.05, expect="reverse_kl", **options):
    """The sampled gradient, the interval of its relative bias, and the verdict."""
    found = sampled(loss, instance, sampler, target=gradient(expect, instance), margin=margin, **options)
    low, high = found.distance.low, found.distance.high
    return found, (low, high), "confirmed" if high <= margin else "refuted" if low > margin else "open"


def off(found, truth, error_rate=1e-6):
    """Whether a gradient is surely another than the one that was sampled."""
    vectors = np.insert(found.sample.vectors[:, :4], 4, truth.ravel(), axis=1)
    rows = np.eye(5)
    return distance(Sample(vectors), rows[1] - rows[4], rows[3], rows[3:4], (), error_rate, found.unseen).low > 0


# What is subtracted


@pytest.mark.parametrize(("environment", "sampler"), list(product((*ENVIRONMENTS, "mdp"), ("current", "stale"))))
def test_what_is_subtracted_has_mean_zero(environment, sampler):
    instance = first(environment)
    controls = Controls(instance, sampler)
    mean = np.tensordot(instance.rollout_weights(sampler), controls.samples(instance.paths), axes=1)
    assert len(controls) == sum(sampler == "stale" or current is not None for _, current, _ in KNOWN.values())
    # Some hundred terms of order one, in float64.
    np.testing.assert_allclose(mean, 0, atol=1e-13)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_what_is_subtracted_in_batches_has_mean_zero(environment):
    """Over every ordered pair of rollouts; the baseline's product of means is not linear in the rows."""
    instance = first(environment)
    weights = instance.rollout_weights("current")
    pairs = np.array(list(product(range(len(weights)), repeat=2)))
    controls = Controls(instance, "current", 2)
    known = controls.samples(instance.paths.take(pairs.ravel()))
    assert known.shape[1] == len(controls) == sum(current is not None for _, current, _ in KNOWN.values()) + len(COSTS)
    np.testing.assert_allclose(np.tensordot(weights[pairs].prod(axis=1), known, axes=1), 0, atol=1e-13)


def test_shares_are_those_of_least_squares_whatever_the_units():
    """Near its reference a policy's known estimators are tiny, and one may be far smaller than another."""
    instance, generator = first("ragged"), np.random.default_rng(0)
    controls, wanted = Controls(instance, "current"), np.array([0.5, -2.0])
    known = controls.samples(instance.environment.sample(instance.policy, 320, generator))
    raw = np.einsum("k,nkd->nd", wanted, known[:, :2]) + 0.7
    units = 10.0 ** -np.linspace(12, 6, len(controls))[:, None]
    vectors = np.concatenate([raw[:, None], raw[:, None], known * units], axis=1).reshape(64, 5, -1, raw.shape[1])
    blocks = Sample(vectors.mean(axis=1), RANK)
    np.testing.assert_allclose(blocks.controlled(range(2, 2 + len(units))).vectors[:, 1], 0.7, atol=1e-8)


# Against the exact route


# Rollouts that end include those that do not, and a stale sampler ratios of every kind.
PLACES = [("bandit", "current"), ("ragged", "stale"), *product(("sequence",), ("current", "stale"))]
PLACES += [("ragged", "current"), ("bandit", "stale")]


@pytest.mark.scheduled
@pytest.mark.parametrize(("environment", "sampler"), PLACES)
def test_the_whole_registry_agrees_with_exact_gradients(environment, sampler):
    """The interval holds the exact bias, a verdict is on its side of the margin, and most are given."""
    instance, margin, decided = first(environment), 0.1, []
    norm = np.linalg.norm(gradient("reverse_kl", instance))
    for name in registry():
        if name in GROUPED:
            continue
        loss = resolve(name, Call())
        # What is said of their reduction saves calls of single rollouts, and is only believed where it holds.
        truth = exact(loss, instance, sampler, known="mean").gradient
        bias = np.linalg.norm(truth - gradient("reverse_kl", instance)) / norm
        _, (low, high), verdict = compared(loss, instance, sampler, margin=margin, error_rate=1e-4)
        # A bias of zero is met to rounding where nothing but that is left.
        assert low - 1e-9 <= bias <= high + 1e-9, (name, low, bias, high)
        assert verdict != ("refuted" if bias <= margin else "confirmed"), (name, bias, verdict)
        decided.append(verdict != "open")
    assert np.mean(decided) > 0.9


@pytest.mark.parametrize("name", cut.first(1, GROUPED))
def test_groups_agree_with_exact_groups(name):
    instance = instances("ragged", 0, 3)[0]
    loss = resolve(name, Call())
    truth = exact_batches(loss, instance, "current", 3, grouped=True)
    target = gradient("reverse_kl", instance)
    norm = np.linalg.norm(target)
    found, (low, high), _ = compared(loss, instance, margin=0.1, error_rate=1e-4, size=3, grouped=True, samples=4000)
    assert found.batch == 3
    assert found.reduction == "coupled"
    assert low - 1e-9 <= np.linalg.norm(truth.gradient - target) / norm <= high + 1e-9
    assert not off(found, truth.gradient)


@pytest.mark.parametrize("name", cut.first(1, ["k3-loss", "k1-reward", "k2-loss", "abs-loss"]))
def test_verdicts_are_those_of_exact_grading(name):
    """Confirmed and refuted stay what they are; a bias below the margin may pass within it, and only then."""
    options = {"sampler": "both", "environment": ("bandit", "ragged"), "select": "KL101"}
    truth = kltest.grade(name, **options)
    found = kltest.grade(name, method="sampled", error_rate=1e-4, **options)
    for true, row in zip(truth.gradients, found.gradients, strict=True):
        assert row.method == "sampled"
        assert row.agrees is (true.agrees or true.relative_bias <= row.margin)
        assert row.interval[0] <= true.relative_bias + 1e-9
        assert true.relative_bias <= row.interval[1]
        assert row.identified in (None, true.identified) or row.identified == pytest.approx(true.identified, rel=0.1)
    assert found.verdict == truth.verdict


@pytest.mark.scheduled
def test_controls_save_samples_and_change_nothing_else():
    instance, loss = first("ragged"), bind(squared)
    quick, interval, verdict = compared(loss, instance)
    plain, wide, slowly = compared(loss, instance, controls=False)
    assert verdict == slowly == "confirmed"
    assert 4 * quick.samples < plain.samples
    assert interval[0] == wide[0] == 0


# What cannot be enumerated


def test_an_environment_with_more_rollouts_than_atoms():
    """4¹⁰⁰ rollouts; the truth is dynamic programming's, and what is left out of the local gradient is 4.5% of it."""
    instance = Instance.draw(ngram(4, 100, 2), 1, distance=40.0)
    with pytest.raises(InvalidEnvironmentError):
        _ = instance.paths
    loss = resolve("k2-loss", Call())
    found, _, verdict = compared(loss, instance, expect="local_reverse_kl", samples=20_000)
    assert verdict == "confirmed"
    assert not off(found, dynamic(loss, instance, "current").gradient)
    _, (low, high), verdict = compared(loss, instance, margin=0.02)
    whole = gradient("reverse_kl", instance)
    bias = np.linalg.norm(dynamic(loss, instance, "current").gradient - whole) / np.linalg.norm(whole)
    assert verdict == "refuted"
    assert low <= bias <= high


def test_an_environment_with_too_many_logits_is_refused():
    with pytest.raises(InvalidEnvironmentError, match="logits"):
        compared(bind(squared), Instance.draw(sequence(8, 5), 0))


@pytest.mark.scheduled
def test_batches_that_are_too_many_are_sampled_by_themselves():
    report = kltest.grade("token-mean", batch_size=8, environment="ragged", select="KL2")
    alone, batched = report.gradients if len(report.gradients) == 2 else (None, report.gradients[0])
    assert alone is None or (alone.method, alone.samples, alone.interval) == ("exact", None, None)
    assert (batched.method, batched.batch, batched.agrees, batched.asymptotic) == ("sampled", 8, False, True)
    assert "batches of 8 rollouts" in batched.note
    assert "off by more than 5% at error rate 1e-06 (asymptotic)" in batched.note
    jsonschema.validate(report.to_dict(), SCHEMA)


def test_a_group_is_of_one_prompt():
    instance = Instance.draw(sequence(3, 2, prompts=np.array([0.3, 0.7])), 0)
    drawing = Drawing(bind(squared), instance, "current", 5, True, 0, np.random.default_rng(0))
    groups = drawing.paths(2000).prompt.reshape(2000, 5)
    assert (groups == groups[:, :1]).all()
    # Three standard deviations of a binomial share.
    assert abs(groups[:, 0].mean() - 0.7) < 3 * np.sqrt(0.21 / 2000)


@pytest.mark.parametrize("size", [1, 4])
def test_advantages_are_centred_in_a_batch_of_several_rollouts(size):
    """Alone a rollout would lose all of its reward."""
    drawing = Drawing(bind(squared), first("bandit"), "current", size, False, 0, np.random.default_rng(0))
    advantage = drawing.rollout(drawing.paths(1)).peek("advantage")
    assert (abs(float(advantage.sum())) < 1e-12) == (size > 1)


def dropout(logp, ref_logp, mask):
    kept = torch.bernoulli(torch.full_like(logp[:, 0], 0.5))
    return (2 * kept * squared(logp, ref_logp, mask)).mean()


def dropout_sum(logp, ref_logp, mask):
    return len(logp) * dropout(logp, ref_logp, mask)


def wrong_dropout(logp, ref_logp, mask):
    return dropout(logp, ref_logp, mask) / 2


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("loss", "reduction", "verdict"),
    cut.first(
        1, [(dropout, "mean", "confirmed"), (wrong_dropout, "mean", "refuted"), (dropout_sum, "sum", "confirmed")]
    ),
)
def test_a_losss_own_randomness_is_averaged_over(loss, reduction, verdict):
    instance = first("bandit")
    with pytest.raises(NonDeterministicError):
        compared(bind(loss), instance)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    found, _, said = compared(bind(loss), instance, noisy=True, size=128, margin=0.1, error_rate=1e-4)
    once, again = (compared(bind(loss), instance, noisy=True, size=128, samples=400)[0] for _ in range(2))
    assert (found.reduction, said) == (reduction, verdict)
    np.testing.assert_array_equal(once.gradient, again.gradient)
    assert torch.equal(before[0], torch.get_rng_state())
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def sum_with_a_baseline(logp, ref_logp, mask):
    cost = total(logp - ref_logp, mask).detach()
    others = (cost.sum() - cost) / max(len(cost) - 1, 1)
    return ((cost - others) * logp.where(mask != 0, 0.0).sum(-1)).sum()


@pytest.mark.scheduled
@pytest.mark.parametrize("loss", [square_of_the_mean, sum_with_a_baseline, squared_sum_of_the_batch])
def test_sums_are_told_from_means_in_expectation_as_the_exact_route_does(loss):
    instance = first("bandit")
    whole = exact_batches(bind(loss), instance, size=2)
    wanted = whole.gradient / (2 if whole.added_up else 1)
    assert whole.added_up == (loss is sum_with_a_baseline)
    found, *_ = compared(bind(loss), instance, size=2, error_rate=1e-3, samples=1500)
    assert not off(found, wanted, 1e-3)
    assert off(found, wanted / 2, 1e-3)
    assert off(found, wanted * 2, 1e-3)


def mean_with_a_baseline(logp, ref_logp, mask):
    return sum_with_a_baseline(logp, ref_logp, mask) / len(logp)


@pytest.mark.parametrize(("loss", "factor"), [(sum_with_a_baseline, 1 / 2), (mean_with_a_baseline, 1.0)])
def test_a_sum_over_the_rows_of_a_pair_is_halved_and_a_mean_is_not(loss, factor):
    pairs = Drawing(bind(loss), first("bandit"), "current", 2, False, 0, np.random.default_rng(0))
    assert Draws(pairs, noisy=False).factor == factor


def over_the_root_of_the_rows(logp, ref_logp, mask):
    return sum_with_a_baseline(logp, ref_logp, mask) / math.sqrt(len(logp))


def test_what_grows_like_the_root_of_the_rows_is_neither_a_sum_nor_a_mean(monkeypatch):
    monkeypatch.setattr(drawing, "MOST_COMPARED", 512)
    pairs = Drawing(bind(over_the_root_of_the_rows), first("bandit"), "current", 2, False, 0, np.random.default_rng(0))
    draws = Draws(pairs, noisy=False, added_up=False)
    with pytest.raises(InvalidEnvironmentError, match="do not tell whether"):
        draws._grows()


def test_what_does_not_tell_a_sum_from_a_mean_says_how_much_was_drawn(monkeypatch):
    monkeypatch.setattr(drawing, "MOST_COMPARED", 128)
    monkeypatch.setattr(drawing, "SURE", np.inf)
    pairs = Drawing(bind(sum_with_a_baseline), first("bandit"), "current", 2, False, 0, np.random.default_rng(0))
    with pytest.raises(InvalidEnvironmentError, match=r"128 batches of 2 rollouts .*, and as many of 4, do not tell"):
        Draws(pairs, noisy=False)


def noisy_square(logp, ref_logp, mask):
    """Of 512 rows the square of the sum has cross terms √512 times the mean."""
    return (total(logp - ref_logp, mask).sum() + 0.1 * torch.randn(())).square() / (2 * len(logp))


@pytest.mark.scheduled
def test_where_samples_do_not_tell_a_sum_from_a_mean_nothing_is_said(monkeypatch):
    monkeypatch.setattr(drawing, "MOST_COMPARED", 256)
    report = kltest.grade(noisy_square, environment="bandit", select="KL106")
    (row,) = report.gradients
    assert (report.verdict, row.agrees) == ("inconclusive", None)
    assert "do not tell whether noisy_square adds the gradients of its rows up or averages them" in row.note


def test_a_random_loss_is_sampled_by_itself_with_a_warning():
    report = kltest.grade(dropout, environment="bandit", margin=0.1, error_rate=1e-3, select="KL507")
    (row,) = report.gradients
    assert (row.method, row.agrees, row.batch) == ("sampled", True, 1)
    assert [(check.code, check.level) for check in report.failed] == [("KL507", "warning")]
    assert "judged by sampling" in report.failed[0].message
    assert report.verdict == "confirmed"


def coupled_in_large_batches(logp, ref_logp, mask):
    """Treats rows apart in batches that fit into a test, and not in large ones."""
    cost = squared(logp, ref_logp, mask)
    return cost.mean() if len(cost) < 100 else cost.mean() * (1 + cost.detach().mean())


def test_rows_that_touch_in_large_batches_are_called_one_by_one():
    found, _, verdict = compared(bind(coupled_in_large_batches), first("bandit"), samples=3000, margin=0.2)
    assert found.reduction == "coupled"
    assert "the gradient of a row is not a fixed share of what it gives alone" in found.coupling
    assert verdict == "confirmed"


# What is said


def test_few_samples_say_nothing():
    report = kltest.grade(squared, method="sampled", samples=50, environment="bandit", select="KL101")
    (row,) = report.gradients
    assert report.verdict == "inconclusive"
    assert (row.agrees, row.identified, row.samples) == (None, None, 50)
    assert "the relative bias is unknown" in row.note
    assert row.residual == 1.0, "nothing is fitted, so that all of it is left"
    assert "unbiased" not in report.to_json()
    assert json.loads(report.to_json())["gradients"][0]["interval"] == [0.0, None]
    jsonschema.validate(report.to_dict(), SCHEMA)


@pytest.mark.scheduled
def test_the_error_rate_is_shared_among_rows_and_instances(monkeypatch):
    rates = []

    def watched(*arguments, **options):
        rates.append(options["error_rate"])
        return sampled(*arguments, **options)

    monkeypatch.setattr("kltest.identify.sampling.sampled", watched)
    options = {"environment": "bandit,ragged", "sampler": "both", "select": "KL101"}
    report = kltest.grade("k1-reward-sequence-ratio", method="sampled", error_rate=0.01, **options)
    assert len(report.gradients) == 2 * 2
    assert len(rates) == 2 * 2 * 4
    np.testing.assert_allclose(sum(rates), 0.01)
    assert {row.error_rate for row in report.gradients} == {0.01}


def test_a_known_bound_needs_no_limit_theorem():
    options = {"method": "sampled", "environment": "bandit", "margin": 0.2, "error_rate": 1e-3, "select": "KL101"}
    longest = max(
        np.linalg.norm(Controls(i, "current").samples(i.paths)[:, 0], axis=1).max() * 2 for i in instances("bandit", 0)
    )
    report = kltest.grade(squared, bound=float(2 * longest), **options)
    (row,) = report.gradients
    assert (report.verdict, row.asymptotic) == ("confirmed", False)
    assert "at any number of samples" in row.note
    with pytest.raises(UsageError, match=r"beyond the bound of 0\.01 that was stated"):
        kltest.grade(squared, bound=0.01, **options)


def of_noise(name, scale, noise):
    """Samples of a multiple of a named gradient, with Gaussian noise of this share of ‖∇KL‖."""
    generator, found = np.random.default_rng(0), []
    for instance in instances("sequence", 0):
        wanted, unit = (combine({one: 1.0}, instance).ravel() for one in (name, "reverse_kl"))
        spread = noise * np.linalg.norm(unit) / np.sqrt(len(unit))
        drawn = scale * wanted + 8 * spread * generator.standard_normal((64, len(unit)))
        vectors = np.stack([drawn, drawn, *np.broadcast_to([[unit], [unit]], (2, *drawn.shape))], axis=1)
        rest = {"second_moment": 0.0, "variance": 0.0, "asymptotic": True, "looks": 1, "unseen": 0.0}
        common = {"distance": Interval(0, 0, 0), "samples": 64, "reduction": "mean", "dtype": "float64"}
        gradient = wanted.reshape(instance.policy.shape)
        found.append(Sampled(gradient=gradient, sample=Sample(vectors), **common, **rest))
    return found


CANDIDATES = {
    name: [combine({name: 1.0}, instance) for instance in instances("sequence", 0)]
    for name in ("reverse_kl", "local_reverse_kl", "forward_kl")
}


@pytest.mark.parametrize(
    ("name", "scale", "noise", "combination"),
    [
        ("forward_kl", 1.0, 1e-3, {"forward_kl": 1.0}),
        ("reverse_kl", 0.75, 1e-3, {"reverse_kl": 0.75}),
        ("reverse_kl", -1.0, 1e-3, {"reverse_kl": -1.0}),
        ("reverse_kl", 0.0, 1e-6, {"zero": 1.0}),
        ("reverse_kl", 1.0, 10.0, None),  # all of them are possible
        ("reverse_kl", 1.0, 0.06, None),  # it is surely none of the others, but a tenth of it may be something else
        ("chi_square", 1.0, 1e-6, None),  # none is
    ],
)
def test_named_is_what_surely_leaves_less_than_the_margin(name, scale, noise, combination):
    found = identify_sampled(of_noise(name, scale, noise), CANDIDATES, Sampling()).combination
    assert found == (combination and pytest.approx(combination, rel=1e-2))


def test_a_row_says_its_margin_and_between_what_a_coefficient_lies():
    found = of_noise("reverse_kl", 0.75, 1e-3)
    note = sampled_row(Case("sequence", "current"), {"reverse_kl": 1.0}, Sampling(margin=0.1), found).note
    assert "within 10% at error rate 1e-06" in note
    low, high = map(float, re.search(r"the coefficient of reverse_kl is between (\S+) and (\S+)$", note).groups())
    assert low < 0.75 < high


@pytest.mark.scheduled
def test_the_command_line_takes_the_same_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.kltest]\nmethod = "sampled"\nmargin = 0.2\nerror-rate = 1e-3\n')
    given = ("k2-loss-sequence", "--environment", "bandit", "--select", "KL101")
    (row,) = graded(*given, "--margin", "0.3", "--samples", "3000", code=0)["gradients"]
    assert (row["method"], row["margin"], row["error_rate"]) == ("sampled", 0.3, 1e-3)
    assert "confirmed within 20% at error rate 0.001 (asymptotic)" in call("grade", *given, "--verbose").stdout


def test_a_bounded_sphere_is_paired_too_and_its_bound_grows_by_what_is_subtracted(monkeypatch):
    instance, loss = first("bandit"), bind(squared)
    longest = float(np.linalg.norm(Controls(instance, "current").samples(instance.paths), axis=2).max())
    stated, met = 4 * longest, []
    update = EmpiricalBernstein.update

    def watched(self, rest, *, bound):
        met.append((float(np.linalg.norm(rest, axis=1).max()), bound))
        return update(self, rest, bound=bound)

    monkeypatch.setattr(EmpiricalBernstein, "update", watched)
    assert compared(loss, instance, bound=stated)[2] == "confirmed"
    assert all(norm <= bound for norm, bound in met)
    assert all(bound > stated for _, bound in met), "what is subtracted may add to the length"
    met.clear()
    compared(loss, instance, bound=stated, controls=False)
    assert {bound for _, bound in met} == {stated}
