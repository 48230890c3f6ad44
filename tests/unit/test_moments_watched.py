"""A function that is seen to work token by token is called on contexts and tokens; any other one on every rollout."""

import dataclasses
import functools
import itertools
import threading

import numpy as np
import pytest
import torch
from cases.table import cases
from moments_plain import drawn
from torch.nn import functional
from weekly import spread

from kltest.environments import OfSome, mdp, ngram, ragged, sequence
from kltest.errors import TargetError
from kltest.loss import watched
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import dynamic_programming, enumeration, exact

ENVIRONMENTS = {
    "ragged": ragged(4, 5, prompts=np.array([0.3, 0.7])),
    "sequence": sequence(3, 6),
    "mdp": mdp(6, 3, 4, branches=2),
    "ragged ngram": ngram(3, 8, 3, end_token=0),
}


def k3(logp, ref_logp, bound=10.0):
    return ((ref_logp - logp).exp() - 1 + logp - ref_logp).clamp(-bound, bound)


def decorated(function):
    @functools.wraps(function)
    def inside(*args, **named):
        return function(*args, **named) * 0.5

    return inside


@decorated
def halved(logp, ref_logp):
    return k3(logp, ref_logp)


def schulman(delta):
    return torch.expm1(delta) - delta


@torch.no_grad()
def weight(logp, ref_logp):
    return torch.exp(ref_logp - logp)


def with_a_global(logp, ref_logp):
    return BOUNDS["low"] * (logp - ref_logp)


BOUNDS = {"low": 2.0}


class Penalty:
    temperature = 0.5

    def __call__(self, logp, ref_logp, mask):
        return torch.where(mask.bool(), self.temperature * (logp - ref_logp), torch.zeros_like(logp)).sum(-1)

    def method(self, logp, old_logp):
        return (logp - old_logp).float() ** 2


SHOWN = {
    "k3": k3,
    "partial": functools.partial(k3, bound=0.5),
    "decorated": halved,
    "method": Penalty().method,
    "object": Penalty(),
    "a global": with_a_global,
    "lambda": lambda logp, ref_logp: torch.square(logp - ref_logp) / 2,
    "a weight without gradient": lambda logp, ref_logp: logp * weight(logp, ref_logp),
    "detached": lambda logp, old_logp, ref_logp: (logp - old_logp.detach()).exp() * (logp - ref_logp).detach(),
    "maximum": lambda logp, ref_logp, old_logp: torch.maximum(logp - ref_logp, (logp - old_logp).exp().clamp(max=1.2)),
    "divergence of torch": lambda logp, ref_logp: functional.kl_div(ref_logp, logp, reduction="none", log_target=True),
    "tokens": lambda logp, ref_logp, tokens: torch.where(tokens == 1, logp - ref_logp, 2.0 * logp),
    "precision of the fields": lambda logp, ref_logp: (logp - ref_logp).to(ref_logp.dtype) ** 2,
    "masked": lambda logp, ref_logp, mask: (logp - ref_logp) ** 2 * mask,
    "summed": lambda logp, ref_logp, mask: ((logp - ref_logp) ** 2 * mask).sum(dim=-1),
    "summed where live": lambda logp, ref_logp, mask: (logp - ref_logp).where(mask != 0, 0.0).square().sum(1),
    "summed squares": lambda logp, ref_logp, mask: (((logp - ref_logp) * mask) ** 2).sum(-1).mean() / 2,
    "summed in steps": lambda logp, ref_logp, mask: schulman((ref_logp - logp).where(mask.bool(), 0.0)).sum(-1),
    "summed but for padding": lambda logp, ref_logp, mask: (logp - ref_logp).masked_fill(mask == 0, 0.0).sum(1) / 2,
    "mean of sums": lambda logp, ref_logp, mask, beta: beta * (k3(logp, ref_logp) * mask).sum(dim=1).mean(),
    "constant": lambda logp, ref_logp: (logp - ref_logp) * torch.tensor(0.5, dtype=torch.float64),
    "no gradient": lambda logp, ref_logp: (logp - ref_logp).detach(),
}


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, numbers):
        return numbers.exp()

    @staticmethod
    def backward(context, gradient):
        return gradient * gradient.sum(dim=1, keepdim=True)


def centred(numbers: torch.Tensor) -> torch.Tensor:
    return numbers - numbers.mean()


compiled = functools.cache(torch.jit.script)


def into_itself(logp):
    other = logp.detach().clone()
    torch.cumsum(other, 1, out=other)
    return logp * other


def into_another_name(logp):
    other = logp.detach().clone()
    same = other
    same -= same.mean(dim=1, keepdim=True)
    return logp * other


def tried(logp, mask):
    try:
        return logp * mask.sum(dim=1, keepdim=True) if mask.sum() > 2 else logp
    except ValueError:
        return logp


def hooked(logp):
    logp = logp * 1.0
    logp.register_hook(lambda gradient: gradient * gradient.sum(dim=1, keepdim=True))
    return logp.exp()


HELD = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)
ONE = torch.tensor(1.0, dtype=torch.float64)
COUNT = itertools.count()

OTHERS = {
    "mean of the batch": lambda logp, mask: (logp * mask).sum() / mask.sum(),
    "sum of the batch": lambda logp, mask: (logp * mask).sum(),
    "length": lambda logp, mask: logp / mask.sum(dim=1, keepdim=True),
    "mean of a row": lambda logp, mask: (logp * mask).sum(1) / mask.sum(1),
    "sum with padding": lambda logp, ref_logp: (logp - ref_logp).sum(dim=1),
    "mean with padding": lambda logp: logp.mean(dim=1),
    "sum of ones at padding": lambda logp, mask: (logp * ((logp * mask) ** 0)).sum(1),
    "sum that padding is added to": lambda logp, mask: (logp * mask + (1 - mask)).sum(1),
    "nonlinear in the sum": lambda logp, mask: (logp * mask).sum(1).exp(),
    "constant a rollout": lambda logp, mask: (logp * mask).sum(1) + 1,
    "position": lambda logp, mask: logp * mask.cumsum(dim=1),
    "position, written": lambda logp: logp * torch.arange(logp.shape[1]),
    "discount": lambda logp: logp * HELD[: logp.shape[1]],
    "tensor of its own": lambda logp: logp * ONE,
    "token before": lambda logp: logp * logp.roll(1, dims=1).detach(),
    "slices": lambda logp: torch.cat([logp[:, :1], 2 * logp[:, 1:]], dim=1),
    "other tokens, held": lambda logp, mask: logp * (logp * mask).sum(1, keepdim=True).detach(),
    "reward": lambda logp, reward: logp * reward[:, None],
    "whole batch": lambda rollout: rollout.logp * len(rollout),
    "shape": lambda logp: logp if logp.shape[1] > 4 else 2 * logp,
    "length of a tensor": lambda logp: logp * len(logp),
    "loop": lambda logp: torch.stack([row * 2 for row in logp]),
    "branch on all": lambda logp, mask: logp if mask.bool().all() else 2 * logp,
    "number of Python": lambda logp: logp * float(logp.detach().mean()),
    "item": lambda logp: logp * logp.detach()[0, 0].item(),
    "NumPy": lambda logp: logp * torch.from_numpy(logp.detach().numpy().cumsum(axis=1)),
    "NumPy's own": lambda logp: logp * np.add.reduce(np.asarray(logp.detach())[0]),
    "list": lambda logp: logp * sum(logp.detach().flatten().tolist()),
    "text": lambda logp: logp * len(str(logp)),
    "largest": lambda logp: logp - logp.max().detach(),
    "softmax": lambda logp: logp.log_softmax(dim=1),
    "sorted": lambda logp: logp.sort(dim=1).values,
    "random": lambda logp: logp * torch.rand_like(logp),
    "dropout": lambda logp: functional.dropout(logp, 0.5),
    "written into by out=": into_itself,
    "written into by another name": into_another_name,
    "in place": lambda logp: (logp * 1.0).mul_(2.0),
    "inplace=True": lambda logp: functional.relu(logp * 1.0, inplace=True) + logp,
    "memory without gradient": lambda logp: logp * logp.data.cumsum(1),
    "backward of its own": lambda logp: OwnBackward.apply(logp),
    "hook": hooked,
    "compiled": lambda logp: compiled(centred)(logp),
    "vmap": lambda logp: torch.vmap(lambda row: row - row.mean())(logp),
    "gradient inside": lambda logp: logp * torch.autograd.grad(logp.square().sum(), logp)[0],
    "branch in try": tried,
    "metrics": lambda logp, ref_logp: (logp - ref_logp, {"kl": (logp - ref_logp).mean()}),
    "counted": lambda logp: logp * (next(COUNT) % 2 + 1),
    "a thread": lambda logp: in_a_thread(logp),
}


def in_a_thread(logp):
    """Modes of torch are a thread's own."""
    found = []
    other = threading.Thread(target=lambda: found.append(logp - logp.mean()))
    other.start()
    other.join()
    return found[0]


def by_tokens(loss, instance, sampler="current"):
    return dynamic_programming.by_tokens(loss, instance, sampler, 0, 0)


def on_all_rollouts(monkeypatch, loss, instance, sampler="current"):
    with monkeypatch.context() as patch:
        patch.setattr(enumeration, "by_tokens", lambda *_: None)
        return exact(loss, instance, sampler)


@pytest.mark.parametrize(("name", "environment"), spread(30, itertools.product(SHOWN, ENVIRONMENTS)))
def test_what_is_shown_equals_calls_on_all_rollouts(name, environment, monkeypatch):
    instance = drawn(ENVIRONMENTS[environment])
    for sampler in ("current", "stale"):
        found = by_tokens(bind(SHOWN[name]), instance, sampler)
        assert found is not None
        agree(found, on_all_rollouts(monkeypatch, bind(SHOWN[name]), instance, sampler))


def agree(found, whole):
    # Sums of the same terms in another order; in lower precision it is the loss that rounds.
    close = {"float64": 1e-12, "float32": 1e-6}.get(whole.dtype, 1e-2)
    assert np.abs(found.gradient - whole.gradient).max() <= close * np.sqrt(whole.second_moment)
    assert found.second_moment == pytest.approx(whole.second_moment, rel=close)
    for same in ("reduction", "leaves", "dtype", "metric", "coupling", "rollouts"):
        assert getattr(found, same) == getattr(whole, same), same
    assert (found.value is None) == (whole.value is None)
    if whole.value is not None:
        assert np.abs(found.value.rows - whole.value.rows).max() <= max(close, 1e-12)


OF_THE_CORPUS = [case for case in cases() if case.placement == "loss" and not isinstance(case.target, str)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", spread(12, OF_THE_CORPUS), ids=lambda case: case.name)
def test_no_loss_of_the_corpus_is_shown_falsely(case, monkeypatch):
    instance = drawn(ragged(3, 5, prompts=np.array([0.3, 0.7])))
    for sampler in ("current", "stale"):
        loss, again = (bind(case.target, Call(arguments=dict(case.arguments))) for _ in range(2))
        if found := by_tokens(loss, instance, sampler):
            agree(found, on_all_rollouts(monkeypatch, again, instance, sampler))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "environment"), spread(50, itertools.product(OTHERS, ["ragged", "sequence"])))
def test_what_reads_more_or_cannot_be_followed_is_not_shown(name, environment):
    loss = watched.watched(bind(OTHERS[name]))
    if loss is not None:
        instance = drawn(ENVIRONMENTS[environment])
        assert by_tokens(bind(OTHERS[name]), instance) is None


def test_numbers_catch_a_false_proof(monkeypatch):
    """The planted bug: a watch that lets every step pass. Calls on random rollouts then differ, as they should."""
    monkeypatch.setattr(watched._Steps, "show", lambda self, answer: True)
    for name in ("length", "mean of a row", "nonlinear in the sum", "position", "token before", "shape", "hook"):
        loss, instance = bind(OTHERS[name]), drawn(ENVIRONMENTS["ragged"])
        assert watched.is_watched(watched.watched(loss))
        assert by_tokens(loss, instance) is None, name
    loss = OTHERS["length"]
    assert (exact(bind(loss), instance).gradient == on_all_rollouts(monkeypatch, bind(loss), instance).gradient).all()


def test_a_function_that_is_seen_to_change_is_not_shown():
    """Each call works token by token, and the third one in another way than those before."""
    calls = itertools.count()
    loss = bind(lambda logp, ref_logp: (logp - ref_logp) * (2.0 if next(calls) > 2 else 1.0))
    assert by_tokens(loss, drawn(ENVIRONMENTS["ragged"])) is None


@pytest.mark.parametrize("name", ["k3", "mean of sums"])
def test_what_is_shown_is_not_called_on_all_rollouts(name, monkeypatch):
    monkeypatch.setattr(enumeration, "probe", None)  # those calls begin with it
    instance = drawn(ENVIRONMENTS["ragged"])
    assert exact(bind(SHOWN[name]), instance).rollouts == len(instance.paths)
    with pytest.raises(TypeError, match="not callable"):
        exact(bind(OTHERS["mean of a row"]), instance)


@pytest.mark.parametrize("placement", ["reward", "both"])
def test_costs_in_a_reward_are_called_on_every_rollout(placement):
    assert by_tokens(bind(k3, Call(placement=placement)), drawn(ENVIRONMENTS["ragged"])) is None


def test_where_some_rollouts_stand_for_all_each_is_called():
    whole = drawn(ENVIRONMENTS["sequence"])
    some = OfSome(**vars_of(whole), some=whole.paths)
    assert by_tokens(bind(k3), whole) is not None
    assert by_tokens(bind(k3), some) is None


def vars_of(instance):
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def test_errors_are_those_of_calls_on_rollouts():
    """Tables see a gradient without a value as well; the words are about the rollout."""
    loss = bind(lambda logp, ref_logp: (logp - ref_logp - (logp - ref_logp).detach()).sqrt(), name="rooted")
    with pytest.raises(TargetError, match=r"not finite at token \d of the rollout with tokens"):
        exact(loss, drawn(ENVIRONMENTS["ragged"]))
