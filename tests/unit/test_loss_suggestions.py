"""What is proposed for a parameter that cannot be filled: a field of the same role, or nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kltest.errors import UsageError
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import ENGINES, FIELDS, WHOSE, suggested_field
from kltest.rollout import Rollout

ROLES = {word: prefix for prefix, words in WHOSE.items() for word in (*words, *(f"{word}_policy" for word in words))}
ROLES |= dict.fromkeys(("policy", "actor", "pi", "theta"), "")
PLACES = ("{}_{}", "{}_token_{}", "{1}_{0}", "per_token_{}_{}", "{}_action_{}", "{}_{}_")
QUANTITIES = {"logp": "logp", "logps": "logp", "logprobs": "logp", "log_prob": "logp", "logits": "logits"}


@given(st.sampled_from(sorted(ROLES)), st.sampled_from(PLACES), st.sampled_from(sorted(QUANTITIES)))
def test_the_role_and_the_quantity_decide(word, place, quantity):
    name, field = place.format(word, quantity), ROLES[word] + QUANTITIES[quantity]
    if field == "old_logp" and ENGINES.intersection(word.split("_")):
        field = "rollout_logp"
    assert suggested_field(name) == field
    camel = "".join(part.title() for part in name.split("_"))
    assert suggested_field(camel[0].lower() + camel[1:]) == field


def test_every_name_that_is_filled_has_the_role_of_its_field():
    """So that the roles cannot contradict the calling convention."""
    for field in ("logp", "ref_logp", "old_logp", "rollout_logp", "prox_logp", "logits", "ref_logits", "old_logits"):
        for alias in (field, *FIELDS[field].aliases):
            assert suggested_field(alias) == field


# Words that run together, and near spellings of a name that would be filled.
NEAR = {
    "logp": ["log_pi", "logp_"],
    "ref_logp": ["reflogp", "logpi_ref", "reff_logp"],
    "old_logp": ["oldlogprobs", "log_mu"],
    "mask": ["completions_mask"],
    "advantage": ["advantags"],
    "reward": ["reward_"],
    "tokens": ["token"],
    "beta": ["kl_coeffs", "KL_COEFFICIENT", "kl_loss_weight"],
}
# Of two roles; of a role of its own; no log-probs; weights of tokens or rows, most likely.
UNKNOWN = (
    "old_ref_logprobs curr_old_logp student_teacher_logprobs critic_logprobs ref_chosen_logps policy_rejected_logprobs "
    "old_values ref_model policy old_mask ref_advantages x temperature target_logp kl kl_weights loss_weight"
)


@pytest.mark.parametrize(
    ("name", "field"),
    [*((name, field) for field, names in NEAR.items() for name in names), *((name, None) for name in UNKNOWN.split())],
)
def test_a_parameter_gets_the_one_field_that_its_name_means_or_none(name, field):
    scope = {}
    exec(f"def loss({name}): return {name}", scope)
    if field is None:
        with pytest.raises(UsageError, match=f"the parameter '{name}' of loss") as refused:
            bind(scope["loss"])
        assert "did you mean" not in str(refused.value)
    else:
        loss = bind(scope["loss"])
        assert loss.fields == {name: field}
        assert f"were filled: {name} with {field}" in loss.notes[0]


def test_guesses_fill_nothing_unless_each_parameter_has_one_and_no_two_the_same():
    with pytest.raises(UsageError, match="did you mean logp, --arg curr_logprobs=@logp") as refused:
        bind(lambda curr_logprobs, ref_logp, unheard_of: curr_logprobs)
    assert "'curr_logprobs' and 'unheard_of'" in str(refused.value)
    with pytest.raises(UsageError, match="'curr_logprobs' and 'policy_logps'"):
        bind(lambda curr_logprobs, policy_logps, ref_logp: curr_logprobs)


def test_numbers_that_trainers_pass_besides_are_made_of_the_fields():
    seen = {}

    def loss(log_ratio, lengths, num_items_in_batch, device, global_step, uid, index, mask):
        seen.update(locals())
        return (log_ratio * mask).sum(-1) ** 2 / 2

    bound = bind(loss)
    rollout = Rollout.of(instances("ragged", 0)[0]).take([0, 5, 9])
    bound(rollout)
    assert torch.equal(seen["log_ratio"], rollout.peek("logp") - rollout.peek("ref_logp"))
    assert seen["lengths"].tolist() == rollout.peek("mask").sum(1).tolist()
    assert int(seen["num_items_in_batch"]) == int(rollout.peek("mask").sum())
    assert (seen["device"].type, seen["global_step"]) == ("cpu", 1)
    assert seen["uid"] == seen["index"]
    assert len({*seen["uid"]}) == len({*rollout.peek("group").tolist()})
    assert bound.filled["lengths"] == "live tokens of each row"


def in_both_places(logp, ref_logp, mask, kl_coef=0.1, kl_loss_coef=0.0):
    return logp * kl_coef + kl_loss_coef


@pytest.mark.parametrize(
    ("given", "fields", "beta"),
    [
        ({}, {"kl_coef"}, None),
        ({"kl_loss_coef": 0}, {"kl_coef"}, None),
        ({"kl_loss_coef": 0.3}, {"kl_coef"}, None),
        ({"kl_coef": 0.0}, {"kl_loss_coef"}, None),
        ({"kl_coef": 0.0, "kl_loss_coef": 0.2}, {"kl_loss_coef"}, 0.2),
    ],
)
def test_of_several_coefficients_one_is_beta_and_a_given_number_is_its_own(given, fields, beta):
    loss = bind(in_both_places, Call(arguments=given))
    assert {name for name, field in loss.fields.items() if field == "beta"} == fields
    assert loss.fixed_beta == beta


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("curr_logprobs", "its parameters are logp, ref_logprobs, old_logprobs"),
        ("pre_logprobs", "its parameters are logp, ref_logprobs, old_logprobs"),
        ("ref_logprob", "did you mean 'ref_logprobs'"),
    ],
)
def test_parameters_of_another_role_are_not_proposed_for_an_argument(argument, words):
    with pytest.raises(UsageError, match=words):
        bind(lambda logp, ref_logprobs, old_logprobs: logp, Call(arguments={argument: "@logp"}))


def test_a_field_that_another_parameter_takes_is_not_proposed():
    with pytest.raises(UsageError, match="the parameter 'teacher_logp'") as refused:
        bind(lambda logp, ref_logp, teacher_logp: logp)
    assert "did you mean" not in str(refused.value)
