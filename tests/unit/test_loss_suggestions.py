"""What is proposed for a parameter that cannot be filled: a field of the same role, or nothing."""

from __future__ import annotations

import re

import pytest

from kltest.errors import UsageError
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import FIELDS


def proposed(name):
    """The field that the message proposes for a parameter of that name."""
    scope = {}
    exec(f"def loss({name}): return {name}", scope)
    with pytest.raises(UsageError, match=f"the parameter '{name}' of loss") as refused:
        bind(scope["loss"])
    found = re.search(r"did you mean (\w+), --arg (\w+)=@(\w+)\?", str(refused.value))
    if found is None:
        assert "did you mean" not in str(refused.value)
        return None
    assert (found[1], found[2]) == (found[3], name)
    return found[1]


ROLES = {
    "logp": ("curr", "current", "cur", "new", "policy", "actor", "pi", "theta", "new_policy", "trainer", "student"),
    "ref_logp": ("ref", "reference", "base", "teacher", "ref_policy", "reference_actor", "base_policy"),
    "old_logp": (
        "old",
        "prev",
        "previous",
        "behavior",
        "behaviour",
        "sampler",
        "rollout",
        "mu",
        "old_policy",
        "inference",
        "gen",
    ),
}
QUANTITIES = (
    "{}_logprobs_",
    "{}_token_logps",
    "log_probs_{}_",
    "per_token_{}_logps",
    "{}_action_log_prob",
    "{}Logprobs",
)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_the_role_decides(quantity):
    for field, words in ROLES.items():
        assert {word: proposed(quantity.format(word)) for word in words} == dict.fromkeys(words, field)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("curr_logprobs", "logp"),
        ("prev_logprobs", "old_logp"),
        ("policy_logprobs", "logp"),
        ("per_token_ref_logps", "ref_logp"),
        ("oldlogprobs", "old_logp"),
        ("reflogp", "ref_logp"),
        ("logpi_ref", "ref_logp"),
        ("log_pi", "logp"),
        ("log_mu", "old_logp"),
        ("reference_logits", "ref_logits"),
        ("behavior_logits", "old_logits"),
        ("policy_logits", "logits"),
        # Near spellings of a name that would be filled.
        ("reff_logp", "ref_logp"),
        ("logp_", "logp"),
        ("completions_mask", "mask"),
        ("advantags", "advantage"),
        ("reward_", "reward"),
        ("token", "tokens"),
        ("kl_coeffs", "beta"),
        ("KL_COEFFICIENT", "beta"),
        ("kl_loss_weight", "beta"),
    ],
)
def test_known_names(name, field):
    assert proposed(name) == field


@pytest.mark.parametrize(
    "name",
    [
        "old_ref_logprobs",  # of two roles
        "curr_old_logp",
        "student_teacher_logprobs",
        "critic_logprobs",  # of a role of its own
        "ref_chosen_logps",
        "policy_rejected_logprobs",
        "old_values",  # no log-probs
        "ref_model",
        "policy",
        "old_mask",
        "ref_advantages",
        "log_ratio",
        "x",
        "temperature",
        "target_logp",
        "kl",
        "kl_weights",  # of tokens or rows, most likely
        "loss_weight",
    ],
)
def test_nothing_is_proposed_where_the_role_is_unknown(name):
    assert proposed(name) is None


def test_every_name_that_is_filled_has_the_role_of_its_field():
    """So that the roles cannot contradict the calling convention."""
    from kltest.names import suggested_field

    for field in ("logp", "ref_logp", "old_logp", "logits", "ref_logits", "old_logits"):
        for alias in (field, *FIELDS[field].aliases):
            assert suggested_field(alias) == field


def test_parameters_of_another_role_are_not_proposed_for_an_argument():
    def loss(logp, ref_logprobs, old_logprobs):
        return logp

    for argument in ("curr_logprobs", "pre_logprobs", "reference_logprobs"):
        with pytest.raises(UsageError, match="its parameters are logp, ref_logprobs, old_logprobs"):
            bind(loss, Call(arguments={argument: "@logp"}))
    with pytest.raises(UsageError, match="did you mean 'ref_logprobs'"):
        bind(loss, Call(arguments={"ref_logprob": "@logp"}))


def test_a_field_that_another_parameter_takes_is_not_proposed():
    def loss(logp, ref_logp, teacher_logp):
        return logp

    with pytest.raises(UsageError) as refused:
        bind(loss)
    assert "the parameter 'teacher_logp'" in str(refused.value)
    assert "did you mean" not in str(refused.value)
