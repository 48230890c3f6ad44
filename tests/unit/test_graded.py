"""The rules that decide what is graded of a loss: a loss that needs each, and a sister that must not meet it."""

import pytest
from cases.parts import total as summed

from kltest.grading.options import Options
from kltest.identify import graded
from kltest.identify.graded import kl_part
from kltest.loss.outcome import Call
from kltest.loss.resolve import bind, resolve


def reward_less_penalty(reward, logp, ref_logp, mask, beta):
    return reward - beta * summed(logp - ref_logp, mask)


def reward_less_penalty_and_constant(reward, logp, ref_logp, mask):
    return reward - 0.1 * summed(logp - ref_logp, mask) + 3.0


def half_the_reward_less_penalty(reward, logp, ref_logp, mask, beta):
    return reward / 2 - beta * summed(logp - ref_logp, mask)


def penalty_less_reward(reward, logp, ref_logp, mask):
    return summed(logp - ref_logp, mask) - reward


def mixture(logits, ref_logits, mask, beta=0.5):
    """A Jensen-Shannon divergence, whose `beta` is a weight."""
    middle = (beta * logits.exp() + (1 - beta) * ref_logits.exp()).log()
    both = beta * logits.exp() * (logits - middle) + (1 - beta) * ref_logits.exp() * (ref_logits - middle)
    return summed(both.sum(-1), mask)


def coefficient(logp, ref_logp, mask, beta=0.5):
    return beta * summed(logp - ref_logp, mask).square() / 2


def policy_loss(advantage, logp, ref_logp, mask):
    return 0.1 * summed(logp - ref_logp, mask).square() / 2 - advantage * summed(logp, mask)


def masked_by_rewards(reward, logp, ref_logp, mask):
    """The rewards decide where the KL term counts: they are a part of it."""
    return (reward > 0.5).double() * summed(logp - ref_logp, mask).square() / 2


def of_padding(logp, ref_logp, padding_mask):
    """As torch has it: 1 at padding."""
    return (logp - ref_logp).masked_fill(padding_mask.bool(), 0.0).sum(-1).square() / 2


def of_what_is_no_padding(logp, ref_logp, padding_mask):
    return summed(logp - ref_logp, padding_mask).square() / 2


def without_padding(logp, ref_logp, padding_mask):
    """Has the gradient on live tokens whichever of the two is 1."""
    return (logp - ref_logp).sum(-1).square() / 2


def squared_coefficient(logp, ref_logp, mask, beta=0.5):
    """One KL term, and not the coefficient that is asked for."""
    return beta**2 * summed(logp - ref_logp, mask).square() / 2


def fails(reward, logp):
    raise ValueError("always")


# What changes in a loss by a rule; a loss that meets none is left as it is, but for hints.
RULES = [
    (
        reward_less_penalty,
        None,
        {"shaped": True, "placement": "reward", "unrewarded": True, "less": ""},
        ["RECOGNISED"],
    ),
    (reward_less_penalty, "loss", {"shaped": False, "placement": "loss"}, []),
    (reward_less_penalty_and_constant, None, {"shaped": True, "less": "reference"}, ["RECOGNISED", "REST"]),
    (half_the_reward_less_penalty, None, {"shaped": False, "unrewarded": False}, ["HINT"]),
    (penalty_less_reward, "reward", {"unrewarded": True, "shaped": False}, ["COST"]),
    (penalty_less_reward, "loss", {"unrewarded": False}, []),
    (mixture, None, {"takes_beta": False, "fixed_beta": None}, ["OWN"]),
    (coefficient, None, {"takes_beta": True, "less": "coefficient"}, []),
    (policy_loss, None, {"unrewarded": True, "placement": "loss"}, ["UNREWARDED"]),
    (masked_by_rewards, None, {"unrewarded": False}, []),
    (of_padding, None, {"placement": "loss"}, ["TURNED"]),
    (of_what_is_no_padding, None, {"placement": "loss"}, []),
    (without_padding, None, {"placement": "loss"}, []),
    (squared_coefficient, None, {"takes_beta": True}, []),
    (fails, None, {"unrewarded": False, "shaped": False}, []),
]


@pytest.mark.parametrize(("function", "placement", "changes", "notes"), RULES)
def test_a_rule_changes_the_loss_that_needs_it_and_no_other(function, placement, changes, notes):
    before = bind(function, Call(placement, None, None, {}))
    found = kl_part(before, {"reverse_kl": 1.0}, seed=0)
    assert {name: getattr(found, name) for name in changes} == changes
    new = [text for text in found.notes if text not in before.notes]
    expected = [getattr(graded, name).format(name="beta", value=0.5, names="padding_mask") for name in notes]
    assert new == expected


def test_a_declared_policy_gradient_is_no_other_term():
    found = kl_part(bind(policy_loss, Call()), {"reverse_kl": 0.1, "expected_reward": -1.0}, seed=0)
    assert not found.unrewarded


def test_a_registered_estimator_stays_what_it_is():
    loss = resolve("k1-reward", Call())
    assert kl_part(loss, {"reverse_kl": 1.0}, seed=0) is loss


def test_a_mask_that_was_asked_for_is_not_turned_round():
    asked = Options.of(arguments={"padding_mask": "@mask"}).call
    assert kl_part(bind(of_padding, asked), {"reverse_kl": 1.0}, seed=0).notes == bind(of_padding, asked).notes
