"""What is proposed for a parameter that cannot be filled: a field of the same role, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kltest.errors import UsageError
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import FIELDS, WHOSE, suggested_field

ROLES = {word: prefix for prefix, words in WHOSE.items() for word in (*words, *(f"{word}_policy" for word in words))}
ROLES |= dict.fromkeys(("policy", "actor", "pi", "theta"), "")
PLACES = ("{}_{}", "{}_token_{}", "{1}_{0}", "per_token_{}_{}", "{}_action_{}", "{}_{}_")
QUANTITIES = {"logp": "logp", "logps": "logp", "logprobs": "logp", "log_prob": "logp", "logits": "logits"}


@given(st.sampled_from(sorted(ROLES)), st.sampled_from(PLACES), st.sampled_from(sorted(QUANTITIES)))
def test_the_role_and_the_quantity_decide(word, place, quantity):
    name = place.format(word, quantity)
    assert suggested_field(name) == ROLES[word] + QUANTITIES[quantity]
    camel = "".join(part.title() for part in name.split("_"))
    assert suggested_field(camel[0].lower() + camel[1:]) == ROLES[word] + QUANTITIES[quantity]


def test_every_name_that_is_filled_has_the_role_of_its_field():
    """So that the roles cannot contradict the calling convention."""
    for field in ("logp", "ref_logp", "old_logp", "logits", "ref_logits", "old_logits"):
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
    "old_values ref_model policy old_mask ref_advantages log_ratio x temperature target_logp kl kl_weights loss_weight"
)


@pytest.mark.parametrize(
    ("name", "field"),
    [*((name, field) for field, names in NEAR.items() for name in names), *((name, None) for name in UNKNOWN.split())],
)
def test_the_message_proposes_a_field_that_is_near_or_none(name, field):
    scope = {}
    exec(f"def loss({name}): return {name}", scope)
    with pytest.raises(UsageError, match=f"the parameter '{name}' of loss") as refused:
        bind(scope["loss"])
    proposal = f"did you mean {field}, --arg {name}=@{field}?" if field else "did you mean"
    assert (proposal in str(refused.value)) == (field is not None)


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
