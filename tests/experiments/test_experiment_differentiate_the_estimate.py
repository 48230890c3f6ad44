"""One step, Gaussians and sequences by hand, and that a wrong result is called wrong."""

import itertools
import math

import numpy as np
import pytest
import torch
from enumerated import value_again
from trial import Trial
from trial import row_of as find

from kltest.errors import InvalidEnvironmentError
from kltest.estimators import find as estimator_named
from kltest.truth import value

TRIAL = Trial("differentiate-the-estimate")
(experiment,) = TRIAL.modules("experiment")
SMALL = ("vocabulary=2,128", "length=5,10,11,20", "random_pairs=60")


@pytest.fixture(scope="module")
def rows():
    """Those that are worked out by hand."""
    return TRIAL.computed("part=examples,gaussians,length,equal noise", "length=5")


def by_hand(name, policy, reference):
    """(V,) E_π[weight·(e_a − π)] action by action, the weight from autograd through the function and its placement."""
    policy, reference = np.asarray(policy, float), np.asarray(reference, float)
    registered = estimator_named(name)
    total = np.zeros(len(policy))
    for action, chance in enumerate(policy):
        logp = torch.tensor([[math.log(chance)]], dtype=torch.float64, requires_grad=True)
        value = registered.function(logp, torch.tensor([[math.log(reference[action])]], dtype=torch.float64))
        weight = 0.0
        if registered.spec.placement in ("loss", "both") and value.requires_grad:
            weight += float(torch.autograd.grad(value.sum(), logp)[0])
        if registered.spec.placement in ("reward", "both"):
            weight += float(value.detach())
        total += chance * weight * (np.eye(len(policy))[action] - policy)
    return total


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1-loss", 0.0),
        ("k2-loss", math.log(4)),
        ("k3-loss", 1.875),
        ("k1-reward", math.log(4)),
        ("k3-both", math.log(4)),
        ("k3-reward", math.log(4) - 1.875),
        ("k3-inverted", 1.2),  # ½χ² = ½(p²/q + (1 − p)²/(1 − q) − 1) with q = ½: derivative 2(2p − 1)
        ("abs-loss", 2.0),  # twice the total variation |p − q|
    ],
)
def test_the_binary_example(rows, name, expected):
    assert find(rows, estimator=name, example="binary")["derivative"] == pytest.approx(expected, abs=1e-12)


def test_the_example_with_four_actions(rows):
    """Published to four decimals; and the definition of each, action by action."""
    row = find(rows, estimator="k3-loss", example="four actions")
    assert row["truth"] == pytest.approx([0.3719, -0.0153, -0.1724, -0.1843], abs=5e-5)
    assert row["gradient"] == pytest.approx([0.3, 0.1, -0.1, -0.3], abs=1e-12)
    assert row["flipped"] == 1
    policy, reference = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
    for name in ("k1-loss", "k2-loss", "k3-loss", "k3-inverted", "abs-loss", "k2-reward", "k3-reward", "k3-both"):
        found = find(rows, estimator=name, example="four actions")["gradient"]
        assert found == pytest.approx(by_hand(name, policy, reference), abs=1e-13), name


@pytest.mark.parametrize("path", ["random", "sharpened", "taken up", "dropped"])
def test_policies_are_as_far_as_they_say_and_on_their_path(path):
    policies, references, levels = experiment.family(8, path, 20, 0)

    def normalised(logits):
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    p, r = normalised(policies), normalised(references)
    # The textbook's sum loses digits near the reference: terms of the size of √KL, rounded to 1e-16 each.
    assert np.abs((p * np.log(p / r)).sum(axis=1) - levels).max() < 1e-14 + 1e-12 * levels.max()
    ratio = np.log(p / r)
    moved = {"taken up": r.argmin(axis=1), "dropped": r.argmax(axis=1)}.get(path)
    if moved is not None:
        rows = np.arange(len(p))
        assert ((ratio[rows, moved] > 0) == (path == "taken up")).all()
        others = np.ma.array(ratio, mask=np.eye(8)[moved])
        assert np.abs(others - others.mean(axis=1)[:, None]).max() < 1e-9


def test_size_along_one_direction_is_that_of_two_actions():
    """(b − r)/(b(1 − b)(logit b − logit r)), on a policy whose other actions keep their proportions."""
    reference = np.array([0.02, 0.3, 0.4, 0.28])
    for chance in (0.001, 0.01, 0.05, 0.3, 0.7):
        policy = reference * (1 - chance) / (1 - reference[0])
        policy[0] = chance
        instance = experiment._instance(np.log([policy]), np.log([reference]))
        truth = by_hand("k2-loss", policy, reference)
        found = experiment._expected("k3-loss", instance)[0]
        r, b = reference[0], chance
        size = (b - r) / (b * (1 - b) * (math.log(b / (1 - b)) - math.log(r / (1 - r))))
        assert found == pytest.approx(size * truth, abs=1e-13)


def test_signs_turn_where_the_log_ratio_is_between_nothing_and_the_kl():
    generator = np.random.default_rng(5)
    turned = 0
    for _ in range(40):
        policy, reference = generator.dirichlet(np.ones(6), size=2)
        u = np.log(policy / reference)
        expected = (u > 0) & (u < policy @ u)
        found = by_hand("k3-loss", policy, reference) * by_hand("k2-loss", policy, reference) < 0
        assert (found == expected).all()
        turned += expected.sum()
    assert turned > 10


def test_the_gradient_of_k3_between_gaussians_is_that_of_the_other_kl(rows):
    """KL(ref‖π) = log s + (1 + d²)/(2s²) − ½, with respect to d and log s."""
    for parameter, slope in {"mean": 1.0, "width": -1.0}.items():  # d = s = 1 at a KL of ½
        where = {"kl": 0.5, "estimator": "k3-loss", "placement": "loss", "parameter": parameter}
        assert find(rows, part="gaussians", kind="gradient", **where)["mean"] == pytest.approx(slope, abs=1e-9)


def counts(tokens) -> tuple[int, ...]:
    """First token, and how often 00, 01, 10 and 11 occur."""
    both = list(itertools.pairwise(tokens))
    return (tokens[0], *(both.count(pair) for pair in itertools.product((0, 1), repeat=2)))


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_every_type_once_with_the_number_of_its_sequences(length):
    wanted: dict[tuple[int, ...], int] = {}
    for tokens in itertools.product((0, 1), repeat=length):
        wanted[counts(tokens)] = wanted.get(counts(tokens), 0) + 1
    paths = experiment.types(length)
    found = {
        counts(tuple(tokens)): round(math.exp(weight))
        for tokens, weight in zip(paths.tokens.tolist(), paths.log_weight, strict=True)
    }
    assert found == wanted
    assert len(paths) == len(wanted)


def moments_by_hand(instance, length: int) -> dict[tuple[str, str], tuple[np.ndarray, float]]:
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


def test_bias_and_spread_moments_by_hand(rows):
    instance = experiment.at_distance(5, 0.8)
    found = moments_by_hand(instance, 5)
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
        assert value_again("kl", experiment.at_distance(length, kl)) == pytest.approx(kl, rel=1e-12)
    assert value("kl", experiment.at_distance(experiment.ANCHOR, 0.8, "pair")) == pytest.approx(0.8, rel=1e-12)
    one, other = (experiment.at_distance(length, 0.8, "pair") for length in (5, 12))
    assert np.array_equal(one.policy, other.policy)
    with pytest.raises(InvalidEnvironmentError, match="never come to a KL"):
        experiment.at_distance(1, 1.0)


def test_where_the_noise_is_equal_it_is(rows):
    (row,) = (row for row in rows if row["part"] == "equal noise" and row["length"] == 5)
    found = moments_by_hand(experiment.at_distance(5, row["equal_at"]), 5)
    loss, reward = (second - (mean**2).sum() for mean, second in (found["k1-loss", "loss"], found["k1-loss", "reward"]))
    assert loss == pytest.approx(reward, rel=1e-9)


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail():
    """On the quick run without its middle vocabularies and lengths."""
    rows = TRIAL.computed(*SMALL)
    TRIAL.may_lack_parts(rows)
    TRIAL.claims_can_fail(rows)
