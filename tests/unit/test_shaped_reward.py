"""Shaped rewards: what is left of a reward after a KL penalty, in the ways in which trainers write it."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch
from called import RAGGED
from cases.parts import total as summed
from doors import SCHEMA
from weekly import first, spread

import kltest
from kltest.loss.outcome import Call
from kltest.loss.resolve import bind

# Right: k1 in the reward, whatever is done with the score.


def score_at_the_last_token(logprobs, ref_logprobs, scores, response_mask, kl_coef):
    """As PPO trainers do: the penalty on every token, the score added in place at the end of the response."""
    with torch.no_grad():
        rewards = -kl_coef * torch.where(response_mask != 0, logprobs - ref_logprobs, 0.0)
        rows, ends = torch.arange(len(scores)), response_mask.long().sum(1) - 1
        rewards[rows, ends] += scores
    return rewards


def clamped_score_scattered(rewards, logps, ref_logps, action_mask, clip: float = 2.0):
    """The coefficient is written into it; the score is clamped and scattered to the last live column."""
    last = action_mask.shape[1] - 1 - action_mask.long().fliplr().argmax(dim=1, keepdim=True)
    penalty = -0.05 * (logps - ref_logps).masked_fill(action_mask == 0, 0.0)
    return penalty + torch.zeros_like(penalty).scatter(1, last, rewards.clamp(-clip, clip)[:, None])


def token_scores(token_level_scores, log_probs, ref_log_prob, response_mask, beta):
    """Scores a token, which do not go with one score a response; returned with what is logged."""
    kl = torch.where(response_mask.bool(), log_probs - ref_log_prob, 0.0)
    return token_level_scores * response_mask - beta * kl, {"reward_kl": kl.sum(-1).mean().item()}


class Shaper:
    """Sequence scores, with what the reward model gives scaled to where it was."""

    coefficient = 0.2

    def __call__(self, scores, logp, ref_logp, mask):
        shift = 3.0
        return (scores + shift) - shift - self.coefficient * summed(logp - ref_logp, mask).detach()


def advantage_less_penalty(advantages, logp, ref_logp, mask, kl_coef):
    """The advantage on every token, through the mask."""
    return advantages[:, None] * mask - kl_coef * torch.where(mask != 0, logp - ref_logp, 0.0)


def in_float32(rewards, logp, ref_logp, mask, beta):
    """Computed as a reward worker does it, in float32."""
    return rewards.float() - beta * summed((logp - ref_logp).float(), mask)


RIGHT = {
    score_at_the_last_token: 1.0,
    clamped_score_scattered: 0.05,
    token_scores: 1.0,
    Shaper(): 0.2,
    advantage_less_penalty: 1.0,
    in_float32: 1.0,
}

# Wrong in one way each.


def k3_in_the_reward(scores, logp, ref_logp, mask, beta):
    delta = torch.where(mask != 0, ref_logp - logp, 0.0)
    return scores - beta * (delta.exp() - delta - 1).sum(-1)


def paid_for_the_kl(token_level_scores, log_probs, ref_log_probs, response_mask):
    scores = torch.where(response_mask != 0, token_level_scores, 0.0)
    return scores + 0.1 * torch.where(response_mask != 0, log_probs - ref_log_probs, 0.0)


def last_token_alone(rewards, logprob, ref_logprob, mask, kl_coef):
    last = mask.long().sum(1, keepdim=True) - 1
    return rewards - kl_coef * (logprob - ref_logprob).gather(1, last).squeeze(1)


def against_the_sampler(rewards, logprobs, old_logprobs, mask):
    return rewards - 0.1 * summed(logprobs - old_logprobs, mask)


def entropy_bonus(scores, logprobs, ref_logprobs, mask, kl_coef):
    return scores - kl_coef * summed(logprobs - ref_logprobs, mask) - 0.2 * summed(logprobs, mask)


WRONG = {
    k3_in_the_reward: "KL104",
    paid_for_the_kl: "KL103",
    last_token_alone: "KL105",
    against_the_sampler: "KL101",
}

# Neither loss nor reward at first sight.


def no_reward_read(logp, ref_logp, mask, beta):
    return -beta * summed(logp - ref_logp, mask)


def entropy_without_reward(logp, ref_logp, mask):
    return -summed(logp - ref_logp, mask) - 0.1 * summed(logp, mask)


def centred(rewards, logp, ref_logp, mask, beta):
    return rewards - rewards.mean() - beta * summed(logp - ref_logp, mask)


def whitened(scores, logp, ref_logp, mask, beta):
    return (scores - scores.mean()) / (scores.std() + 1e-6) - beta * summed(logp - ref_logp, mask)


def doubled(rewards, logp, ref_logp, mask, beta):
    return 2 * rewards - beta * summed(logp - ref_logp, mask)


def cost_with_reward(rewards, logp, ref_logp, mask):
    return 0.3 * summed(logp - ref_logp, mask) - rewards


def policy_loss(advantages, logp, ref_logp, mask, beta):
    return beta * summed(logp - ref_logp, mask).square() / 2 - advantages * summed(logp, mask)


def policy_objective(advantages, logp, ref_logp, mask, beta):
    """To be maximised: its value rises by one with the advantage, and so does its gradient."""
    ratio = (summed(logp, mask) - summed(logp, mask).detach()).exp()
    return ratio * advantages - beta * summed(logp - ref_logp, mask).square() / 2


SHORT = {"environment": "sequence,ragged", "ignore": "KL5,KL8"}
ONE = {"environment": "bandit", "select": "KL1"}
PAIRS = {**ONE, "batch_size": 2}
RISES, HINT = "rises by one with the reward", "grade it with --placement shaped-reward"


@pytest.mark.parametrize(
    ("shape", "placement"),
    first(1, [*((shape, None) for shape in RIGHT), *((token_scores, place) for place in ("reward", "shaped-reward"))]),
)
def test_right_ones_are_confirmed_however_placed(shape, placement):
    report = kltest.grade(shape, placement=placement, **SHORT)
    assert (report.verdict, report.placement) == ("confirmed", "shaped-reward"), report
    for row in report.gradients:
        assert row.identified == {"reverse_kl": pytest.approx(RIGHT[shape], rel=1e-4)}
    assert (RISES in " ".join(report.notes)) == (placement != "shaped-reward")
    jsonschema.validate(json.loads(report.to_json()), SCHEMA)


@pytest.mark.parametrize("placement", first(1, [None, "shaped-reward"]))
@pytest.mark.parametrize(("shape", "code"), first(2, WRONG.items()))
def test_wrong_ones_are_refuted_for_what_is_wrong_with_them(shape, code, placement):
    report = kltest.grade(shape, placement=placement, **SHORT)
    assert (report.verdict, report.placement) == ("refuted", "shaped-reward")
    assert code in {check.code for check in report.errors}


@pytest.mark.parametrize(
    ("shape", "options", "verdict", "placement", "words"),
    spread(
        5,
        [
            # Credit decides which tokens answer.
            (score_at_the_last_token, {"credit": "to-go", "select": "KL2"}, "confirmed", "shaped-reward", RISES),
            (score_at_the_last_token, {"credit": "immediate", "select": "KL2"}, "refuted", "shaped-reward", RISES),
            # An entropy bonus beside the penalty counts, though β does not multiply it.
            (entropy_bonus, {"environment": "sequence", "select": "KL1"}, "refuted", "shaped-reward", RISES),
            # An explicit placement wins.
            (advantage_less_penalty, {**ONE, "placement": "loss"}, "refuted", "loss", ""),
            (advantage_less_penalty, {**ONE, "placement": "both"}, "refuted", "both", ""),
            # A value that reads no reward is a cost, unless it is declared to be a reward.
            (no_reward_read, {**ONE, "placement": "shaped-reward"}, "confirmed", "shaped-reward", ""),
            # Other positive slopes get the hint.
            *(
                (shape, {**PAIRS, "placement": "reward"}, None, "reward", HINT)
                for shape in (centred, whitened, doubled)
            ),
            *(
                (shape, {**PAIRS, "placement": "shaped-reward"}, "confirmed", "shaped-reward", "")
                for shape in (centred, whitened, doubled)
            ),
            # A falling value is a cost that contains the reward.
            (cost_with_reward, {**SHORT, "placement": "reward"}, "confirmed", "reward", "falls by one"),
            # What moves the gradient with the reward is a loss.
            (policy_loss, ONE, "confirmed", "loss", ""),
            (policy_objective, ONE, "refuted", "loss", ""),
        ],
    ),
)
def test_what_a_value_is_taken_for(shape, options, verdict, placement, words):
    report = kltest.grade(shape, **options)
    assert report.placement == placement
    assert verdict in (None, report.verdict)
    notes = " ".join(report.notes)
    assert words in notes if words else "shaped" not in notes
    assert options.get("credit") in (None, report.credit)


def cost(logp, ref_logp, mask):
    return summed(logp - ref_logp, mask)


@pytest.mark.parametrize(
    ("shape", "placement", "code", "other"),
    [
        (no_reward_read, "reward", "KL103", "--placement shaped-reward"),
        (entropy_without_reward, "reward", "KL105", "--placement shaped-reward"),
        (cost, "shaped-reward", "KL103", "--placement reward."),
    ],
)
def test_the_other_reading_is_named(shape, placement, code, other):
    report = kltest.grade(shape, placement=placement, **ONE)
    assert report.placement == placement
    check = next(one for one in report.errors if one.code == code)
    assert other in check.message


def test_the_counterexample_is_a_program_of_its_own():
    report = kltest.grade(paid_for_the_kl, **ONE)
    assert "-paid_for_the_kl(torch.zeros(" in report.smallest.code
    printed = []
    exec(report.smallest.code, {"print": printed.append})
    assert printed[0] != printed[1]


def test_a_shaped_reward_is_called_without_reward_and_negated():
    seen = {}

    def shape(rewards, advantages, logp):
        seen.update(rewards=rewards.clone(), advantages=advantages.clone())
        return rewards + logp.sum(-1)

    outcome = bind(shape, Call(placement="shaped-reward"))(RAGGED)
    assert not seen["rewards"].any()
    assert not seen["advantages"].any()
    assert torch.equal(outcome.value, -RAGGED.peek("logp").detach().sum(-1))
