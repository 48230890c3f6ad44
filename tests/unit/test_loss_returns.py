"""What losses return beside the loss: pairs, named tuples, dictionaries and dataclasses, and the KL among them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import kltest
from kltest.environments import Instance, ragged
from kltest.errors import TargetError
from kltest.loss.calling import bind
from kltest.names import says_kl
from kltest.rollout import Rollout


@pytest.fixture
def short():
    return Rollout.of(Instance.draw(ragged(), 1), sampler="stale")


def k2(logp, ref_logp, mask):
    """The loss of a batch, and k1 summed over the tokens of each rollout."""
    u = (logp - ref_logp) * mask
    return (u**2 / 2).sum(1).mean(), u.sum(1)


# --- pairs whose items are named by the return statement


def variable(logp, ref_logp, mask):
    loss, rows = k2(logp, ref_logp, mask)
    mean_kl = rows.mean().detach()
    return loss, mean_kl


def expression(logp, ref_logp, mask):
    loss, kl = k2(logp, ref_logp, mask)
    return [loss, torch.mean(kl).detach()]


def of_an_attribute(logp, ref_logp, mask):
    loss, rows = k2(logp, ref_logp, mask)
    stats = SimpleNamespace(approxkl=rows.detach())
    answer = (loss, stats.approxkl.mean())
    return answer


def masked(logp, ref_logp, mask):
    loss, _ = k2(logp, ref_logp, mask)
    with torch.no_grad():
        kld = logp - ref_logp
    return loss, (kld * mask).sum() / len(mask)


def attached(logp, ref_logp, mask):
    loss, kl = k2(logp, ref_logp, mask)
    return loss, kl.mean()


def late(logp, ref_logp, mask):
    loss, kl = k2(logp, ref_logp, mask)
    if len(logp) == 0:
        return loss, loss.detach()
    return loss, kl.mean().item()


def three(logp, ref_logp, mask):
    loss, kl = k2(logp, ref_logp, mask)
    clip_fraction = (logp > ref_logp).double().mean()
    return loss, clip_fraction, kl.mean().detach()


def old_kl(logp, ref_logp, old_logp, mask):
    approx_kl = ((old_logp - logp) * mask).sum(1).mean().detach()
    return k2(logp, ref_logp, mask)[0], approx_kl


def other_name(logp, ref_logp, mask):
    loss, rows = k2(logp, ref_logp, mask)
    return loss, rows.mean().detach()


def a_multiple(logp, ref_logp, mask):
    loss, kl = k2(logp, ref_logp, mask)
    return loss, 0.1 * kl.mean().detach()


def penalty(logp, ref_logp, mask):
    loss, kl = k2(logp, ref_logp, mask)
    kl_penalty = kl.mean().detach()
    return loss, kl_penalty


LOGGED = "as the logged KL"
NAMELESS = "ignored: nothing there says by its name"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        *((loss, LOGGED) for loss in (variable, expression, of_an_attribute, masked, attached, late, three)),
        (old_kl, "ignored: approx_kl does not move with ref_logp"),
        *((loss, NAMELESS) for loss in (other_name, a_multiple, penalty)),
        (lambda logp, ref_logp, mask: (k2(logp, ref_logp, mask)[0], None), NAMELESS),
    ],
)
def test_the_kl_beside_the_loss_is_graded_and_anything_else_ignored(loss, words, short):
    bound = bind(loss)
    outcome = bound(short)
    value, rows = k2(short.peek("logp"), short.peek("ref_logp"), short.peek("mask"))
    torch.testing.assert_close(outcome.objective, value)
    if words == LOGGED:
        torch.testing.assert_close(outcome.metric, rows.mean().detach())
    else:
        assert outcome.metric is None
    bound(short.take([0, 3, 4]))
    (note,) = bound.notes
    assert "the first was taken as the loss" in note
    assert words in note


# --- results whose parts have names


class Named(NamedTuple):
    loss: torch.Tensor
    kl: torch.Tensor


class Backwards(NamedTuple):
    policy_loss: torch.Tensor
    ref_kl: torch.Tensor
    loss: torch.Tensor


@dataclass
class Output:
    loss: torch.Tensor
    kl_loss: torch.Tensor
    kl: torch.Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    mean_kl: float
    loss: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "logs"),
    [
        (lambda loss, kl: Named(loss, kl), True),
        (lambda loss, kl: Backwards(loss.detach(), kl, loss), True),
        (lambda loss, kl: namedtuple("Answer", "objective kl")(loss, kl.detach()), True),
        (lambda loss, kl: Output(loss, 0.1 * kl, kl.detach()), True),
        (lambda loss, kl: Frozen(kl.item(), loss), True),
        (lambda loss, kl: {"kl_coef": 0.1, "loss": loss, "kl": kl}, True),
        (lambda loss, kl: {"loss": loss, "metrics": {"kl": kl.item(), "lr": 0.1}}, True),
        (lambda loss, kl: SimpleNamespace(loss=loss, kl_div=kl.detach()), True),
        (lambda loss, kl: (loss, Frozen(kl.item(), loss)), True),
        (lambda loss, kl: {"loss": loss, "grad_scale": loss.new_tensor(1.0)}, False),
        (lambda loss, kl: {"loss": loss, "kl_coef": 0.1, "kl": torch.tensor(0.5)}, False),
        (lambda loss, kl: SimpleNamespace(loss=loss), False),
        (lambda loss, kl: Named(loss, torch.ones(7, 7)), False),
    ],
)
def test_parts_that_have_names(wrap, logs, short):
    def loss(logp, ref_logp, mask):
        value, rows = k2(logp, ref_logp, mask)
        return wrap(value, rows.mean())

    bound = bind(loss)
    outcome = bound(short)
    value, rows = k2(short.peek("logp"), short.peek("ref_logp"), short.peek("mask"))
    torch.testing.assert_close(outcome.objective, value)
    assert (outcome.metric is not None) == any(LOGGED in note for note in bound.notes) == logs
    if logs:
        torch.testing.assert_close(outcome.metric, rows.mean().detach())


@pytest.mark.parametrize(
    "answer",
    [
        lambda loss: (loss, 2 * loss),
        lambda loss: {"policy": loss},
        lambda loss: Named(1.0, loss),
        lambda loss: (loss, 3),
    ],
)
def test_no_telling_which_is_the_loss(answer, short):
    with pytest.raises(TargetError):
        bind(lambda logp, ref_logp, mask: answer(k2(logp, ref_logp, mask)[0]))(short)


def test_a_kl_that_is_missing_at_beta_zero(short):
    def loss(logp, ref_logp, mask, beta):
        value, rows = k2(logp, ref_logp, mask)
        return {"loss": beta * value - logp.sum(1).mean(), "kl": rows.mean().detach() if beta else None}

    bound = bind(loss)
    assert bound(short).metric is not None
    assert len(bound.notes) == 1


def test_a_list_of_two_rows_is_a_pair(short):
    def loss(logp, ref_logp, mask):
        kl = (logp - ref_logp) * mask
        return [(kl**2 / 2).sum(1), kl.detach().sum(1)]

    lengths = short.peek("mask").sum(1)
    two = short.take((lengths == 2).nonzero().flatten()[:2])
    outcome = bind(loss)(two)
    assert outcome.returned == "rows"
    assert outcome.metric.shape == (2,)


KL = ["kl", "mean_kl", "approxkl", "refKL", "kl_div", "kl_to_ref", "KL", "kld", "k3_kl", "per_token_kl", "kl_vs_ref"]
NO_KL = ["", *["loss", "kl_loss", "kl_coef", "klPenalty", "kl_max", "kl_beta", "klaus", "old_kl", "forward_kl", "skl"]]
NO_KL += [
    "kl_coefs",
    "num_kl",
    "kl_count",
    "kl_horizon",
    "kl_threshold",
    "kl_lr",
    "kl_ratio",
    "kl_steps",
    "early_stop_kl",
    *("kl_p95", "kl_bits", "kl_sum", "total_kl", "kl_std", "kl_quantile", "kl_nats_per_char"),
]


@pytest.mark.parametrize("name", [*KL, *NO_KL])
def test_names_that_say_kl(name):
    assert says_kl(name) == (name in KL)


def pair(metrics):
    def loss(logp, ref_logp, old_logp, mask):
        value, rows = k2(logp, ref_logp, mask)
        step = ((logp - old_logp) * mask).sum(1).mean()
        return value, metrics(rows.mean().item(), step.item())

    return loss


@pytest.mark.parametrize(
    ("metrics", "read", "words"),
    [
        (lambda kl, step: {"actor/kl": kl}, 1.0, "and actor/kl as the logged KL."),
        (lambda kl, step: {"loss/kl": kl, "actor/kl_coef": 0.1}, 1.0, "and loss/kl as the logged KL."),
        (lambda kl, step: {"train/approx_kl": 2 * kl}, 2.0, "and train/approx_kl as the logged KL."),
        (lambda kl, step: {"actor": {"kl": kl, "lr": 1e-6}}, 1.0, "and actor/kl as the logged KL."),
        (lambda kl, step: {"kl/mean": kl, "kl/max": 7 * kl}, 1.0, "and kl/mean as the logged KL."),
        (lambda kl, step: {"a/mean_kl": 3 * kl, "b/kl": kl}, 1.0, "and b/kl as the logged KL, not a/mean_kl."),
        (lambda kl, step: {"ppo/kl": step, "actor/approx_kl": kl}, 1.0, "and actor/approx_kl as the logged KL."),
        (lambda kl, step: {"kl": kl, "actor/kl": 2 * kl}, 1.0, ""),
        (lambda kl, step: {"train/approx_kl": step}, None, "train/approx_kl does not move with ref_logp"),
        (lambda kl, step: {"actor/kl_loss": kl, "kl/coef": 2 * kl, "kl/threshold": 0.1 * kl, "kl/std": kl}, None, ""),
        (lambda kl, step: {"kl_count": kl, "actor/kl_penalty": kl, "actor/klaus": kl}, None, ""),
        (lambda kl, step: {"actor/kl": "high", "kl/n": 3}, None, ""),
    ],
)
def test_metrics_are_read_by_the_last_part_of_their_keys(metrics, read, words, short):
    bound = bind(pair(metrics))
    moved = short.replace(old_logp=0.9 * short.peek("logp").detach())
    outcome = bound(moved)
    kl = k2(short.peek("logp"), short.peek("ref_logp"), short.peek("mask"))[1].mean().detach()
    assert (outcome.metric is None) == (read is None)
    if read is not None:
        torch.testing.assert_close(outcome.metric, read * kl)
    assert words in " ".join(bound.notes) if words else not bound.notes


def test_a_wrong_kl_under_a_key_with_a_slash_refutes_and_a_right_one_does_not():
    for factor, verdict in ((1.0, "confirmed"), (2.0, "refuted")):
        report = kltest.grade(
            pair(lambda kl, step, factor=factor: {"actor/kl": factor * kl, "actor/kl_coef": 0.1}),
            expect="local_reverse_kl",
            select="KL6",
        )
        assert report.verdict == verdict
        assert any("actor/kl as the logged KL" in note for note in report.notes)
