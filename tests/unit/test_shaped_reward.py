"""Shaped rewards: what is left of a reward after a KL penalty, in the ways in which trainers write it."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import pytest
import torch

import kltest
from kltest.loss.outcome import Call
from kltest.loss.resolve import bind
from kltest.rollout import Rollout


def summed(values, mask):
    return torch.where(mask != 0, values, 0.0).sum(-1)


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


def codes(report):
    return {check.code for check in report.errors}


def notes(report):
    return " ".join(report.notes)


@pytest.mark.parametrize(
    ("shape", "placement"),
    [*((shape, None) for shape in RIGHT), *((token_scores, place) for place in ("reward", "shaped-reward"))],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else type(value).__name__),
)
def test_right_ones_are_confirmed_however_placed(shape, placement):
    report = kltest.grade(shape, placement=placement, environment="sequence,ragged", ignore="KL5,KL8")
    assert report.verdict == "confirmed", report
    assert report.placement == "shaped-reward"
    for row in report.gradients:
        assert row.identified == {"reverse_kl": pytest.approx(RIGHT[shape], rel=1e-4)}
    assert ("rises by one with the reward" in notes(report)) == (placement != "shaped-reward")


@pytest.mark.parametrize("placement", [None, "shaped-reward"])
@pytest.mark.parametrize("shape", WRONG, ids=lambda shape: shape.__name__)
def test_wrong_ones_are_refuted_for_what_is_wrong_with_them(shape, placement):
    report = kltest.grade(shape, placement=placement, environment="sequence,ragged", ignore="KL5,KL8")
    assert (report.verdict, report.placement) == ("refuted", "shaped-reward")
    assert WRONG[shape] in codes(report)


def test_an_entropy_bonus_beside_the_penalty_counts_though_beta_does_not_multiply_it():
    report = kltest.grade(entropy_bonus, environment="sequence", select="KL1")
    assert (report.verdict, report.placement) == ("refuted", "shaped-reward")


def test_credit_decides_which_tokens_answer():
    options = {"environment": "sequence,ragged", "select": "KL2"}
    to_go = kltest.grade(score_at_the_last_token, credit="to-go", **options)
    assert (to_go.verdict, to_go.credit, to_go.placement) == ("confirmed", "to-go", "shaped-reward")
    immediate = kltest.grade(score_at_the_last_token, credit="immediate", **options)
    assert immediate.verdict == "refuted"
    assert "KL201" in codes(immediate)


@pytest.mark.parametrize("placement", ["loss", "both"])
def test_an_explicit_placement_wins(placement):
    report = kltest.grade(advantage_less_penalty, placement=placement, environment="bandit", select="KL1")
    assert report.placement == placement
    assert report.verdict == "refuted"
    assert "shaped" not in notes(report)


@pytest.mark.parametrize(("shape", "code"), [(no_reward_read, "KL103"), (entropy_without_reward, "KL105")])
def test_a_value_that_reads_no_reward_is_a_cost_and_the_other_reading_is_named(shape, code):
    report = kltest.grade(shape, placement="reward", environment="bandit", select="KL1")
    assert report.placement == "reward"
    [check] = report.errors
    assert check.code == code
    assert "--placement shaped-reward" in check.message
    assert kltest.grade(no_reward_read, placement="shaped-reward", environment="bandit").verdict == "confirmed"


def test_a_cost_that_is_called_a_reward_is_told_so():
    def cost(logp, ref_logp, mask):
        return summed(logp - ref_logp, mask)

    [check] = kltest.grade(cost, placement="shaped-reward", environment="bandit", select="KL1").errors
    assert check.code == "KL103"
    assert "--placement reward." in check.message


@pytest.mark.parametrize("shape", [centred, whitened, doubled])
def test_other_positive_slopes_get_the_hint(shape):
    report = kltest.grade(shape, placement="reward", environment="bandit", select="KL1", batch_size=2)
    assert report.placement == "reward"
    assert "grade it with --placement shaped-reward" in notes(report)
    asked = kltest.grade(shape, placement="shaped-reward", environment="bandit", select="KL1", batch_size=2)
    assert (asked.verdict, asked.placement) == ("confirmed", "shaped-reward")


def test_a_falling_value_is_a_cost_that_contains_the_reward():
    report = kltest.grade(cost_with_reward, placement="reward", environment="sequence", select="KL1,KL2")
    assert (report.verdict, report.placement) == ("confirmed", "reward")
    assert "falls by one" in notes(report)
    assert report.gradients[0].identified == {"reverse_kl": pytest.approx(0.3)}


@pytest.mark.parametrize("loss", [policy_loss, policy_objective])
def test_what_moves_the_gradient_with_the_reward_is_a_loss(loss):
    report = kltest.grade(loss, environment="bandit", select="KL1")
    assert report.placement == "loss"
    assert "shaped" not in notes(report)
    assert report.verdict == ("confirmed" if loss is policy_loss else "refuted")


def test_the_report_is_valid_by_the_schema():
    report = json.loads(kltest.grade(Shaper(), environment="bandit").to_json())
    schema = json.loads((files("kltest.render") / "grade-2.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, schema)
    assert report["placement"] == "shaped-reward"


def test_the_counterexample_is_a_program_of_its_own():
    report = kltest.grade(paid_for_the_kl, environment="bandit", select="KL1")
    assert report.smallest is not None
    assert "-paid_for_the_kl(torch.zeros(" in report.smallest.code
    printed = []
    exec(report.smallest.code, {"print": printed.append})
    assert printed[0] != printed[1]


def test_a_shaped_reward_is_called_without_reward_and_negated():
    rollout = Rollout.of(kltest.environments.Instance.draw(kltest.environments.ragged(3, 3), 0))
    seen = {}

    def shape(rewards, advantages, logp):
        seen.update(rewards=rewards.clone(), advantages=advantages.clone())
        return rewards + logp.sum(-1)

    outcome = bind(shape, Call(placement="shaped-reward"))(rollout)
    assert not seen["rewards"].any()
    assert not seen["advantages"].any()
    assert torch.equal(outcome.value, -rollout.peek("logp").detach().sum(-1))
