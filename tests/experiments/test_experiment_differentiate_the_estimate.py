"""One step by hand: the worked examples, the signs that turn, sizes along one direction; and planted wrong results."""

import math

import numpy as np
import pytest
import torch
from trial import Trial
from trial import row_of as find

from kltest.estimators import find as estimator_named
from kltest.reproduce.frames import records

TRIAL = Trial("differentiate-the-estimate")
analysis, experiment, settings = TRIAL.modules("claims", "experiment", "settings")


@pytest.fixture(scope="module")
def rows():
    """The quick run without its middle vocabularies, which no planted fault needs."""
    grid = settings.SETTINGS.grid("quick", ("vocabulary=2,128",))
    tasks = experiment.tasks(settings.SETTINGS.configurations(grid))
    return records(analysis.tidy([row for task in tasks for row in experiment.compute(task)]))


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
    assert row["kl"] == pytest.approx(0.4564, abs=5e-5)
    assert find(rows, estimator="k2-loss", example="four actions")["logged"] == pytest.approx(0.5216, abs=5e-5)
    assert row["flipped"] == 1
    policy, reference = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
    for name in ("k1-loss", "k2-loss", "k3-loss", "k3-inverted", "abs-loss", "k2-reward", "k3-reward", "k3-both"):
        found = find(rows, estimator=name, example="four actions")["gradient"]
        assert found == pytest.approx(by_hand(name, policy, reference), abs=1e-13), name


def test_the_std_of_one_sample(rows):
    """E‖u·(e_a − π)‖² − ‖truth‖², over ‖truth‖², for k2 in the loss."""
    policy, reference = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    u, scores = np.log(policy / reference), np.eye(4) - policy
    truth = policy @ (u[:, None] * scores)
    square = policy @ (u**2 * (scores**2).sum(axis=1))
    expected = math.sqrt(square - truth @ truth) / np.linalg.norm(truth)
    assert find(rows, estimator="k2-loss", example="four actions")["std"] == pytest.approx(expected, rel=1e-12)


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


def test_every_claim_agrees_and_is_named_once(rows):
    found = analysis.claims(rows)
    assert [claim.claim for claim in found if claim.agrees is not True] == []
    assert len({claim.claim for claim in found}) == len(found)


def test_parts_of_the_grid_give_claims_that_are_not_run(rows):
    assert TRIAL.may_lack([]) == {None}
    assert analysis.tables([]) == {"table": []}
    for kept in (
        [row for row in rows if row["estimator"] == "k3-reward"],
        [row for row in rows if row["part"] == "examples"],
        [row for row in rows if row["part"] == "distance" and row["vocabulary"] == 2],
        [row for row in rows if row["part"] == "distance" and row["path"] == "sharpened"],
    ):
        TRIAL.may_lack(kept)


def test_each_claim_can_fail(rows):
    TRIAL.claims_can_fail(rows)
