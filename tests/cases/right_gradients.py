"""Correct losses, written as differently as people write them: none may fail a check."""

import torch
import torch.nn.functional as F
from cases.table import right
from torch import nn

# ½(Σu)² and its spellings.


def half_square_of_the_sum(logp, ref_logp, mask):
    log_ratio = torch.where(mask.bool(), logp - ref_logp.detach(), 0.0).sum(dim=-1)
    return 0.5 * log_ratio.pow(2).mean()


def added_up_over_the_batch(logp, ref_logp, mask):
    return half_square_of_the_sum(logp, ref_logp, mask) * len(logp)


def compiled(logp, ref_logp, mask):
    @torch.compile
    def sequence_log_ratio(own, other, live):
        return torch.where(live, own - other, 0.0).sum(-1)

    return sequence_log_ratio(logp, ref_logp, mask != 0).square().mean() / 2


class SequencePenalty(nn.Module):
    """A loss as a module, computing in float32 and giving back what it was given."""

    def forward(self, logp, ref_logp, mask):
        delta = (logp.float() - ref_logp.float()).masked_fill(~mask.bool(), 0)
        return delta.sum(-1).square().mul(0.5).to(logp.dtype)


# The score function with a return, or with what is still to come.


def to_go_by_a_loop(logp, ref_logp, mask):
    """Backwards in time, as the returns of an actor-critic loop."""
    live, running, terms = mask.bool(), torch.zeros(len(logp), dtype=logp.dtype), []
    for step in range(logp.shape[1] - 1, -1, -1):
        here = live[:, step]
        running = running + torch.where(here, (logp[:, step] - ref_logp[:, step]).detach(), 0.0)
        terms.append(running * torch.where(here, logp[:, step], 0.0))
    return torch.stack(terms, dim=1).sum(1)


def constant_baseline(logp, ref_logp, mask):
    """A number that does not depend on the rollout has no gradient in expectation."""
    live = mask.bool()
    cost = torch.where(live, logp - ref_logp, 0.0).sum(-1).detach()
    return ((cost - 0.7) * torch.where(live, logp, 0.0).sum(-1)).mean()


def k1_returned_as_a_reward(logp, ref_logp):
    return (logp - ref_logp).detach()


def both_placements(logp, ref_logp):
    """A sum that is its own reward; the derivative that it adds in the loss has mean zero."""
    return logp - ref_logp


# From logits.


def rao_blackwellised(logits, ref_logits, logp, mask):
    """Each next token's exact KL, and in the score of what led to it."""
    live = (mask != 0).unsqueeze(-1)
    own, other = (part.where(live, 0.0).log_softmax(-1) for part in (logits, ref_logits))
    divergence = (own.exp() * (own - other)).sum(-1).where(mask != 0, 0.0)
    later = divergence.detach().flip(1).cumsum(1).flip(1) - divergence.detach()
    return (divergence + later * logp.where(mask != 0, 0.0)).sum(-1)


def gathered_from_logits(logits, ref_logits, completion_ids, completion_mask):
    live = completion_mask.bool()
    picked = completion_ids.unsqueeze(-1)
    own = torch.log_softmax(logits.masked_fill(~live.unsqueeze(-1), 0.0), -1).gather(-1, picked).squeeze(-1)
    with torch.no_grad():
        other = torch.log_softmax(ref_logits, -1).gather(-1, picked).squeeze(-1)
        cost = torch.where(live, own - other, 0.0).sum(-1)
    return -(-cost * torch.where(live, own, 0.0).sum(-1)).mean()


def local_by_kl_div(logits, ref_logits, mask):
    """torch's own divergence, whose arguments stand the other way round."""
    live = mask.bool()
    own, other = logits[live].log_softmax(-1), ref_logits[live].log_softmax(-1)
    return F.kl_div(other, own, log_target=True, reduction="none").sum() / len(mask)


def local_by_cross_entropy_and_entropy(logits, ref_logits):
    own = torch.distributions.Categorical(logits=logits)
    return -(own.probs * ref_logits).sum(-1) - own.entropy()


# Rollouts of another policy.


def whole_sequence_ratio(logp, ref_logp, old_logp, mask):
    live = mask.bool()
    weight = torch.where(live, logp.detach() - old_logp, 0.0).sum(-1).exp()
    return weight * torch.where(live, logp - ref_logp, 0.0).sum(-1).square() / 2


def prefix_ratios_and_to_go(logp, ref_logp, old_logp, mask):
    live = mask.bool()
    weight = torch.where(live, (logp - old_logp).detach(), 0.0).cumsum(-1).exp()
    weighted = weight * torch.where(live, (logp - ref_logp).detach(), 0.0)
    to_go = weighted + weighted.sum(-1, keepdim=True) - weighted.cumsum(-1)
    return (to_go * torch.where(live, logp, 0.0)).sum(-1).mean()


# Whole objectives: what β multiplies is judged.


def ppo(logp, old_logp, advantages, ref_logp, mask, beta, clip=0.2):
    live = mask.bool()
    ratio = torch.where(live, logp - old_logp, 0.0).exp()
    one, two = ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None]
    policy_loss = -torch.minimum(one, two).masked_fill(~live, 0.0).sum(-1)
    weight = torch.where(live, logp - old_logp, 0.0).sum(-1).exp().detach()
    penalty = weight * torch.where(live, logp - ref_logp, 0.0).sum(-1).square() / 2
    return (policy_loss + beta * penalty).mean()


def reinforce_with_shaped_rewards(logp, ref_logp, rewards, mask, kl_coef):
    """The penalty in the reward, as RLHF began."""
    live = mask.bool()
    with torch.no_grad():
        shaped = rewards - kl_coef * torch.where(live, logp - ref_logp, 0.0).sum(-1)
    return -(shaped * torch.where(live, logp, 0.0).sum(-1)).mean()


def entropy_bonus_besides(logp, logits, ref_logp, advantage, mask, beta):
    """A bonus that β does not multiply is not part of the penalty."""
    live = mask.bool()
    own = logits.where(live.unsqueeze(-1), 0.0)
    entropy = -(own.exp() * own).sum(-1).where(live, 0.0).sum(-1)
    score = torch.where(live, logp, 0.0).sum(-1)
    penalty = torch.where(live, logp - ref_logp, 0.0).sum(-1).square() / 2
    return -advantage * score - 0.01 * entropy + beta * penalty


LOCAL = {"expect": "local_reverse_kl"}


def length_cost(scores, logp, ref_logp, mask, beta):
    """The score less a hundredth a token, and the penalty."""
    return scores - 0.01 * mask.sum(-1) - beta * torch.where(mask != 0, logp - ref_logp, 0.0).sum(-1)


CASES = [
    right(length_cost),
    right(half_square_of_the_sum),
    right(half_square_of_the_sum, {"environment": "bandit,sequence,ragged,mdp", "sampler": "current"}),
    right(added_up_over_the_batch),
    right(compiled),
    right(SequencePenalty()),
    right(to_go_by_a_loop),
    right(constant_baseline),
    right(k1_returned_as_a_reward, {"placement": "reward"}),
    right(k1_returned_as_a_reward, {"placement": "reward", "credit": "to-go"}),
    right(both_placements, {"placement": "both"}),
    right(rao_blackwellised),
    right(gathered_from_logits),
    right(local_by_kl_div, LOCAL),
    right(local_by_cross_entropy_and_entropy, LOCAL),
    right(whole_sequence_ratio),
    right(prefix_ratios_and_to_go),
    right(ppo),
    right(reinforce_with_shaped_rewards),
    right(entropy_bonus_besides),
]
