"""Placement and credit: against the definition written out token by token, and deaf to what stands at padding."""

import inspect
import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weekly import spread

from kltest.environments import Instance, ragged
from kltest.errors import TargetError
from kltest.estimators import registry
from kltest.loss.placement import place
from kltest.rollout import Rollout

CREDITS = ("return", "to-go", "immediate")
PLACEMENTS = ("loss", "reward", "both")


def batch(seed: int, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A value, log-probs and a mask with holes, at least one live token a row."""
    generator = torch.Generator().manual_seed(seed)
    value, logp = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, tokens, generator=generator) < 0.6).double()
    mask[torch.arange(rows), torch.randint(tokens, (rows,), generator=generator)] = 1.0
    return value, logp, mask


def charged(cost: list[float], live: list[int], credit: str, token: int) -> float:
    """What a live token answers for, by definition."""
    held = {"return": live, "to-go": [s for s in live if s >= token], "immediate": [token]}[credit]
    return math.fsum(cost[s] for s in held)


@pytest.mark.parametrize(("placement", "credit"), list(product(PLACEMENTS, CREDITS)))
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), tokens=st.integers(1, 5), summed=st.booleans())
@settings(max_examples=25, deadline=None)
def test_losses_and_gradients_are_the_definition(placement, credit, seed, rows, tokens, summed):
    value, logp, mask = batch(seed, rows, tokens)
    value = value.sum(dim=1) if summed else value
    value.requires_grad_()
    logp.requires_grad_()
    losses = place(value, logp, mask, placement, credit)
    assert losses.shape == (rows,)
    slope_value, slope_logp = torch.autograd.grad(losses.sum(), (value, logp), allow_unused=True)
    for row in range(rows):
        live = [t for t in range(tokens) if mask[row, t]]
        cost = [0.0] * tokens
        if summed:
            cost[live[-1]] = float(value[row].detach())
        else:
            cost = value[row].tolist()
        expected = 0.0
        if placement in ("loss", "both"):
            expected += math.fsum(cost[t] for t in live)
        if placement in ("reward", "both"):
            expected += math.fsum(float(logp[row, t].detach()) * charged(cost, live, credit, t) for t in live)
            wanted = [charged(cost, live, credit, t) if t in live else 0.0 for t in range(tokens)]
            assert slope_logp[row].tolist() == pytest.approx(wanted, abs=1e-12)
        assert float(losses[row].detach()) == pytest.approx(expected, abs=1e-12)
    if placement == "reward":
        assert slope_value is None
    else:
        assert torch.equal(slope_value, torch.ones(rows) if summed else mask)
    if placement == "loss":
        assert slope_logp is None


@pytest.mark.parametrize(("placement", "credit"), spread(9, list(product(PLACEMENTS, CREDITS))))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e300])
def test_padding_reaches_neither_loss_nor_gradient(placement, credit, garbage):
    value, logp, mask = batch(0, 5, 4)
    dirty = [torch.where(mask != 0, clean, garbage).requires_grad_() for clean in (value, logp)]
    clean = [tensor.clone().requires_grad_() for tensor in (value, logp)]
    losses, expected = (place(*pair, mask, placement, credit) for pair in (dirty, clean))
    assert torch.equal(losses, expected)
    for found, wanted in zip(
        torch.autograd.grad(losses.sum(), dirty, allow_unused=True),
        torch.autograd.grad(expected.sum(), clean, allow_unused=True),
        strict=True,
    ):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)


def test_a_row_without_live_tokens_costs_nothing():
    logp = torch.ones(2, 3, requires_grad=True)
    mask = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    losses = place(torch.tensor([5.0, 7.0]), logp, mask, "reward", "immediate")
    assert losses.tolist() == [0.0, 7.0]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_any_kind_of_mask_will_do(kind):
    value, logp, mask = batch(3, 4, 4)
    assert torch.equal(place(value, logp, mask.to(kind), "both", "to-go"), place(value, logp, mask, "both", "to-go"))


def test_a_scalar_loss_stays_as_it_is():
    value = torch.tensor(3.0, requires_grad=True)
    assert place(value, torch.zeros(2, 3), torch.ones(2, 3)) is value


@pytest.mark.parametrize("placement", ["reward", "both"])
def test_a_scalar_cannot_be_placed_in_the_reward(placement):
    with pytest.raises(TargetError, match=r"scalar.*reward.*\(B, T\)"):
        place(torch.tensor(3.0), torch.zeros(2, 3), torch.ones(2, 3), placement)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 3, 4), (2, 1)])
def test_other_shapes_are_refused_with_the_shape(shape):
    with pytest.raises(TargetError, match=r"shape \(.*B = 2.*T = 3"):
        place(torch.zeros(shape), torch.zeros(2, 3), torch.ones(2, 3))


MASKED = [name for name, entry in registry().items() if "mask" in inspect.signature(entry.function).parameters]


@pytest.mark.parametrize("name", spread(12, MASKED))
@pytest.mark.parametrize("sampler", ["current", "stale"])
def test_estimators_that_take_a_mask_are_deaf_to_nan_at_padding(name, sampler):
    """Forward and backward: a NaN masked after a product would come back through the gradient as 0·NaN."""
    spec, function = registry()[name].spec, registry()[name].function
    rollout = Rollout.of(Instance.draw(ragged(), 0), sampler=sampler)
    names = [key for key in inspect.signature(function).parameters if key in rollout]
    results = []
    for garbage in (None, math.nan):
        fields = {key: rollout.peek(key).detach().clone() for key in {*names, "logp", "mask"} - {"beta"}}
        for key in fields:
            if garbage is not None and fields[key].dim() > 1 and key not in ("mask", "tokens"):
                fields[key][rollout.peek("mask") == 0] = garbage
        leaves = [fields[key].requires_grad_() for key in ("logp", "logits") if key in fields]
        value = function(**{key: fields.get(key, 1.0) for key in names})
        value = value[0] if isinstance(value, tuple) else value
        losses = place(value, fields["logp"], fields["mask"], spec.placement, spec.credit)
        slopes = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        results.append([losses.detach(), *(slope for slope in slopes if slope is not None)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(dirty).all()
        torch.testing.assert_close(dirty, clean, rtol=0, atol=1e-14)


def test_the_test_above_sees_a_leak():
    """Masking by multiplication is the planted bug: 0·NaN is NaN."""
    value, logp, mask = batch(1, 3, 4)
    leaked = (torch.where(mask != 0, value, math.nan) * mask).sum(dim=1)
    assert torch.isnan(place(leaked, logp, mask)).any()
