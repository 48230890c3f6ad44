"""The approximations experiment: its closed forms derived again, its claims able to fail, its parts apart."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from trial import Trial, row_of

TRIAL = Trial("approximations")
(MODULE,) = TRIAL.modules("experiment")
SMALL = (
    "k=2,8,32",
    "sharpness=1.0",
    "distance=0.0,0.1",
    "lead=3.0,4.0,8.0",
    "log_ratio=3e-4,0.03,0.1",
    "vocabulary=4096",
    "batch_size=1,2,3,64,128,1024",
    "beta=1.0,2.0",
)


@pytest.fixture(scope="module")
def rows():
    return TRIAL.computed(*SMALL)


def test_the_push_of_a_head_by_autograd():
    """∂π(S)/∂logits of a head of two among four."""
    logits = torch.tensor([0.4, 0.1, -0.5, -1.0], dtype=torch.float64, requires_grad=True)
    logits.softmax(-1)[:2].sum().backward()
    loss = MODULE.made("top-k", 2)
    from kltest.environments import Instance, bandit
    from kltest.moments import exact

    policy = logits.detach().numpy()[None]
    found = exact(loss, Instance.of(bandit(4), policy, policy)).gradient
    # Sums of four terms of size one.
    np.testing.assert_allclose(found[0], logits.grad.numpy(), atol=1e-15)


@pytest.mark.scheduled
def test_where_a_head_drifts(rows):
    """Eight tokens with 0.8 of the mass: 0.8/(0.8 + 0.2e), and the KL between the two, written out."""
    row = row_of(rows, part="drift", k=8, form="top-k")
    mass = 0.8 / (0.8 + 0.2 * math.e)
    kl = mass * math.log(mass / 0.8) + (1 - mass) * math.log((1 - mass) / 0.2)
    # A run that stops where its gradient is 1e-10 has a KL that is known far better.
    assert row["mass_after"] == pytest.approx(mass, rel=1e-9)
    assert row["kl"] == pytest.approx(kl, rel=1e-9)


@pytest.mark.scheduled
def test_the_dead_zone(rows):
    """Where the value is ten: dead at u ≲ −2.6 or ≳ 11."""
    row = next(row for row in rows if row["part"] == "clamp")
    for edge, bracket in (("low", (-4.0, -1.0)), ("high", (5.0, 20.0))):
        root = brentq(lambda u: math.exp(-u) - 1 + u - 10, *bracket, xtol=1e-14)
        assert row[edge] == pytest.approx(root, abs=1e-10)
    assert round(row["low"], 1) == -2.6
    assert round(row["high"]) == 11


def test_a_grid_is_misread_as_stated():
    """bfloat16 near −10: steps of 1/16; differences of numbers that are spread evenly over many steps."""
    generator = np.random.default_rng(0)
    u, step = 0.02, 2.0**-4
    values = -generator.uniform(8.5, 15.5, size=400_000)
    high, low = (torch.from_numpy(one).to(torch.bfloat16).double().numpy() for one in (values, values - u))
    found = np.mean((high - low - u) ** 2)
    # Nearly all of its variance comes from a share u/h of the samples: 1/√(400,000·0.32) of it is 0.3 %.
    assert found == pytest.approx(u * (step - u), rel=0.02)
    policy, reference = values[None], values[None] - u
    same = np.exp(2 * policy).sum()
    variance, _ = MODULE._misread(policy, reference, torch.bfloat16)
    # Numbers on both sides of a power of two have two grids; of these there are none here.
    assert variance / same == pytest.approx(u * (step - u), rel=1e-9)


@pytest.mark.scheduled
@pytest.mark.parametrize("normalised", ["token-mean", "whole-return"])
def test_batches_of_two_by_brute_force(rows, normalised):
    """Every ordered pair of rollouts, its scores divided by its own total length."""
    instance = MODULE._instance(0)
    paths, chances = instance.paths, instance.rollout_weights("current")
    policy, u = np.exp(instance.policy), instance.policy - instance.reference

    def score(row):
        """(tokens' own u, everyone's u) on g."""
        table = np.zeros((2, *policy.shape))
        cells = [(paths.contexts[row, t], paths.tokens[row, t]) for t in range(paths.lengths[row])]
        whole = sum(u[cell] for cell in cells)
        for context, token in cells:
            g = np.eye(policy.shape[1])[token] - policy[context]
            table[0, context] += u[context, token] * g
            table[1, context] += whole * g
        return table[0 if normalised == "token-mean" else 1]

    scores = [score(row) for row in range(len(paths))]
    expected = sum(
        chances[a] * chances[b] * (scores[a] + scores[b]) / (paths.lengths[a] + paths.lengths[b])
        for a, b in itertools.product(range(len(paths)), repeat=2)
    )
    limit = sum(chances[a] * scores[a] for a in range(len(paths))) / (chances @ paths.lengths)
    distance = np.linalg.norm(expected - limit) / np.linalg.norm(limit)
    row = row_of(rows, part="batch", batch_size=2, normalised=normalised)
    assert row["relative_distance"] == pytest.approx(distance, rel=1e-10)


def test_low_precision_is_felt_where_it_should_be():
    """k3's weight 1 − w at u = 2^−10 in bfloat16: w rounds to 1, and the gradient is nothing; k2's is u itself."""
    one = {"kind": "bfloat16", "rounded": "arithmetic", "vocabulary": 64, "seed": 0}
    u = torch.full((3,), 2.0**-10, dtype=torch.bfloat16)
    assert MODULE._weight("k3-loss", u, torch.zeros_like(u)).tolist() == [0.0] * 3
    assert MODULE._weight("k2-loss", u, torch.zeros_like(u)).tolist() == [2.0**-10] * 3
    (row,) = MODULE.error({**one, "estimator": "k3-loss", "log_ratio": 1e-4})
    assert row["relative_error"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail(rows):
    TRIAL.may_lack_parts(rows)
    TRIAL.claims_can_fail(rows)
