"""Calling a loss: parameters by name, masks and types, coefficients, and what its result is read as."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from called import RAGGED, by_hand, gradient, k2, u
from hypothesis import given
from hypothesis import strategies as st

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.errors import TargetError, UsageError
from kltest.grading import forms
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import FIELDS, SUPPORT_FIELDS, whose
from kltest.rollout import LEAVES, Rollout

ENVIRONMENTS = {"bandit": bandit(), "sequence": sequence(), "ragged": ragged()}


@pytest.fixture(params=ENVIRONMENTS, scope="module")
def rollout(request):
    return Rollout.of(Instance.draw(ENVIRONMENTS[request.param], 1), sampler="stale")


@pytest.fixture
def short():
    """Rollouts of different lengths, so that the mask matters; fresh, since some losses write into them."""
    return RAGGED.take(range(len(RAGGED)))


# --- parameters by name


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "rollout"])
def test_every_alias_fills_its_field(name, short):
    for alias in (name, *FIELDS[name].aliases):
        seen = {}
        scope = {"seen": seen}
        exec(f"def loss(rollout, {alias}=None):\n    seen['it'] = {alias}\n    return rollout.logp", scope)
        bound = bind(scope["loss"])
        bound(short)
        assert bound.fields[alias] == name
        assert name in bound.takes
        if name == "beta":
            assert seen["it"] == 0.0, "the last call is the one without the KL term"
        else:
            of = "" if name == "topk_ids" and whose(alias) == "" else "ref_"
            wanted = short.support(name, of=of) if name in SUPPORT_FIELDS else short.peek(name)
            torch.testing.assert_close(seen["it"], wanted, rtol=0, atol=0)
            assert seen["it"] is not short.built(name), "it can be written into"
            assert seen["it"].requires_grad == (name in (*LEAVES, "topk_logp"))


def of_all_kinds(ref, logp, /, extra=3.0, *args, ref_logp, **others):
    assert (extra, args, others) == (3.0, (), {"more": 5})
    assert ref is ref_logp
    return k2(logp, ref)


def default_in_front(scale=2.0, logp=None, /, *, ref_logp):
    return scale * k2(logp, ref_logp)


def optional(logp, ref_logp, old_logp=None):
    return k2(logp, ref_logp) if old_logp is None else 5 * k2(logp, ref_logp)


def packed(logp, **inputs):
    return k2(logp, inputs["reference"])


def configured(logp, ref_logp, config):
    return config.kl.coefficient * k2(logp, ref_logp) * (2 if hasattr(config, "double") else 1)


def k3(p, q):
    return (q - p).exp() - 1 - (q - p)


@pytest.mark.parametrize(
    ("loss", "arguments", "weight"),
    [
        (of_all_kinds, {"ref": "@ref_logp", "more": 5}, lambda u: u),
        (default_in_front, {}, lambda u: 2 * u),
        (optional, {}, lambda u: 5 * u),
        (optional, {"old_logp": None}, lambda u: u),
        (packed, {"reference": "@ref_logp"}, lambda u: u),
        (configured, {"config.kl.coefficient": 3.0}, lambda u: 3 * u),
        (k3, {"p": "@log_probs", "q": "@log_probs_base"}, lambda u: 1 - (-u).exp()),
        (k3, {"p": "@ref_logp", "q": "@logp"}, lambda u: u.exp() - 1),
    ],
)
def test_what_fills_parameters(loss, arguments, weight, rollout):
    bound = bind(loss, Call(arguments=arguments))
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, weight(u(rollout))))
    assert ("old_logp" in bound.takes) == (loss is optional and not arguments)


@torch.jit.script
def scripted(logp: torch.Tensor, ref_logp: torch.Tensor, scale: float = 0.5):
    return scale * (logp - ref_logp) ** 2


def decorated_without_wraps(*args, **kwargs):
    return k2(*args, **kwargs)


def with_beta(logp, beta):
    return beta * logp


@pytest.mark.parametrize(
    ("loss", "arguments", "words"),
    [
        (
            lambda logp, reff_logp, x: logp,
            {},
            ["'reff_logp' and 'x'", "did you mean ref_logp, --arg reff_logp=@ref_logp", "kltest list fields"],
        ),
        (k2, {"reff_logp": 1}, ["no parameter", "did you mean 'ref_logp'"]),
        (k2, {"temperature": 1}, ["no parameter", "logp, ref_logp"]),
        (k2, {"ref_logp": "@nothing"}, ["'@nothing'", "@ref_logp"]),
        (k2, {"self.beta": 1}, ["Class.method"]),
        (configured, {"config": 1, "config.x": 2}, ["one of the two"]),
        (configured, {"config.kl.other": 3.0}, ["--arg config.kl.coefficient=VALUE"]),
        (decorated_without_wraps, {}, ["names no parameter"]),
        (scripted, {}, ["rap it in a", "unction"]),
        (with_beta, {"beta": 0}, ["β"]),
    ],
)
def test_parameters_that_cannot_be_filled(loss, arguments, words, short):
    with pytest.raises(UsageError) as refused:
        bind(loss, Call(arguments=arguments))(short)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@given(
    value=st.one_of(
        st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.lists(st.text())
    )
)
def test_literals_survive_the_command_line(value):
    assert forms.arguments([f"name={value!r}"], "--arg") == {"name": value}


def test_texts_on_the_command_line():
    parsed = forms.arguments(["kl_penalty=k3+", "log_p=@logp", "self.args.beta=0.5", "eq=a=b", "empty="], "--arg")
    assert parsed == {"kl_penalty": "k3+", "log_p": "@logp", "self.args.beta": 0.5, "eq": "a=b", "empty": ""}


@pytest.mark.parametrize("texts", [["beta"], ["=1"], ["a b=1"], ["x..y=1"], ["1x=2"], ["a=1", "a=2"]])
def test_texts_that_are_no_arguments(texts):
    with pytest.raises(UsageError, match="twice" if texts[1:] else "NAME=VALUE"):
        forms.arguments(texts, "--arg")


# --- coefficients


def grpo(per_token_logps, ref_per_token_logps, old_per_token_logps, advantages, completion_mask, beta=0.04):
    """A whole GRPO loss: the clipped ratio times the advantage, and β·k3."""
    ratio = (per_token_logps - old_per_token_logps).exp()
    surrogate = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    kl = k3(per_token_logps, ref_per_token_logps)
    loss = ((-surrogate + beta * kl) * completion_mask).sum(-1).mean()
    return loss, {"kl": (kl * completion_mask).sum() / completion_mask.sum(), "clip": 0.0}


@pytest.mark.parametrize("beta", [1.0, 0.04, -3.0])
def test_the_part_that_beta_multiplies(beta):
    reward = np.random.default_rng(5).standard_normal((ragged().n_contexts, ragged().vocabulary))
    rollout = Rollout.of(Instance.draw(ragged(reward=reward), 1), sampler="stale", beta=beta)
    assert float(rollout.peek("advantage").abs().max()) > 0.1
    bound = bind(grpo)
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, 1 - (-u(rollout)).exp()))
    assert bound.takes_beta


@pytest.mark.parametrize("call", [Call(beta=0.3), Call(arguments={"kl_coef": 0.3})])
def test_beta_by_option_and_by_argument(call, rollout):
    seen = []

    def spy(logp, ref_logp, kl_coef):
        seen.append(kl_coef)
        return kl_coef * k2(logp, ref_logp)

    torch.testing.assert_close(gradient(bind(spy, call), rollout), by_hand(rollout, u(rollout)))
    assert seen == [0.3, 0.0]


def number_without_a_kl_term(logp, ref_logp, mask, beta):
    return (beta * k2(logp, ref_logp) * mask).sum() / len(logp) if beta else 0.0


def noisy(logp, ref_logp, beta):
    return logp * torch.randn_like(logp) + beta * k2(logp, ref_logp)


def noisy_by_numpy(logp, ref_logp, beta):
    return logp * float(np.random.standard_normal()) + beta * k2(logp, ref_logp)  # noqa: NPY002


def read_from_the_rollout(rollout):
    return rollout.logp * 7 + rollout.beta * k2(rollout.logp, rollout.ref_logp)


def ignored(logp, ref_logp, beta):
    return k2(logp, ref_logp)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(number_without_a_kl_term, 1), (noisy, 1), (noisy_by_numpy, 1), (read_from_the_rollout, 1), (ignored, 0)],
)
def test_what_is_left_beside_the_coefficient_cancels(loss, weight, rollout):
    bound = bind(loss, Call(beta=0.5))
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, weight * u(rollout)))
    assert bound.takes_beta


# --- results


@pytest.mark.parametrize(
    "reduce",
    [
        lambda value, mask: value,
        lambda value, mask: (value * mask).sum(1),
        lambda value, mask: (value * mask).sum(1).mean(),
    ],
    ids=["tokens", "rows", "scalar"],
)
@pytest.mark.parametrize(
    ("wrap", "logged"),
    [
        (lambda loss: loss, None),
        (lambda loss: (loss, {"kl": 0.5, "other": "ignored"}), 0.5),
        (lambda loss: [loss, {"kl": torch.tensor(0.5)}], 0.5),
        (lambda loss: namedtuple("Answer", "loss metrics")(loss, {"kl": 0.5}), 0.5),
        (lambda loss: (loss, [torch.ones(())]), None),
        (lambda loss: (loss, torch.tensor(0.1), 2.0), None),
        (lambda loss: (loss, loss.sum(), loss.mean(), None), None),
        (lambda loss: (loss, 0.5, {"kl": 0.5}), 0.5),
    ],
)
def test_every_accepted_result(reduce, wrap, logged, rollout):
    bound = bind(lambda logp, ref_logp, mask: wrap(reduce(k2(logp, ref_logp) * mask, mask)))
    outcome = bound(rollout)
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, u(rollout)))
    rows = (u(rollout) ** 2 / 2 * rollout.peek("mask")).sum(1)
    torch.testing.assert_close(outcome.objective.detach(), rows.mean())
    if outcome.returned == "scalar":
        assert outcome.rows is None
        assert outcome.value is None
    else:
        torch.testing.assert_close(outcome.rows.detach(), rows)
        assert not outcome.value.requires_grad
    assert (None if outcome.metric is None else outcome.metric.item()) == logged
    assert all("was taken" in note for note in bound.notes)


@pytest.mark.parametrize(
    "metric",
    [
        0.1 + 1e-12,
        np.float64(0.1 + 1e-12),
        torch.tensor(0.1 + 1e-12, dtype=torch.float64, requires_grad=True),
        torch.ones(len(RAGGED)),
        RAGGED.peek("ref_logp"),
    ],
)
def test_the_logged_value_is_stored_as_it_was_computed(metric, short):
    outcome = bind(lambda logp, logged: (logp, {"kl": logged}), Call(arguments={"logged": metric}))(short)
    assert torch.equal(outcome.metric, torch.as_tensor(metric, dtype=torch.float64))
    assert outcome.metric.dtype == torch.float64
    assert not outcome.metric.requires_grad


def test_a_logged_value_that_is_none(short):
    assert bind(lambda logp: (logp, {"kl": None}))(short).metric is None
    for wrong in ("low", torch.ones(2, 2, 2)):
        with pytest.raises(TargetError, match=r'metrics\["kl"\]'):
            bind(lambda logp, wrong=wrong: (logp, {"kl": wrong}))(short)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logp: logp.T, ["(3, 15)", "(15, 3)", "(15,)"]),
        (lambda logp: logp.sum(1)[:1], ["(1,)"]),
        (lambda logp: logp.sum().item(), ["float", "left torch"]),
        (lambda logp: logp.detach().numpy(), ["ndarray", "left torch"]),
        (lambda logp: None, ["None", "return"]),
        (lambda logp: {"policy": logp.sum()}, ["'policy'", "(loss, metrics)"]),
        (lambda logp: (logp, logp), ["tuple of (tensor of shape (15, 3)"]),
        (lambda logp: (logp, 2 * logp.sum(1), 3), ["tensor of shape (15, 3), tensor of shape (15,), int"]),
        (lambda logp: (3, logp, logp.sum()), ["int"]),
        (lambda logp: (logp > 0).sum(), ["torch.int64", "floating-point"]),
        (lambda logp: logp.to("meta"), ["meta", "dense"]),
    ],
)
def test_results_that_are_no_loss(loss, words, short):
    with pytest.raises(TargetError) as refused:
        bind(loss, name="my-loss")(short)
    assert all(word in str(refused.value) for word in ["my-loss", *words]), str(refused.value)


def test_only_live_tokens_count(short):
    def poisoned(logp, ref_logp, mask):
        return torch.where(mask != 0, k2(logp, ref_logp), torch.full_like(logp, math.nan))

    torch.testing.assert_close(gradient(bind(poisoned), short), by_hand(short, u(short)))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_located(bad, short):
    def loss(logp, ref_logp):
        value = k2(logp, ref_logp).clone()
        value[4, 1] = bad
        return value

    assert short.peek("mask")[4, 1] == 1
    with pytest.raises(TargetError) as refused:
        bind(loss)(short)
    text = str(refused.value)
    assert f"returned {bad} at row 4, token 1" in text
    assert f"ref_logp = {short.peek('ref_logp')[4, 1].item()}" in text


def test_placement_and_credit(short):
    cost = u(short) ** 2 / 2 * short.peek("mask")
    for placement, credit, weight in (
        ("reward", None, cost.sum(1, keepdim=True)),
        ("reward", "to-go", cost.flip(1).cumsum(1).flip(1)),
        ("both", "immediate", cost + u(short)),
    ):
        bound = bind(k2, Call(placement=placement, credit=credit))
        torch.testing.assert_close(gradient(bound, short), by_hand(short, weight))


# --- masks and types


def k2_selected(logp, ref_logp, mask):
    return k2(logp, ref_logp)[mask].sum() / len(mask)


def k2_inverted(logp, ref_logp, mask):
    return k2(logp, ref_logp) if mask.all() else k2(logp, ref_logp).masked_fill(~mask, 0.0)


@pytest.mark.parametrize("loss", [k2_selected, k2_inverted])
def test_the_mask_is_boolean_if_the_loss_wants_that(loss, short):
    bound = bind(loss)
    bound(Rollout.of(Instance.draw(bandit(), 1)))
    assert len(bound.notes) == (loss is k2_selected), "where all are live, a mask of numbers will do"
    for _ in range(2):
        torch.testing.assert_close(gradient(bound, short), by_hand(short, u(short)))
    (note,) = bound.notes
    assert "mask of bool" in note


def test_an_integer_mask_never_becomes_an_index(short):
    def selects_and_subtracts(logp, ref_logp, mask):
        return (k2(logp, ref_logp)[mask] * (1 - mask).sum()).mean()

    with pytest.raises(TargetError, match="IndexError: tensors used as indices"):
        bind(selects_and_subtracts)(short)


@pytest.mark.parametrize(("kind", "tries"), [(RuntimeError, 3), (ValueError, 1)])
def test_an_error_that_no_mask_fixes_is_the_first_one(kind, tries, short):
    calls = []

    def broken(logp, mask):
        calls.append(mask.dtype)
        raise kind(f"mask was {mask.dtype}")

    with pytest.raises(TargetError, match=r"mask was torch.float64"):
        bind(broken)(short)
    assert len(set(calls)) == tries


def jagged(rows):
    """Rows as trainers pack them, in one nested tensor."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (k2, "float64"),
        (lambda logp, ref_logp: k2(logp.float(), ref_logp.float()).double(), "float32"),
        (lambda logp, ref_logp: k2(logp.float(), ref_logp.float()), "float32"),
        (lambda logp, ref_logp: k2(logp, ref_logp.float()), "float32"),
        (lambda logp, ref_logp: k2(logp, ref_logp).bfloat16().sum(), "bfloat16"),
        (lambda logp, ref_logp: k2(logp.half(), ref_logp).double(), "float16"),
        (lambda logp, ref_logp: k2(logp.to(torch.float16), ref_logp), "float16"),
        (lambda logp, ref_logp: k2(logp, ref_logp) * (logp - ref_logp).detach().float().exp(), "float32"),
        (lambda logp, ref_logp, mask: k2(logp, ref_logp) * mask.float(), "float64"),
        (lambda logp, ref_logp: (k2(logp, ref_logp), {"kl": k2(logp, ref_logp).detach().float()}), "float64"),
        (lambda logp, ref_logp, beta: logp.float().sum() + beta * 2.0, "float32"),
        (lambda logp, ref_logp: (logp - ref_logp) @ torch.eye(3), "float32"),
        (lambda logp, ref_logp: jagged(k2(logp, ref_logp)).float().exp().values().sum(), "float32"),
        (lambda logp, ref_logp, mask: k2(logp, ref_logp) * jagged(mask).float().values().view_as(mask), "float64"),
    ],
)
def test_the_lowest_precision_on_the_way(loss, dtype, short):
    bound = bind(loss)
    assert bound(short).dtype == dtype
    assert len(bound.notes) == any("float32 fields" in note for note in bound.notes)


# --- inputs


def scribbles(logp, ref_logp, mask):
    ref_logp.sub_(1.0)
    mask[:, 0] = 0
    return (logp - ref_logp) * mask


def behind_autograd(logp, ref_logp):
    with torch.no_grad():
        logp.sub_(ref_logp)
    return logp


def into_the_leaf(logp, ref_logp):
    logp -= ref_logp
    return logp


def by_data(logp, ref_logp):
    ref_logp.data.sub_(1.0)
    return logp - ref_logp


def by_numpy(logp, ref_logp):
    ref_logp.numpy()[...] -= 1.0
    return logp - ref_logp


@pytest.mark.parametrize(
    ("loss", "written"),
    [
        (scribbles, {"ref_logp", "mask"}),
        (by_data, {"ref_logp"}),
        (by_numpy, {"ref_logp"}),
        (into_the_leaf, {"logp"}),
        (behind_autograd, {"logp"}),
    ],
)
def test_writes_into_inputs_stay_with_the_call(loss, written, short):
    before = {name: short.peek(name).detach().clone() for name in ("logp", "ref_logp", "mask")}
    bound = bind(loss)
    first = bound(short).objective.item()
    assert set(bound.record.writes) == written
    assert bound(short).objective.item() == first
    assert all(torch.equal(short.peek(name).detach(), value) for name, value in before.items())


def test_writes_into_large_inputs_are_refused():
    def fields(count):
        return {name: torch.ones(count, 3, dtype=torch.float64) for name in ("logp", "ref_logp", "mask")}

    large = fields(30_000)
    with pytest.raises(TargetError, match=r"wrote into mask.*clone"):
        bind(scribbles)(Rollout(large))
    known, rollout = bind(scribbles), Rollout(fields(30_000))
    known(Rollout(fields(5)))
    known(rollout)
    assert set(known.record.writes) == {"ref_logp", "mask"}
    assert rollout.peek("ref_logp").eq(1).all()


def test_backward_inside_the_loss(short):
    def loss(logp):
        logp.sum().backward()
        return logp.sum()

    with pytest.raises(TargetError, match=r"backward\(\)"):
        bind(loss)(short)


# --- failures


def fails_inside_torch(logp, ref_logp):
    return torch.cat([logp, ref_logp], dim=7)


def fails_in_a_helper(logp):
    return helper(logp)


def helper(logp):
    raise KeyError("kl_ctl")


@pytest.mark.parametrize(
    ("loss", "function", "source", "text"),
    [
        (fails_inside_torch, "fails_inside_torch", "return torch.cat([logp, ref_logp], dim=7)", "IndexError"),
        (fails_in_a_helper, "helper", 'raise KeyError("kl_ctl")', "KeyError: 'kl_ctl'"),
    ],
)
def test_the_users_own_frame_is_shown(loss, function, source, text, short):
    with pytest.raises(TargetError) as refused:
        bind(loss)(short)
    frame = refused.value.frame
    assert (frame.function, frame.source, frame.file) == (function, source, __file__)
    assert Path(__file__).read_text().splitlines()[frame.line - 1].strip() == source
    assert text in frame.exception
    assert isinstance(refused.value.__cause__, KeyError | IndexError)
    assert source in str(refused.value)
    assert refused.value.exit_code == 3


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (SystemExit(4), TargetError, "left the process"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (Odd("very"), TargetError, "Odd: very"),
    ],
)
def test_leaving_the_process(raised, error, words, short):
    def leaves(logp):
        raise raised

    with pytest.raises(error, match=words):
        bind(leaves)(short)


def test_a_failure_at_beta_zero_says_so(short):
    with pytest.raises(TargetError, match="β = 0"):
        bind(lambda logp, beta: logp * (1 / beta))(short)


def test_grad_mode_is_on_for_the_loss_and_restored(short):
    def turns_off(logp):
        torch.set_grad_enabled(False)
        return logp * 1.0

    bind(turns_off)(short)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert bind(k2)(short).objective.requires_grad


# --- kinds of callable


class Callable:
    def __call__(self, logp, ref_logp):
        return k2(logp, ref_logp)


class Methods:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, logp, ref_logp):
        return k2(logp, ref_logp) * self.scale


class Module(torch.nn.Module):
    def forward(self, logp, ref_logp):
        return k2(logp, ref_logp)


def wrapped(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


@pytest.mark.parametrize(
    "loss",
    [
        Callable(),
        Callable,
        Methods(1.0).loss,
        Module(),
        Module,
        functools.partial(lambda scale, logp, ref_logp: scale * k2(logp, ref_logp), 1.0),
        functools.partial(lambda logp, ref_logp, scale: scale * k2(logp, ref_logp), scale=1.0),
        wrapped(k2),
        lambda rollout: k2(rollout.logp, rollout.ref_logp),
    ],
)
def test_kinds_of_callable(loss, rollout):
    fresh = rollout.take(range(len(rollout)))
    (found,) = torch.autograd.grad(bind(loss)(fresh).objective, [fresh.built("logp")])
    torch.testing.assert_close(found, by_hand(rollout, u(rollout)))
    assert fresh.built("logits") is None, "what is not taken is not built"


async def asynchronous(logp):
    return logp


def generator(logp):
    yield logp


class BrokenToBuild:
    def __init__(self):
        raise OSError("no licence")

    def __call__(self, logp):
        return logp


class Needs(Callable):
    def __init__(self, tokenizer):
        pass


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (asynchronous, UsageError, "async"),
        (generator, UsageError, "generator"),
        (torch.sub, UsageError, "built in"),
        (3, UsageError, "an? int"),
        (Methods, UsageError, "a class"),
        (Needs, UsageError, "tokenizer"),
        (BrokenToBuild, TargetError, "no licence"),
    ],
)
def test_kinds_that_are_refused(loss, error, words):
    with pytest.raises(error, match=words):
        bind(loss, name="target")
