"""Losses that nobody meant stay unnamed under a stale sampler, however many names the atlas has."""

from functools import cache

import numpy as np
import pytest
import torch
from weekly import first, spread

from kltest.identify.case import Case
from kltest.identify.identification import identify
from kltest.rollout import Rollout

ENVIRONMENTS = ("bandit", "sequence", "ragged", "mdp")
CREDITS = ("own", "return", "to-go", "rollout")
SEEDS = range(48)
# A loss that is unnamed is far from every name: the nearest of 16,000 combinations leaves more than this of it.
FAR = 1e-3


def smooth(generator):
    """A random smooth function of two log-ratios: a sum of waves about as long as the log-ratios are large."""
    size, along, across, phase = generator.normal(size=(4, 4)) * np.array([[1.0], [1.5], [1.5], [3.0]])

    def function(u, v):
        waves = zip(size.tolist(), along.tolist(), across.tolist(), phase.tolist(), strict=True)
        return sum(a * torch.sin(b * u + c * v + d) for a, b, c, d in waves)

    return function


def loss(function, credit, logp, ref_logp, old_logp, mask):
    """The function as a loss of each token or of the rollout, or, detached, as the cost of other tokens' scores."""
    u, v = ((logp - other) * mask for other in (ref_logp, old_logp))
    if credit == "rollout":
        return function(u.sum(dim=1), v.sum(dim=1))
    value = function(u, v) * mask
    if credit == "own":
        return value.sum(dim=1)
    total = value.sum(dim=1, keepdim=True) - (value.cumsum(dim=1) - value if credit == "to-go" else 0)
    return (total.detach() * logp * mask).sum(dim=1)


def gradients(case, function, credit):
    """(C, V) gradients of the expected loss on every instance of a case, by autograd of the sum over all rollouts."""
    found = []
    for instance in case.instances:
        logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
        paths, rollout = instance.paths, Rollout.of(instance, sampler="stale")
        live = torch.from_numpy(paths.mask)
        contexts, tokens = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
        logp = torch.where(live, logits.log_softmax(dim=1)[contexts, tokens], 0.0)
        ref, old = (torch.where(live, rollout.peek(name).detach(), 0.0) for name in ("ref_logp", "old_logp"))
        chances = torch.from_numpy(instance.rollout_weights("stale"))
        expected = (chances * loss(function, credit, logp, ref, old, live.double())).sum()
        found.append(torch.autograd.grad(expected, logits)[0].numpy())
    return found


@cache
def case_of(environment):
    return Case(environment, "stale")


def named(environment, function, credit, dtype="float64"):
    case = case_of(environment)
    found = gradients(case, function, credit)
    return identify(found, case.candidates, basis=case.basis, freedom=case.freedom, dtype=dtype)


@pytest.mark.parametrize("seed", first(6, SEEDS))
def test_a_random_smooth_loss_is_unnamed(seed):
    generator = np.random.default_rng([14, seed])
    environment, credit = ENVIRONMENTS[seed % 4], CREDITS[seed // 4 % 4]
    # The tolerances of float32 are the wider ones.
    found = named(environment, smooth(generator), credit, "float32")
    assert found.combination is None
    assert found.residual > FAR


@pytest.mark.parametrize("environment", spread(2, ENVIRONMENTS))
@pytest.mark.parametrize(
    ("function", "credit", "name"),
    [
        (lambda u, v: u.square() / 2, "own", "local_reverse_kl@rollouts"),
        (lambda u, v: v.detach().exp() * u.square() / 2, "own", "local_reverse_kl@sampler"),
        (lambda u, v: (-u).exp() - 1 + u, "own", "local_forward_kl@rollouts"),
        (lambda u, v: u, "return", "reverse_kl@rollouts"),
        (lambda u, v: v, "return", "to_sampler_kl@rollouts"),
        (lambda u, v: v.detach().exp() * u.square() / 2, "rollout", "reverse_kl"),
    ],
)
def test_the_same_call_names_what_has_a_name_and_nothing_that_is_off_by_a_thousandth(
    environment, function, credit, name
):
    single = {
        "local_reverse_kl@rollouts": "reverse_kl@rollouts",
        "local_reverse_kl@sampler": "reverse_kl",
        "local_forward_kl@rollouts": "forward_kl@rollouts",
    }
    expected = single.get(name, name) if environment == "bandit" else name
    assert named(environment, function, credit).combination == pytest.approx({expected: 1.0})
    planted = lambda u, v: function(u, v) + 1e-3 * u * torch.sin(3 * v + 1)  # noqa: E731
    assert named(environment, planted, credit).combination is None
