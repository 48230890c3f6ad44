"""Forms in which a loss gets its fields: rewards a rollout or a token, batches by key, two conversions at once."""

from __future__ import annotations

import pytest
import torch
from called import by_hand, gradient, k2, u

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.errors import TargetError, UsageError
from kltest.loss.arguments import Attributes
from kltest.loss.building import ObjectOf
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import FIELDS, SUPPORT_FIELDS
from kltest.rollout import Rollout


def rewarded(environment, rows=None):
    """Rollouts under a reward that differs from one to the next, so that giving it wrongly changes numbers."""
    rollout = Rollout.of(Instance.draw(environment, 1), sampler="stale")
    rollout = rollout.take(range(len(rollout)) if rows is None else rows)
    values = torch.linspace(-1.0, 2.0, len(rollout), dtype=torch.float64) ** 3
    return rollout.replace(reward=values, advantage=values - values.mean())


# As many rows as tokens, and one token a row: there a (B,) field combines with a (B, T) one without an error.
BATCHES = {
    "bandit": rewarded(bandit()),
    "sequence": rewarded(sequence()),
    "ragged": rewarded(ragged()),
    "square": rewarded(ragged(), range(3)),
    "one row": rewarded(ragged(), [4]),
}
RAGGED = BATCHES["ragged"]


def per_token(logp, old_logp, advantages, response_mask):
    """As trainers write it that hold an advantage for every token."""
    return -((logp - old_logp).exp() * advantages * response_mask).sum() / len(logp)


def per_rollout(logp, old_logp, advantages, response_mask):
    """The same where there is one advantage a rollout."""
    return -((logp - old_logp).exp() * advantages[:, None] * response_mask).sum() / len(logp)


def per_token_of_a_batch(batch):
    return per_token(batch["log_probs"], batch["old_log_probs"], batch["advantages"], batch["response_mask"])


def with_boolean_mask(old_logp, logp, advantages, loss_mask):
    return -((logp - old_logp).exp() * advantages).masked_fill(~loss_mask, 0.0)


@pytest.mark.parametrize("environment", BATCHES)
@pytest.mark.parametrize(
    ("loss", "arguments", "words"),
    [
        (per_rollout, {}, []),
        (per_token, {}, ["(B, T)"]),
        (per_token_of_a_batch, {"batch": "@rollout"}, ["(B, T)"]),
        (with_boolean_mask, {}, ["(B, T)", "mask of bool"]),
    ],
)
def test_rewards_come_per_rollout_or_per_token_as_the_loss_wants(loss, arguments, words, environment):
    rollout = BATCHES[environment]
    ratio = (rollout.peek("logp") - rollout.peek("old_logp")).exp()
    expected = by_hand(rollout, -ratio * rollout.peek("advantage")[:, None])
    bound = bind(loss, Call(arguments=arguments))
    for _ in range(2):
        torch.testing.assert_close(gradient(bound, rollout), expected)
    assert len(bound.notes) == bool(words)
    assert all(word in " ".join(bound.notes) for word in words)


@pytest.mark.parametrize("environment", ["bandit", "square"])
def test_unsettled_square_batches_would_be_graded_wrongly(environment):
    """The planted bug: what a per-token loss makes of one advantage a rollout where the shapes happen to fit."""
    rollout = BATCHES[environment]
    fresh = rollout.take(range(len(rollout)))
    value = per_token(*(fresh.peek(name) for name in ("logp", "old_logp", "advantage", "mask")))
    (found,) = torch.autograd.grad(value, [fresh.built("logp")])
    assert (found - gradient(bind(per_token), rollout)).abs().max() > 0.01


def test_settling_once_on_a_ragged_batch_holds_for_all_environments():
    calls = []

    def counts(logp, advantages):
        calls.append(tuple(advantages.shape))
        return (logp * advantages).sum()

    counting = bind(counts)
    counting.settle(RAGGED.take(range(5)))
    calls.clear()
    gradient(counting, BATCHES["bandit"])
    assert calls == [(4, 1)]


def test_settling_leaves_the_batch_the_random_state_and_later_failures_alone():
    rollout = RAGGED.take(range(5))

    def noisy(logp, advantages):
        return (logp * advantages[:, None] * torch.randn_like(logp)).sum()

    before = torch.get_rng_state()
    bind(noisy).settle(rollout)
    assert torch.equal(torch.get_rng_state(), before)
    assert rollout.accessed == set()

    def broken(logp, advantages):
        raise ValueError("nothing to be done")

    bound = bind(broken)
    bound.settle(rollout)
    with pytest.raises(TargetError, match="nothing to be done"):
        bound(rollout)
    assert bound.notes == []


def test_a_loss_that_takes_no_reward_is_called_only_when_asked():
    calls = []

    def loss(logp, ref_logp):
        calls.append(1)
        return logp - ref_logp

    bound = bind(loss)
    bound.settle(RAGGED)
    bound(BATCHES["bandit"])
    assert len(calls) == 1


def test_a_shape_that_nothing_fixes_is_the_loss_own_error():
    with pytest.raises(TargetError, match=r"raised RuntimeError"):
        bind(lambda logp, advantages: logp @ advantages[:, None, None])(RAGGED)


def in_float32(logp, advantages):
    return (logp * advantages).sum(1) @ torch.ones(len(logp)) / len(logp)


def in_float32_and_boolean(logp, advantages, mask):
    return in_float32(logp, advantages).masked_fill(~mask.any(), 0.0)


@pytest.mark.parametrize("loss", [in_float32, in_float32_and_boolean])
def test_types_and_shapes_may_both_be_converted(loss):
    rollout = RAGGED.replace(mask=torch.ones(15, 3, dtype=torch.float64))
    bound = bind(loss)
    expected = by_hand(rollout, rollout.peek("advantage")[:, None].expand(15, 3))
    torch.testing.assert_close(gradient(bound, rollout), expected, rtol=1e-6, atol=1e-7)
    assert "float32 fields" in bound.notes[0]
    assert "(B, T)" in bound.notes[0]


# --- batches by key


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "rollout"])
def test_every_alias_is_a_key(name):
    for alias in (name, *FIELDS[name].aliases):
        if name in SUPPORT_FIELDS:  # made anew each time
            assert torch.equal(RAGGED[alias], RAGGED.peek(name))
        else:
            assert RAGGED[alias] is RAGGED.peek(name)
            assert RAGGED.get(alias) is RAGGED.peek(name)
        assert alias in RAGGED
    assert (name in list(RAGGED.keys())) == (name not in ("beta", *SUPPORT_FIELDS))


def of_keys(batch):
    assert "values" not in batch
    assert batch.get("values", 3) == 3
    assert "logp" in batch
    assert set(batch.keys()) >= {"logp"}
    assert dict(batch)["logp"] is batch["logp"]
    assert "pixels" not in list(batch)
    try:
        return batch["values"]
    except KeyError:
        return k2(batch["logp"], batch["ref_logp"])


def nested(batch):
    return batch["extra"]["scale"] * k2(batch["logp"], batch["ref_logp"])


class Trainer:
    """Its own `get` comes before that of a dictionary."""

    def get(self, name):
        return {"scale": 3.0}[name]

    def loss(self, logp, ref_logp):
        return self.get("scale") * k2(logp, ref_logp)


FIELD_BY_FIELD = {"batch.logp": "@logp", "batch.ref_logp": "@ref_logp"}


@pytest.mark.parametrize(
    ("bound", "scale", "takes"),
    [
        (bind(of_keys, Call(arguments={"batch": "@rollout"})), 1, {"rollout"}),
        (bind(of_keys, Call(arguments=FIELD_BY_FIELD)), 1, {"logp", "ref_logp"}),
        (bind(nested, Call(arguments={**FIELD_BY_FIELD, "batch.extra.scale": 2.0})), 2, {"logp", "ref_logp"}),
        (bind(Trainer.loss, receiver=ObjectOf("self", Attributes(), kind=Trainer)), 3, {"logp", "ref_logp"}),
    ],
)
def test_a_batch_by_key(bound, scale, takes):
    torch.testing.assert_close(gradient(bound, RAGGED), by_hand(RAGGED, scale * u(RAGGED)))
    assert bound.takes == takes


@pytest.mark.parametrize(
    ("read", "of_the_rollout", "of_a_stand_in"),
    [
        (lambda batch: batch["pixels"], "'pixels'.*fields are logp", r"--arg batch\.pixels=VALUE"),
        (lambda batch: batch.pixels, "'pixels'.*fields are logp", r"--arg batch\.pixels=VALUE"),
        (lambda batch: batch["tokens", "full"], r"\('tokens', 'full'\)", r"\('tokens', 'full'\)"),
    ],
)
def test_what_nobody_gave_is_a_usage_error_however_it_is_read(read, of_the_rollout, of_a_stand_in):
    with pytest.raises(UsageError, match=of_the_rollout):
        bind(read, Call(arguments={"batch": "@rollout"}))(RAGGED)
    with pytest.raises(UsageError, match=of_a_stand_in):
        bind(read, Call(arguments={"batch.logp": "@logp"}))(RAGGED)
