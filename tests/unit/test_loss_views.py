"""Forms in which a loss gets its fields: rewards a rollout or a token, batches by key, two conversions at once."""

from __future__ import annotations

import pytest
import torch

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.errors import TargetError, UsageError
from kltest.loss.arguments import Attributes
from kltest.loss.building import ObjectOf
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import FIELDS
from kltest.rollout import Rollout


def rewarded(environment, rows=None):
    """Rollouts under a reward that differs from one to the next, so that giving it wrongly changes numbers."""
    rollout = Rollout.of(Instance.draw(environment, 1), sampler="stale")
    rollout = rollout.take(range(len(rollout)) if rows is None else rows)
    values = torch.linspace(-1.0, 2.0, len(rollout), dtype=torch.float64) ** 3
    return rollout.replace(reward=values, advantage=values - values.mean())


def gradient(bound, rollout):
    fresh = rollout.take(range(len(rollout)))
    (found,) = torch.autograd.grad(bound(fresh).objective, [fresh.built("logp")])
    return found


def by_hand(rollout, weight):
    return (weight * rollout.peek("mask") / len(rollout)).detach()


def per_token(logp, old_logp, advantages, response_mask):
    """As trainers write it that hold an advantage for every token."""
    return -((logp - old_logp).exp() * advantages * response_mask).sum() / len(logp)


def per_rollout(logp, old_logp, advantages, response_mask):
    """The same where there is one advantage a rollout."""
    return -((logp - old_logp).exp() * advantages[:, None] * response_mask).sum() / len(logp)


def per_token_of_a_batch(batch):
    return per_token(batch["log_probs"], batch["old_log_probs"], batch["advantages"], batch["response_mask"])


ARGUMENTS = {per_token_of_a_batch: {"batch": "@rollout"}}

# As many rows as tokens, and one token a row: there a (B,) field combines with a (B, T) one without an error.
BATCHES = {
    "bandit": rewarded(bandit()),
    "sequence": rewarded(sequence()),
    "ragged": rewarded(ragged()),
    "square": rewarded(ragged(), range(3)),
    "one row": rewarded(ragged(), [4]),
}


@pytest.mark.parametrize("environment", BATCHES)
@pytest.mark.parametrize("loss", [per_token, per_rollout, per_token_of_a_batch])
def test_rewards_come_per_rollout_or_per_token_as_the_loss_wants(loss, environment):
    rollout = BATCHES[environment]
    ratio = (rollout.peek("logp") - rollout.peek("old_logp")).exp()
    expected = by_hand(rollout, -ratio * rollout.peek("advantage")[:, None])
    bound = bind(loss, Call(arguments=ARGUMENTS.get(loss, {})))
    torch.testing.assert_close(gradient(bound, rollout), expected)
    torch.testing.assert_close(gradient(bound, rollout), expected)
    assert len([note for note in bound.notes if "(B, T)" in note]) == (loss is not per_rollout)


def test_unsettled_square_batches_would_be_graded_wrongly():
    """The planted bug: what a per-token loss makes of one advantage a rollout where the shapes happen to fit."""
    for environment in ("bandit", "square"):
        rollout = BATCHES[environment]
        fresh = rollout.take(range(len(rollout)))
        value = per_token(*(fresh.peek(name) for name in ("logp", "old_logp", "advantage", "mask")))
        (found,) = torch.autograd.grad(value, [fresh.built("logp")])
        right = gradient(bind(per_token), rollout)
        assert (found - right).abs().max() > 0.01


def test_settling_once_on_a_ragged_batch_holds_for_all_environments():
    bound = bind(per_token)
    bound.settle(BATCHES["ragged"].take(range(5)))
    calls = []

    def counts(logp, advantages):
        calls.append(tuple(advantages.shape))
        return (logp * advantages).sum()

    counting = bind(counts)
    counting.settle(BATCHES["ragged"].take(range(5)))
    calls.clear()
    gradient(counting, BATCHES["bandit"])
    assert calls == [(4, 1)]
    torch.testing.assert_close(gradient(bound, BATCHES["bandit"]), gradient(bind(per_rollout), BATCHES["bandit"]))


def test_settling_leaves_the_batch_the_random_state_and_later_failures_alone():
    rollout = BATCHES["ragged"].take(range(5))

    def noisy(logp, advantages):
        return (logp * advantages[:, None] * torch.randn_like(logp)).sum()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    bind(noisy).settle(rollout)
    assert torch.equal(torch.get_rng_state(), before)
    assert rollout.accessed == set()
    assert rollout.built("advantage") is None or not rollout.built("advantage").requires_grad

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
    bound.settle(BATCHES["ragged"])
    bound(BATCHES["bandit"])
    assert len(calls) == 1
    whole = bind(lambda rollout: loss(rollout.logp, rollout.ref_logp))
    whole(BATCHES["bandit"])
    calls.clear()
    whole(BATCHES["bandit"])
    assert len(calls) == 1


def test_rewards_per_token_and_a_boolean_mask_together():
    def loss(logp, rewards, loss_mask):
        return -(logp * rewards).masked_fill(~loss_mask, 0.0)

    bound = bind(loss)
    for rollout in BATCHES.values():
        expected = by_hand(rollout, -rollout.peek("reward")[:, None])
        torch.testing.assert_close(gradient(bound, rollout), expected.expand(rollout.peek("mask").shape))
    assert "(B, T)" in bound.notes[0]
    assert "mask of bool" in bound.notes[0]


def test_a_shape_that_nothing_fixes_is_the_loss_own_error():
    def loss(logp, advantages):
        return logp @ advantages[:, None, None]

    with pytest.raises(TargetError, match=r"loss raised RuntimeError"):
        bind(loss)(BATCHES["ragged"])


# --- batches by key


def k2(batch):
    return (batch["logp"] - batch["ref_logp"]) ** 2 / 2


def test_a_batch_by_key_is_the_rollout():
    rollout = BATCHES["ragged"]
    expected = by_hand(rollout, rollout.peek("logp") - rollout.peek("ref_logp"))
    whole = bind(k2, Call(arguments={"batch": "@rollout"}))
    torch.testing.assert_close(gradient(whole, rollout), expected)
    fresh = rollout.take(range(len(rollout)))
    whole(fresh)
    assert fresh.accessed == {"rollout", "logp", "ref_logp"}
    part = bind(k2, Call(arguments={"batch.logp": "@logp", "batch.ref_logp": "@ref_logp"}))
    torch.testing.assert_close(gradient(part, rollout), expected)
    assert part.takes == {"logp", "ref_logp"}


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "rollout"])
def test_every_alias_is_a_key(name):
    rollout = BATCHES["ragged"]
    for alias in (name, *FIELDS[name].aliases):
        assert rollout[alias] is rollout.peek(name)
        assert rollout.get(alias) is rollout.peek(name)
        assert alias in rollout
    assert (name in list(rollout.keys())) == (name != "beta")


def test_keys_that_are_not_there():
    def loss(batch):
        assert "values" not in batch
        assert batch.get("values") is None
        assert batch.get("values", 3) == 3
        assert "logp" in batch
        assert set(batch.keys()) >= {"logp"}
        assert dict(batch)["logp"] is batch["logp"]
        assert "pixels" not in list(batch)
        try:
            batch["values"]
        except KeyError:
            return batch["logp"]

    rollout = BATCHES["ragged"]
    for arguments in ({"batch": "@rollout"}, {"batch.logp": "@logp", "batch.ref_logp": "@ref_logp"}):
        torch.testing.assert_close(
            gradient(bind(loss, Call(arguments=arguments)), rollout),
            by_hand(rollout, torch.ones(15, 3, dtype=torch.float64)),
        )


@pytest.mark.parametrize("read", [lambda batch: batch["pixels"], lambda batch: batch.pixels])
def test_what_nobody_gave_is_a_usage_error_however_it_is_asked_for(read):
    with pytest.raises(UsageError, match=r"'pixels'.*fields are logp"):
        bind(read, Call(arguments={"batch": "@rollout"}))(BATCHES["ragged"])
    with pytest.raises(UsageError, match=r"'pixels'; give it with --arg batch\.pixels=VALUE"):
        bind(read, Call(arguments={"batch.logp": "@logp"}))(BATCHES["ragged"])


def test_nested_keys_and_keys_that_are_no_names():
    def loss(batch):
        return batch["extra"]["scale"] * batch["logp"]

    bound = bind(loss, Call(arguments={"batch.logp": "@logp", "batch.extra.scale": 2.0}))
    torch.testing.assert_close(
        gradient(bound, BATCHES["ragged"]), by_hand(BATCHES["ragged"], 2 * torch.ones(15, 3, dtype=torch.float64))
    )
    with pytest.raises(UsageError, match=r"\('tokens', 'full'\)"):
        bind(lambda batch: batch["tokens", "full"], Call(arguments={"batch.logp": "@logp"}))(BATCHES["ragged"])


def test_methods_of_a_class_come_before_those_of_a_dictionary():
    class Trainer:
        def get(self, name):
            return {"scale": 3.0}[name]

        def loss(self, logp):
            return logp * self.get("scale")

    bound = bind(Trainer.loss, receiver=ObjectOf("self", Attributes(), kind=Trainer))
    torch.testing.assert_close(
        gradient(bound, BATCHES["ragged"]), by_hand(BATCHES["ragged"], torch.full((15, 3), 3.0, dtype=torch.float64))
    )


# --- two conversions at once


def in_float32(logp, advantages):
    return (logp * advantages).sum(1) @ torch.ones(len(logp)) / len(logp)


def in_float32_and_boolean(logp, advantages, mask):
    return in_float32(logp, advantages).masked_fill(~mask.any(), 0.0)


@pytest.mark.parametrize("loss", [in_float32, in_float32_and_boolean])
def test_types_and_shapes_may_both_be_converted(loss):
    rollout = BATCHES["ragged"].replace(mask=torch.ones(15, 3, dtype=torch.float64))
    bound = bind(loss)
    expected = by_hand(rollout, rollout.peek("advantage")[:, None].expand(15, 3))
    torch.testing.assert_close(gradient(bound, rollout), expected, rtol=1e-6, atol=1e-7)
    assert "float32 fields" in bound.notes[0]
    assert "(B, T)" in bound.notes[0]
