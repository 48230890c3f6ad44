"""Losses called on one batch, and the gradients that they should have there, derived by hand."""

from pathlib import Path

import torch

from kltest.environments import Instance, ragged
from kltest.rollout import Rollout

WRITTEN = Path(__file__).parent / "written"
"""Sources as users have them, which tests write into folders of their own: right, wrong and beyond repair."""

# Rollouts of different lengths, so that the mask matters.
RAGGED = Rollout.of(Instance.draw(ragged(), 3), sampler="stale")


def gradient(loss, rollout=RAGGED):
    """The gradient of a bound loss at the log-probs of a batch."""
    fresh = rollout.take(range(len(rollout)))
    (found,) = torch.autograd.grad(loss(fresh).objective, [fresh.built("logp")])
    return found


def by_hand(rollout, weight):
    """(weight·mask)/B: the gradient of a masked token sum, averaged over sequences."""
    return (weight * rollout.peek("mask") / len(rollout)).detach()


def u(rollout):
    return (rollout.peek("logp") - rollout.peek("ref_logp")).detach()


def k2(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def follows(loss, scale=1.0, rollout=RAGGED):
    """Assert that a bound loss has the gradient of k2 of each token, times `scale`."""
    torch.testing.assert_close(gradient(loss, rollout), by_hand(rollout, scale * u(rollout)), rtol=1e-12, atol=1e-14)
