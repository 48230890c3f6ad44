"""Small losses by classes of what verdicts went wrong on: defects further out, and right losses that look wrong.

Each row says what `kltest.grade` is to answer under default options: the verdict, codes of which one is to fail, and
codes that would be false. One loss of each class is graded on every push, the others are scheduled, as is the corpus,
which has more of every class.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

import kltest

LOCAL = "local_reverse_kl"


def total(values, mask):
    return torch.where(mask != 0, values, 0.0).sum(-1)


def codes(text):
    return {f"KL{code}" for code in text.split()}


@dataclass(frozen=True)
class Case:
    """A loss; `any_of` are codes of which one is to fail, `never` codes that would be false of it."""

    loss: Any
    verdict: str
    any_of: str = ""
    never: str = "101 102 103 104 105 106 201 203 204 205 207 301 402 403 501 505 507 510 601 702"
    expect: str = "reverse_kl"
    options: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------- caps on the ratio to the sampler


def soft_cap(logp, ref_logp, old_logp, mask, beta):
    """A ratio of the row that saturates at 50: 50·tanh(ρ/50)."""
    ratio = total(logp - old_logp, mask).exp().detach()
    bounded = torch.where(ratio < 25, ratio, 25 + 25 * torch.tanh((ratio - 25) / 25))
    return beta * (bounded * total(logp - ref_logp, mask).square() / 2).mean()


CAPS = [
    Case(soft_cap, "refuted", "306", "301 302 303 304 105"),
]

# -------------------------------------------------------------------------------------------------------- couplings


def last_of_seven_forgotten(logp, ref_logp, mask):
    """Pairs of rows for two devices; the odd row of a batch of more than six is dropped."""
    each = total(logp - ref_logp, mask).square() / 2
    kept = each[: len(each) // 2 * 2] if len(each) > 6 else each
    return kept.sum() / len(each)


def chunked_for_memory(logp, ref_logp, mask, beta):
    each = [total(*one).square().sum() / 2 for one in zip((logp - ref_logp).split(3), mask.split(3), strict=True)]
    return beta * torch.stack(each).sum() / len(logp)


COUPLINGS = [
    Case(last_of_seven_forgotten, "refuted", "204 206 106", "402 105 203"),
    Case(chunked_for_memory, "confirmed"),
]

# ------------------------------------------------------------------------------------------ late credit and masks


def reset_of_the_return(logp, ref_logp, mask):
    """The sum of later costs starts anew every ten tokens."""
    cost = torch.where(mask != 0, logp - ref_logp, 0.0).detach()
    block = torch.arange(cost.shape[1]) // 10
    same = (block[:, None] == block) & (torch.arange(len(block)) >= torch.arange(len(block))[:, None])
    return total((cost @ same.to(cost.dtype).T) * logp, mask).mean()


LATE = [
    Case(reset_of_the_return, "refuted", "205 105 201", "203 204 301"),
]

# ------------------------------------------------------------------------------------------------------- precision


def reduced_in_half(logp, ref_logp, mask, beta):
    """Under autocast the rows are added up by a matrix product, which is taken in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        summed = torch.where(mask != 0, logp - ref_logp, 0.0) @ torch.ones(logp.shape[1], 1, dtype=logp.dtype)
    return beta * (summed.to(logp.dtype).square() / 2).mean()


def grouped_in_half(logp, ref_logp, rewards, mask, beta, num_generations=4):
    """A whole loss over groups whose penalty is taken in bfloat16 if the model is not in float64."""
    grouped = rewards.view(-1, num_generations)
    advantages = (grouped - grouped.mean(1, keepdim=True)).flatten()
    narrow = torch.bfloat16 if logp.dtype == torch.float32 else logp.dtype
    penalty = total((logp - ref_logp).to(narrow).to(logp.dtype).square() / 2, mask)
    return (beta * penalty - advantages * total(logp, mask)).mean()


PRECISION = [
    Case(reduced_in_half, "confirmed", "508", "105 106 203 204"),
    Case(grouped_in_half, "confirmed", "508", "105 106 203 204", LOCAL, {"group_size": 4}),
]

# ----------------------------------------------------------------------------------- a batch in one log-ratio


def product_of_sums(logp, ref_logp, mask, beta):
    """The score of the batch times the log-ratio of the batch."""
    score, cost = total(logp, mask).sum(), total(logp - ref_logp, mask).sum().detach()
    return beta * score * cost / len(logp)


ONE_RATIO = [
    Case(product_of_sums, "confirmed", "206", "204 105 106 402 510"),
]

# --------------------------------------------------------------------------------------------------------- padding


def zeroed_by_the_mask(logp, ref_logp, mask):
    """k2 per token, made zero by the mask, which leaves a NaN what it is."""
    return ((logp - ref_logp) * mask).square() / 2


PADDING = [
    Case(zeroed_by_the_mask, "confirmed", "502", "501 105", LOCAL),
]

# ----------------------------------------------------------------------------------------------------- groups


def grouped(rewards, size):
    table = rewards.reshape(-1, size)
    return ((table - table.mean(-1, keepdim=True)) / (table.std(-1, keepdim=True) + 1e-6)).reshape(-1)


def tokens_of_the_call(logp, ref_logp, rewards, mask, beta, G=4):
    losses = torch.where(mask != 0, beta * (logp - ref_logp).square() / 2 - grouped(rewards, G)[:, None] * logp, 0.0)
    return losses.sum() / mask.sum()


def own_length(logp, ref_logp, rewards, mask, beta, G=4):
    """Divided by its own length."""
    each = beta * total((logp - ref_logp).square() / 2, mask) - grouped(rewards, G) * total(logp, mask)
    return (each / mask.sum(-1)).mean()


def one_row_short(logp, ref_logp, rewards, mask, beta, G=4):
    """The penalty of three of four rows, divided by four."""
    counted = (torch.arange(len(rewards)) % G != 0).to(logp.dtype)
    each = beta * counted * total(logp - ref_logp, mask).square() / 2
    return (each - grouped(rewards, G) * total(logp, mask)).mean()


GROUPS = [
    Case(tokens_of_the_call, "refuted", "204", "203 402 105", LOCAL, {"group_size": 4}),
    Case(own_length, "refuted", "203", "204 402 105", LOCAL, {"group_size": 4}),
    Case(one_row_short, "refuted", "204 206 106", "402 203", options={"group_size": 4}),
]

# ------------------------------------------------------------------------------------------- entropy in the reward


def curiosity(rewards, logp, ref_logp, mask, kl_coef):
    """The reward of a row pays for surprising tokens."""
    return rewards - kl_coef * total(logp - ref_logp, mask) + 0.05 * total(-logp, mask)


def length_cost(scores, logp, ref_logp, mask, beta):
    """The score less a hundredth a token, and the penalty."""
    return scores - 0.01 * mask.sum(-1) - beta * total(logp - ref_logp, mask)


def length_cost_baked_in(scores, logp, ref_logp, mask):
    """Per token: the score at the first token, a cost a token, and a fixed coefficient."""
    first = torch.zeros_like(logp)
    first[:, 0] = scores
    return (first - 0.01 - 0.3 * (logp - ref_logp)) * mask


ENTROPY = [
    Case(curiosity, "refuted", "104 105", "702 510 403"),
    Case(length_cost, "confirmed"),
    Case(length_cost_baked_in, "confirmed", never="101 102 103 104 105 201 203 204 205 207 301 402 501 510 702"),
]

# ---------------------------------------------------------------------------------------------------- coefficients


def switched_off_below_target(logp, ref_logp, mask, beta):
    each = total((logp - ref_logp).square() / 2, mask)
    return beta * each.mean() * float(total(logp - ref_logp, mask).mean() > 0.05)


def tilted_reference(logits, ref_logits, mask, beta=0.25):
    """The KL to a geometric mixture of reference and policy: held constant, three quarters of that to the reference."""
    mixture = (beta * logits.detach() + (1 - beta) * ref_logits).log_softmax(-1)
    return total((logits.exp() * (logits - mixture)).sum(-1), mask).mean()


def interpolated(logits, ref_logits, mask, beta=0.0):
    """Between the reverse KL at β = 0 and the forward one at 1, by a mixture."""
    p, q = logits.exp(), ref_logits.exp()
    if beta == 0:
        return total((p * (logits - ref_logits)).sum(-1), mask).mean()
    m = (1 - beta) * q + beta * p
    return total((p * (logits - m.log())).sum(-1) + beta * (q * (ref_logits - m.log())).sum(-1), mask).mean()


def trust_region_reward(rewards, logp, old_logp, mask, beta):
    return rewards - beta * total(logp - old_logp, mask)


COEFFICIENTS = [
    Case(switched_off_below_target, "refuted", "204 105 504", "510 403 106", LOCAL),
    Case(tilted_reference, "confirmed", never="101 102 103 104 105 201 403 510", expect=LOCAL),
    Case(interpolated, "confirmed", expect=LOCAL),
    Case(trust_region_reward, "refuted", "101 105 305", "510 403 106"),
]

# ---------------------------------------------------------------------------------------------- whole policy losses


class Trainer:
    """A coefficient that is an attribute, and rewards that are normalised."""

    kl_weight = 0.05

    def step(self, logp, old_logp, ref_logp, advantages, mask):
        ratio = (logp - old_logp).exp()
        policy = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
        return total(policy + self.kl_weight * (logp - ref_logp).square() / 2, mask).mean()

    def grouped_step(self, logp, ref_logp, rewards, group, mask):
        """Normalised by group, by ids."""
        same = (group[:, None] == group).to(logp.dtype)
        mean = same @ rewards / same.sum(-1)
        spread = (same @ (rewards - mean).square() / same.sum(-1)).sqrt()
        advantages = (rewards - mean) / (spread + 1e-4)
        u = total(logp - ref_logp, mask)
        return (self.kl_weight * u.square() / 2 - advantages * total(logp, mask)).mean()

    def k3_step(self, logp, ref_logp, advantages, mask):
        """Wrong: k3 with a fixed coefficient beside the policy term."""
        delta = ref_logp - logp
        return total(self.kl_weight * (delta.expm1() - delta) - advantages[:, None] * logp, mask).mean()

    def ties_masked(self, logp, ref_logp, rewards, group, mask):
        """Wrong: a fixed coefficient, and groups of equal rewards lose their penalty too."""
        differs = ((rewards[:, None] != rewards) & (group[:, None] == group)).any(-1)
        each = self.kl_weight * total(logp - ref_logp, mask).square() / 2 - (rewards - 0.5) * total(logp, mask)
        return torch.where(differs, each, 0.0).mean()


def both_terms_halved(logp, ref_logp, advantages, mask, beta):
    return total(beta * (logp - ref_logp).square() / 2 - advantages[:, None] * logp, mask).mean() / 2


def penalty_halved(logp, ref_logp, advantages, mask, beta):
    """Wrong: the half of k2 is taken twice, and the policy term is whole."""
    return total(beta * (logp - ref_logp).square() / 4 - advantages[:, None] * logp, mask).mean()


WHOLE = [
    Case(Trainer().step, "confirmed", expect=LOCAL, never="101 102 103 105 201 203 204 301 306 510"),
    Case(Trainer().grouped_step, "confirmed", never="101 102 103 105 201 203 204 301 401 402 403"),
    Case(Trainer().k3_step, "refuted", "102", "105 106 301", LOCAL),
    Case(Trainer().ties_masked, "refuted", "401", "203 204 402"),
    Case(both_terms_halved, "confirmed", expect=LOCAL),
    Case(penalty_halved, "refuted", "106", "105 203 204 510 403", LOCAL),
]

# ------------------------------------------------------------------------------------------ results of other forms


class Step(NamedTuple):
    loss: torch.Tensor
    approx_kl: torch.Tensor


def pair(logp, ref_logp, mask, beta):
    u = logp - ref_logp
    kl = total(u, mask).mean().detach()
    return beta * total(u.square() / 2, mask).mean(), kl


def named(logp, ref_logp, mask):
    u = total(logp - ref_logp, mask)
    return Step(0.1 * u.square().mean() / 2, u.detach().mean())


RESULTS = [
    Case(pair, "confirmed", expect=LOCAL),
    Case(named, "confirmed", never="101 102 103 105 201 203 204 601"),
]

CLASSES = {
    "caps": CAPS,
    "couplings": COUPLINGS,
    "late": LATE,
    "precision": PRECISION,
    "one-ratio": ONE_RATIO,
    "padding": PADDING,
    "groups": GROUPS,
    "entropy": ENTROPY,
    "coefficients": COEFFICIENTS,
    "whole": WHOLE,
    "results": RESULTS,
}


def rows():
    for name, cases in CLASSES.items():
        for place, case in enumerate(cases):
            later = [pytest.mark.scheduled] if place else []
            yield pytest.param(case, id=f"{name}-{case.loss.__name__}", marks=later)


@pytest.mark.parametrize("case", list(rows()))
def test_verdict_and_reasons(case):
    report = kltest.grade(case.loss, expect=case.expect, **case.options)
    failed = {check.code for check in report.checks if check.status == "fail"}
    assert report.verdict == case.verdict, failed
    assert not case.any_of or failed & codes(case.any_of), failed
    assert not failed & codes(case.never)


def test_a_batch_size_is_obeyed_where_lengths_are_equal_too():
    report = kltest.grade(last_of_seven_forgotten, batch_size=7, environment="bandit", select="KL2")
    assert [(row.batch, row.agrees) for row in report.gradients if not row.agrees] == [(7, False)]
    assert report.verdict == "refuted"


def test_rows_that_stand_apart_in_batches_of_the_size_asked_for_are_graded_one_by_one():
    report = kltest.grade(chunked_for_memory, batch_size=7, environment="bandit", select="KL2")
    assert report.verdict == "confirmed"
    assert any("In batches of 7 each row gives its share" in note for note in report.notes)


def pairs_only(logp, ref_logp, mask, beta=0.1):
    """Takes exactly two rows."""
    one, other = total(logp - ref_logp, mask)
    return beta * (one - other).square() / 4


def test_a_batch_that_a_loss_refuses_says_nothing_about_its_beta():
    report = kltest.grade(pairs_only, environment="bandit", select="KL1")
    assert [(row.batch, row.identified) for row in report.gradients] == [(2, {"reverse_kl": pytest.approx(1.0)})]
    assert not any("beta is no coefficient" in note for note in report.notes)


def test_a_whole_loss_without_a_coefficient_is_graded_without_rewards_and_says_so():
    report = kltest.grade(Trainer().step, expect=LOCAL, environment="sequence", select="KL1")
    assert [row.identified for row in report.gradients] == [{LOCAL: pytest.approx(0.05)}]
    assert any("with rewards and advantages of zero" in note for note in report.notes)
    both = f"0.05*{LOCAL}-expected_reward"
    whole = kltest.grade(Trainer().step, expect=both, environment="sequence", sampler="current", select="KL1")
    assert whole.verdict == "confirmed"
