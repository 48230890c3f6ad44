"""Calling a loss: parameters by name, masks and types, coefficients, and what its result is read as."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.errors import TargetError, UsageError
from kltest.grading import forms
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import FIELDS
from kltest.rollout import LEAVES, Rollout

ENVIRONMENTS = {"bandit": bandit(), "sequence": sequence(), "ragged": ragged()}


@pytest.fixture(params=ENVIRONMENTS, scope="module")
def rollout(request):
    return Rollout.of(Instance.draw(ENVIRONMENTS[request.param], 1), sampler="stale")


@pytest.fixture
def short():
    """Rollouts of different lengths, so that the mask matters."""
    return Rollout.of(Instance.draw(ragged(), 1), sampler="stale")


def gradient(loss, rollout):
    fresh = rollout.take(range(len(rollout)))
    outcome = loss(fresh)
    (found,) = torch.autograd.grad(outcome.objective, [fresh.built("logp")])
    return found


def k2(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def by_hand(rollout, weight):
    """(weight·mask)/B: the gradient of a masked token sum, averaged over sequences."""
    return (weight * rollout.peek("mask") / len(rollout)).detach()


def u(rollout):
    return (rollout.peek("logp") - rollout.peek("ref_logp")).detach()


# --- parameters by name


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "rollout"])
def test_every_alias_fills_its_field(name, rollout):
    for alias in (name, *FIELDS[name].aliases):
        seen = {}
        scope = {"seen": seen}
        exec(f"def loss(rollout, {alias}=None):\n    seen['it'] = {alias}\n    return rollout.logp", scope)
        bound = bind(scope["loss"])
        bound(rollout)
        assert bound.fields[alias] == name
        assert name in bound.takes
        if name == "beta":
            assert seen["it"] == 0.0, "the last call is the one without the KL term"
        else:
            torch.testing.assert_close(seen["it"], rollout.peek(name), rtol=0, atol=0)
            assert seen["it"] is not rollout.built(name), "it can be written into"
            assert seen["it"].requires_grad == (name in LEAVES)


def test_positional_only_keyword_only_and_variadic_parameters(rollout):
    def loss(ref, logp, /, extra=3.0, *args, ref_logp, **others):
        assert (extra, args, others) == (3.0, (), {"more": 5})
        assert ref is ref_logp
        return (logp - ref) ** 2 / 2

    bound = bind(loss, Call(arguments={"ref": "@ref_logp", "more": 5}))
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, u(rollout)))


def test_a_positional_only_parameter_keeps_its_default_in_front_of_a_filled_one(rollout):
    def loss(scale=2.0, logp=None, /, *, ref_logp):
        return scale * k2(logp, ref_logp)

    torch.testing.assert_close(gradient(bind(loss), rollout), by_hand(rollout, 2 * u(rollout)))


def test_a_name_that_matches_is_filled_even_with_a_default(rollout):
    def loss(logp, ref_logp, old_logp=None):
        assert old_logp is not None
        return logp - old_logp

    assert "old_logp" in bind(loss).takes
    bind(loss)(rollout)


def test_an_argument_wins_over_the_field(rollout):
    def loss(logp, ref_logp, old_logp=None):
        assert old_logp is None
        return k2(logp, ref_logp)

    bound = bind(loss, Call(arguments={"old_logp": None}))
    assert "old_logp" not in bound.takes
    bound(rollout)


def test_fields_by_argument_and_by_alias(rollout):
    swapped = bind(lambda p, q: k2(p, q), Call(arguments={"p": "@log_probs", "q": "@log_probs_base"}))
    assert swapped.fields == {"p": "logp", "q": "ref_logp"}
    torch.testing.assert_close(gradient(swapped, rollout), by_hand(rollout, u(rollout)))


def test_swapped_fields_are_not_the_same_loss(rollout):
    def k3(p, q):
        return (q - p).exp() - 1 - (q - p)

    straight = bind(k3, Call(arguments={"p": "@logp", "q": "@ref_logp"}))
    swapped = bind(k3, Call(arguments={"p": "@ref_logp", "q": "@logp"}))
    torch.testing.assert_close(gradient(straight, rollout), by_hand(rollout, 1 - (-u(rollout)).exp()))
    torch.testing.assert_close(gradient(swapped, rollout), by_hand(rollout, u(rollout).exp() - 1))


@torch.jit.script
def scripted(logp: torch.Tensor, ref_logp: torch.Tensor, scale: float = 0.5):
    return scale * (logp - ref_logp) ** 2


def test_what_torch_compiled_has_to_be_wrapped():
    with pytest.raises(UsageError, match=r"(?i)wrap it in a (Python )?function"):
        bind(scripted)


def test_an_unknown_parameter_is_named_with_what_can_be_filled():
    with pytest.raises(UsageError) as refused:
        bind(lambda logp, reff_logp: logp)
    text = str(refused.value)
    assert "'reff_logp'" in text
    assert "did you mean ref_logp" in text
    assert "--arg reff_logp=@FIELD" in text
    assert all(name in text for name in FIELDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reff_logp": 1}, ["no parameter", "did you mean 'ref_logp'"]),
        ({"temperature": 1}, ["no parameter", "logp, ref_logp"]),
        ({"ref_logp": "@nothing"}, ["'@nothing'", "@ref_logp"]),
        ({"self.beta": 1}, ["Class.method"]),
    ],
)
def test_arguments_that_fit_nothing(arguments, words):
    with pytest.raises(UsageError) as refused:
        bind(k2, Call(arguments=arguments))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_nothing_to_fill_by_name():
    def decorated_without_wraps(*args, **kwargs):
        return k2(*args, **kwargs)

    with pytest.raises(UsageError, match="names no parameter"):
        bind(decorated_without_wraps)


def test_packed_keywords_are_given_by_argument(rollout):
    def loss(logp, **inputs):
        return k2(logp, inputs["reference"])

    bound = bind(loss, Call(arguments={"reference": "@ref_logp"}))
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, u(rollout)))


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


@pytest.mark.parametrize("text", ["beta", "=1", "a b=1", "x..y=1", "1x=2"])
def test_arguments_that_are_none(text):
    with pytest.raises(UsageError, match="NAME=VALUE"):
        forms.arguments([text], "--arg")


def test_arguments_given_twice():
    with pytest.raises(UsageError, match="twice"):
        forms.arguments(["a=1", "a=2"], "--arg")


def test_a_configuration_object_is_built_from_dotted_arguments(rollout):
    def loss(logp, ref_logp, config):
        return config.kl.coefficient * k2(logp, ref_logp) * (2 if hasattr(config, "double") else 1)

    bound = bind(loss, Call(arguments={"config.kl.coefficient": 3.0}))
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, 3 * u(rollout)))
    with pytest.raises(UsageError, match=r"--arg config.kl.coefficient=VALUE"):
        bind(loss, Call(arguments={"config.kl.other": 3.0}))(rollout)


def test_a_whole_argument_and_one_of_its_attributes():
    with pytest.raises(UsageError, match="one of the two"):
        bind(lambda logp, config: logp, Call(arguments={"config": 1, "config.x": 2}))


# --- coefficients


def grpo(per_token_logps, ref_per_token_logps, old_per_token_logps, advantages, completion_mask, beta=0.04):
    """A whole GRPO loss: the clipped ratio times the advantage, and β·k3."""
    ratio = (per_token_logps - old_per_token_logps).exp()
    surrogate = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    log_ratio = ref_per_token_logps - per_token_logps
    kl = log_ratio.exp() - log_ratio - 1
    per_token = -surrogate + beta * kl
    loss = (per_token * completion_mask).sum(-1).mean()
    return loss, {"kl": (kl * completion_mask).sum() / completion_mask.sum(), "clip": 0.0}


def reward_table(environment):
    return np.random.default_rng(5).standard_normal((environment.n_contexts, environment.vocabulary))


@pytest.mark.parametrize("beta", [1.0, 0.04, -3.0])
def test_the_part_that_beta_multiplies(beta):
    environment = ragged()
    environment = ragged(reward=reward_table(environment))
    rollout = Rollout.of(Instance.draw(environment, 1), sampler="stale", beta=beta)
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

    found = gradient(bind(spy, call), rollout)
    assert seen == [0.3, 0.0]
    torch.testing.assert_close(found, by_hand(rollout, u(rollout)))


def test_beta_zero_leaves_nothing_to_grade(rollout):
    with pytest.raises(UsageError, match="β"):
        bind(grpo, Call(arguments={"beta": 0}))
    with pytest.raises(UsageError, match="β"):
        bind(lambda logp, beta: beta * logp)(rollout.replace(beta=0.0))


def test_a_loss_that_drops_its_kl_term_and_its_tensor_at_beta_zero(rollout):
    def loss(logp, ref_logp, beta):
        return (beta * k2(logp, ref_logp)).sum() if beta else 0.0

    torch.testing.assert_close(gradient(bind(loss), rollout), u(rollout))


def test_beta_read_from_the_rollout_counts_too(rollout):
    def loss(rollout):
        return rollout.logp * 7 + rollout.beta * k2(rollout.logp, rollout.ref_logp)

    bound = bind(loss, Call(beta=0.5))
    fresh = rollout.take(range(len(rollout)))
    outcome = bound(fresh)
    (found,) = torch.autograd.grad(outcome.objective, [fresh.built("logp")])
    torch.testing.assert_close(found, by_hand(rollout, u(rollout)))
    assert bound.takes_beta
    assert {"logp", "ref_logp"} <= fresh.accessed


def test_a_loss_that_ignores_its_coefficient_has_no_kl_part(rollout):
    bound = bind(lambda logp, ref_logp, beta: k2(logp, ref_logp))
    assert gradient(bound, rollout).abs().max() == 0


def test_noise_is_the_same_with_and_without_beta(rollout):
    def loss(logp, ref_logp, beta):
        return logp * torch.randn_like(logp) + beta * k2(logp, ref_logp)

    torch.testing.assert_close(gradient(bind(loss), rollout), by_hand(rollout, u(rollout)))


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
    "wrap",
    [
        lambda loss: loss,
        lambda loss: (loss, {"kl": 0.5, "other": "ignored"}),
        lambda loss: [loss, {"kl": torch.tensor(0.5)}],
        lambda loss: namedtuple("Answer", "loss metrics")(loss, {"kl": 0.5}),
        lambda loss: (loss, [torch.ones(())]),
    ],
    ids=["bare", "pair", "list", "namedtuple", "nameless metrics"],
)
def test_every_accepted_result(reduce, wrap, rollout):
    def loss(logp, ref_logp, mask):
        return wrap(reduce(k2(logp, ref_logp), mask))

    bound = bind(loss)
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
    if outcome.metric is not None:
        assert outcome.metric.item() == 0.5


@pytest.mark.parametrize("shape", ["()", "(B,)", "(B, T)"])
def test_the_logged_value_in_every_shape(shape, short):
    metric = {"()": 0.25, "(B,)": torch.ones(len(short)), "(B, T)": short.peek("ref_logp")}[shape]
    outcome = bind(lambda logp: (logp, {"kl": metric}))(short)
    assert outcome.metric.shape == torch.as_tensor(metric).shape
    assert outcome.metric.dtype == torch.float64


def test_a_logged_value_that_is_none(short):
    assert bind(lambda logp: (logp, {"kl": None}))(short).metric is None
    with pytest.raises(TargetError, match=r'metrics\["kl"\]'):
        bind(lambda logp: (logp, {"kl": "low"}))(short)
    with pytest.raises(TargetError, match=r'metrics\["kl"\]'):
        bind(lambda logp: (logp, {"kl": torch.ones(2, 2, 2)}))(short)


def test_a_number_is_logged_as_exactly_as_it_was_computed(short):
    value = 0.1 + 1e-12
    for metric in (value, np.float64(value), torch.tensor(value, dtype=torch.float64, requires_grad=True)):
        outcome = bind(lambda logp, metric: (logp, {"kl": metric}), Call(arguments={"metric": metric}))(short)
        assert outcome.metric.item() == value
        assert not outcome.metric.requires_grad


@pytest.mark.parametrize(
    "more",
    [
        lambda kl: (torch.tensor(0.1), 2.0),
        lambda kl: (kl.sum(), kl.mean(), None),
        lambda kl: (kl.detach(), kl.sum(1).detach()),
        lambda kl: (0.5, {"kl": 0.5}),
    ],
)
@pytest.mark.parametrize("reduce", [lambda kl: kl, lambda kl: kl.sum(1), lambda kl: kl.sum() / len(kl)])
def test_the_first_of_many_results_is_the_loss(reduce, more, rollout):
    def loss(logp, ref_logp, mask):
        kl = k2(logp, ref_logp) * mask
        return (reduce(kl), *more(kl))

    bound = bind(loss)
    torch.testing.assert_close(gradient(bound, rollout), by_hand(rollout, u(rollout)))
    gradient(bound, rollout)
    (note,) = bound.notes
    assert "the first was taken as the loss" in note
    metric = bound(rollout).metric
    assert (None if metric is None else metric.item()) == (0.5 if "dict" in note else None)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logp: logp.T, ["(3, 15)", "(15, 3)", "(15,)"]),
        (lambda logp: logp.flatten(), ["(45,)", "(15, 3)"]),
        (lambda logp: logp.sum(1)[:1], ["(1,)"]),
        (lambda logp: logp.sum().item(), ["float", "left torch"]),
        (lambda logp: logp.detach().numpy(), ["ndarray", "left torch"]),
        (lambda logp: None, ["None", "return"]),
        (lambda logp: "loss", ["a str"]),
        (lambda logp: {"policy": logp.sum()}, ["'policy'", "(loss, metrics)"]),
        (lambda logp: (logp, logp), ["tuple of (tensor of shape (15, 3)"]),
        (lambda logp: (logp.sum(), 3), ["int"]),
        (lambda logp: (logp, 2 * logp.sum(1), 3), ["tensor of shape (15, 3), tensor of shape (15,), int"]),
        (lambda logp: (3, logp, logp.sum()), ["int"]),
        (lambda logp: (logp > 0).sum(), ["torch.int64", "floating-point"]),
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
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
    with pytest.raises(TargetError, match=f"returned {bad}"):
        bind(lambda logp: -logp.sum() * bad)(short)


# --- placement


def test_placement_and_credit(short):
    seen = u(short) ** 2 / 2 * short.peek("mask")
    whole = bind(k2, Call(placement="reward"))
    torch.testing.assert_close(gradient(whole, short), by_hand(short, seen.sum(1, keepdim=True)))
    to_go = bind(k2, Call(placement="reward", credit="to-go"))
    torch.testing.assert_close(gradient(to_go, short), by_hand(short, seen.flip(1).cumsum(1).flip(1)))
    both = bind(k2, Call(placement="both", credit="immediate"))
    torch.testing.assert_close(gradient(both, short), by_hand(short, seen + u(short)))
    with pytest.raises(TargetError, match="scalar"):
        bind(lambda logp: logp.sum(), Call(placement="reward"))(short)


# --- masks and types


def k2_selected(logp, ref_logp, mask):
    return k2(logp, ref_logp)[mask].sum() / len(mask)


def k2_inverted(logp, ref_logp, mask):
    return k2(logp, ref_logp).masked_fill(~mask, 0.0)


@pytest.mark.parametrize("loss", [k2_selected, k2_inverted])
def test_the_mask_is_boolean_if_the_loss_wants_that(loss, short):
    bound = bind(loss)
    torch.testing.assert_close(gradient(bound, short), by_hand(short, u(short)))
    assert "mask of bool" in bound.notes[0]
    gradient(bound, short)
    assert len(bound.notes) == 1


def test_an_integer_mask_never_becomes_an_index(short):
    def selects_and_subtracts(logp, ref_logp, mask):
        return (k2(logp, ref_logp)[mask] * (1 - mask).sum()).mean()

    with pytest.raises(TargetError, match="IndexError: tensors used as indices"):
        bind(selects_and_subtracts)(short)


def test_an_error_that_no_mask_fixes_is_the_first_one(short):
    calls = []

    def broken(logp, mask):
        calls.append(mask.dtype)
        raise RuntimeError(f"mask was {mask.dtype}")

    with pytest.raises(TargetError, match=r"mask was torch.float64"):
        bind(broken)(short)
    assert torch.bool in calls

    def other(logp):
        calls.append("again")
        raise ValueError("no")

    calls.clear()
    with pytest.raises(TargetError, match="ValueError: no"):
        bind(other)(short)
    assert calls == ["again"]


def test_code_that_only_works_in_float32(short):
    def loss(logp, ref_logp):
        return (logp - ref_logp) @ torch.eye(3)

    bound = bind(loss)
    outcome = bound(short)
    assert outcome.dtype == "float32"
    assert "float32 fields" in bound.notes[0]
    (found,) = torch.autograd.grad(outcome.objective, [short.built("logp")])
    torch.testing.assert_close(found, by_hand(short, torch.ones(15, 3, dtype=torch.float64)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (k2, "float64"),
        (lambda logp, ref_logp: k2(logp.float(), ref_logp.float()).double(), "float32"),
        (lambda logp, ref_logp: k2(logp.float(), ref_logp.float()), "float32"),
        (lambda logp, ref_logp: k2(logp, ref_logp).bfloat16().sum(), "bfloat16"),
        (lambda logp, ref_logp: k2(logp.half(), ref_logp).double(), "float16"),
        (lambda logp, ref_logp: k2(logp, ref_logp) * (logp - ref_logp).detach().float().exp(), "float32"),
        (lambda logp, ref_logp, mask: k2(logp, ref_logp) * mask.float(), "float64"),
        (lambda logp, ref_logp: (k2(logp, ref_logp), {"kl": k2(logp, ref_logp).detach().float()}), "float64"),
        (lambda logp, ref_logp, beta: logp.float().sum() + beta * 2.0, "float32"),
    ],
    ids=["all double", "inside", "returned", "half", "one step", "detached", "exact mask", "metric", "coefficient"],
)
def test_the_lowest_precision_on_the_way(loss, dtype, short):
    assert bind(loss)(short).dtype == dtype


# --- inputs


def scribbles(logp, ref_logp, mask):
    ref_logp.sub_(1.0)
    mask[:, 0] = 0
    return (logp - ref_logp) * mask


@pytest.mark.parametrize("write", ["sub_", "data", "numpy"])
def test_writes_into_inputs_stay_with_the_call(write, short):
    def loss(logp, ref_logp):
        if write == "sub_":
            ref_logp.sub_(1.0)
        elif write == "data":
            ref_logp.data.sub_(1.0)
        else:
            ref_logp.numpy()[...] -= 1.0
        return logp - ref_logp

    before = short.peek("ref_logp").clone()
    bound = bind(loss)
    first = bound(short).objective.item()
    assert set(bound.record.writes) == {"ref_logp"}
    assert bound(short).objective.item() == first
    assert torch.equal(short.peek("ref_logp"), before)


def test_writes_into_large_inputs_are_refused():
    count = 30_000
    fields = {name: torch.randn(count, 3, dtype=torch.float64) for name in ("logp", "ref_logp")}
    fields["mask"] = torch.ones(count, 3, dtype=torch.float64)
    with pytest.raises(TargetError, match=r"wrote into mask.*clone"):
        bind(scribbles)(Rollout(fields))
    fields["mask"] = torch.ones(count, 3, dtype=torch.float64)
    known = bind(scribbles)
    known(Rollout({name: value[:5] for name, value in fields.items()}))
    assert set(known.record.writes) == {"ref_logp", "mask"}
    rollout = Rollout(fields)
    before = rollout.peek("ref_logp").clone()
    known(rollout)
    assert torch.equal(rollout.peek("ref_logp"), before)


def test_writes_into_the_leaf(short):
    def in_place(logp, ref_logp):
        logp -= ref_logp
        return logp

    def behind_autograd(logp, ref_logp):
        with torch.no_grad():
            logp.sub_(ref_logp)
        return logp

    before = short.peek("logp").detach().clone()
    expected = torch.where(short.peek("mask") != 0, before - short.peek("ref_logp"), 0.0).sum(1).mean()
    for loss in (in_place, behind_autograd):
        bound = bind(loss)
        torch.testing.assert_close(bound(short).objective.detach(), expected, rtol=1e-14, atol=0)
        assert set(bound.record.writes) == {"logp"}
        assert torch.equal(short.peek("logp").detach(), before), "what other calls are given is unharmed"


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


def test_the_users_own_frame_is_shown(short):
    for loss, function, source, text in [
        (fails_inside_torch, "fails_inside_torch", "return torch.cat([logp, ref_logp], dim=7)", "IndexError"),
        (fails_in_a_helper, "helper", 'raise KeyError("kl_ctl")', "KeyError: 'kl_ctl'"),
    ]:
        with pytest.raises(TargetError) as refused:
            bind(loss)(short)
        frame = refused.value.frame
        assert (frame.function, frame.source) == (function, source)
        assert frame.file == __file__
        assert Path(__file__).read_text().splitlines()[frame.line - 1].strip() == source
        assert text in frame.exception
        assert isinstance(refused.value.__cause__, KeyError | IndexError)
        assert source in str(refused.value)
        assert refused.value.exit_code == 3


def test_leaving_the_process(short):
    def leaves(logp):
        raise SystemExit(4)

    with pytest.raises(TargetError, match="left the process"):
        bind(leaves)(short)

    def interrupted(logp):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bind(interrupted)(short)

    class Odd(BaseException):
        pass

    def odd(logp):
        raise Odd("very")

    with pytest.raises(TargetError, match="Odd: very"):
        bind(odd)(short)


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
        lambda logp, ref_logp: k2(logp, ref_logp),
        functools.partial(lambda scale, logp, ref_logp: scale * k2(logp, ref_logp), 1.0),
        functools.partial(lambda logp, ref_logp, scale: scale * k2(logp, ref_logp), scale=1.0),
        wrapped(k2),
    ],
)
def test_kinds_of_callable(loss, rollout):
    torch.testing.assert_close(gradient(bind(loss), rollout), by_hand(rollout, u(rollout)))


async def asynchronous(logp):
    return logp


def generator(logp):
    yield logp


class BrokenToBuild:
    def __init__(self):
        raise OSError("no licence")

    def __call__(self, logp):
        return logp


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (asynchronous, UsageError, "async"),
        (generator, UsageError, "generator"),
        (torch.sub, UsageError, "built in"),
        (3, UsageError, "an? int"),
        (Methods, UsageError, "a class"),
        (BrokenToBuild, TargetError, "no licence"),
    ],
)
def test_kinds_that_are_refused(loss, error, words):
    with pytest.raises(error, match=words):
        bind(loss, name="target")


def test_a_class_that_must_be_built_says_with_what():
    class Needs(Callable):
        def __init__(self, tokenizer):
            pass

    with pytest.raises(UsageError, match="tokenizer"):
        bind(Needs)


def test_what_is_not_taken_is_not_built(rollout):
    fresh = rollout.take(range(len(rollout)))
    bind(k2)(fresh)
    assert fresh.built("logits") is None
    assert fresh.built("old_logp") is None


def test_the_leaf_is_the_rollouts_own(rollout):
    fresh = rollout.take(range(len(rollout)))
    outcome = bind(lambda rollout: k2(rollout.logp, rollout.ref_logp))(fresh)
    (found,) = torch.autograd.grad(outcome.objective, [fresh.built("logp")])
    torch.testing.assert_close(found, by_hand(rollout, u(rollout)))


def test_a_kind_of_mask_that_only_some_environments_need(short):
    def loss(logp, ref_logp, mask):
        return k2(logp, ref_logp) if mask.all() else k2(logp, ref_logp).masked_fill(~mask, 0.0)

    bound = bind(loss)
    bound(Rollout.of(Instance.draw(bandit(), 1)))
    assert bound.notes == []
    torch.testing.assert_close(gradient(bound, short), by_hand(short, u(short)))
    assert len(bound.notes) == 1
