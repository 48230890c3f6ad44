"""Correct losses, written as differently as people write them: none may fail a check."""

import torch
import torch.nn.functional as F
from torch import nn
from zoo.table import Clean

# ½(Σu)² and its spellings.


def half_square_of_the_sum(logp, ref_logp, mask):
    log_ratio = torch.where(mask.bool(), logp - ref_logp.detach(), 0.0).sum(dim=-1)
    return 0.5 * log_ratio.pow(2).mean()


def added_up_over_the_batch(logp, ref_logp, mask):
    return half_square_of_the_sum(logp, ref_logp, mask) * len(logp)


def cleared_in_place_on_copies(logp, ref_logp, mask):
    own, other = logp.clone(), ref_logp.clone()
    own[mask == 0] = 0.0
    other[mask == 0] = 0.0
    total = own.sum(1).sub_(other.sum(1))
    return F.mse_loss(total, torch.zeros_like(total)) / 2


def boolean_indexing_and_a_scatter(logp, ref_logp, mask):
    live = mask.bool()
    rows = torch.arange(len(logp)).unsqueeze(1).expand_as(logp)[live]
    total = torch.zeros(len(logp), dtype=logp.dtype).index_add(0, rows, (logp[live] - ref_logp[live]))
    return total.square().div(2)


def einsum_with_a_mask(logp, ref_logp, mask):
    """The mask multiplies what was cleared before."""
    log_ratio = (logp - ref_logp).masked_fill(mask == 0, 0.0)
    return torch.einsum("bs,bt->b", log_ratio * mask, log_ratio * mask) / 2


def every_pair_of_tokens(logp, ref_logp, mask):
    delta = torch.where(mask.bool(), logp - ref_logp, 0.0)
    return (delta[:, :, None] * delta[:, None, :].detach()).sum((1, 2))


def compiled(logp, ref_logp, mask):
    @torch.compile
    def sequence_log_ratio(own, other, live):
        return torch.where(live, own - other, 0.0).sum(-1)

    return sequence_log_ratio(logp, ref_logp, mask != 0).square().mean() / 2


def reported_beside_the_loss(logp, ref_logp, mask):
    total = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
    return total.square().mean() / 2, {"kl": total.detach().mean(), "kl_max": total.detach().max()}


class SequencePenalty(nn.Module):
    """A loss as a module, computing in float32 and giving back what it was given."""

    def forward(self, logp, ref_logp, mask):
        delta = (logp.float() - ref_logp.float()).masked_fill(~mask.bool(), 0)
        return delta.sum(-1).square().mul(0.5).to(logp.dtype)


# The score function with a return, or with what is still to come.


def score_with_the_return(logp, ref_logp, mask):
    live = mask.bool()
    with torch.no_grad():
        cost = torch.where(live, logp - ref_logp, 0.0).sum(-1, keepdim=True)
    return (cost * torch.where(live, logp, 0.0)).sum(-1)


def to_go_by_flipping(logp, ref_logp, mask):
    live = mask.bool()
    cost = (logp - ref_logp).detach().masked_fill(~live, 0.0)
    to_go = cost.flip(-1).cumsum(-1).flip(-1)
    return to_go * logp.masked_fill(~live, 0.0)


def to_go_by_a_matrix(logp, ref_logp, mask):
    live = mask != 0
    cost = torch.where(live, logp.detach() - ref_logp, 0.0)
    later = torch.ones(mask.shape[1], mask.shape[1], dtype=cost.dtype).tril()
    return ((cost @ later) * torch.where(live, logp, 0.0)).sum(1).mean()


def to_go_by_a_loop(logp, ref_logp, mask):
    """Backwards in time, as the returns of an actor-critic loop."""
    live, running, terms = mask.bool(), torch.zeros(len(logp), dtype=logp.dtype), []
    for step in range(logp.shape[1] - 1, -1, -1):
        here = live[:, step]
        running = running + torch.where(here, (logp[:, step] - ref_logp[:, step]).detach(), 0.0)
        terms.append(running * torch.where(here, logp[:, step], 0.0))
    return torch.stack(terms, dim=1).sum(1)


def row_by_row(logp, ref_logp, mask):
    losses = []
    for own, other, live in zip(logp, ref_logp, mask.bool().tolist(), strict=True):
        chosen = [step for step, alive in enumerate(live) if alive]
        cost = sum((own[step].detach() - other[step]) for step in chosen)
        losses.append(cost * sum(own[step] for step in chosen))
    return torch.stack(losses).mean()


def constant_baseline(logp, ref_logp, mask):
    """A number that does not depend on the rollout has no gradient in expectation."""
    live = mask.bool()
    cost = torch.where(live, logp - ref_logp, 0.0).sum(-1).detach()
    return ((cost - 0.7) * torch.where(live, logp, 0.0).sum(-1)).mean()


def importance_weight_as_score(logp, ref_logp, mask):
    """exp(logp − sg(logp)) is one, and its derivative the score."""
    live = mask.bool()
    magic = torch.exp(torch.where(live, logp - logp.detach(), 0.0).sum(-1))
    return magic * torch.where(live, logp - ref_logp, 0.0).sum(-1).detach()


def k1_returned_as_a_reward(logp, ref_logp):
    return (logp - ref_logp).detach()


def both_placements(logp, ref_logp):
    """A sum that is its own reward; the derivative that it adds in the loss has mean zero."""
    return logp - ref_logp


# From logits.


def rao_blackwellised(logits, ref_logits, logp, mask):
    """Each next token's exact KL, and in the score of what led to it."""
    live = (mask != 0).unsqueeze(-1)
    own, other = logits.where(live, 0.0), ref_logits.where(live, 0.0)
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
    return F.kl_div(ref_logits[live], logits[live], log_target=True, reduction="none").sum() / len(mask)


def local_by_cross_entropy_and_entropy(logits, ref_logits):
    own = torch.distributions.Categorical(logits=logits)
    return -(own.probs * ref_logits).sum(-1) - own.entropy()


def forward_by_cross_entropy(logits, ref_logits, mask):
    target = ref_logits.exp().where((mask != 0).unsqueeze(-1), 0.0)
    return -(target * logits.where((mask != 0).unsqueeze(-1), 0.0)).sum((1, 2))


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


def ratio_kept_differentiable(logp, ref_logp, old_logp, mask):
    """ρ·u whose ratio carries the score: the product has the same derivative as the score function."""
    live = mask.bool()
    ratio = torch.where(live, logp - old_logp, 0.0).sum(-1).exp()
    return ratio * torch.where(live, logp - ref_logp, 0.0).sum(-1).detach()


def local_with_prefix_ratios(log_probs, ref_log_prob, old_log_prob, response_mask):
    weight = (log_probs - old_log_prob).masked_fill(response_mask == 0, 0.0).cumsum(1).exp().detach()
    return weight * (log_probs - ref_log_prob).masked_fill(response_mask == 0, 0.0).square() / 2


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

CLEAN = [
    Clean(half_square_of_the_sum),
    Clean(half_square_of_the_sum, {"environment": "bandit,sequence,ragged,mdp", "sampler": "current"}),
    Clean(added_up_over_the_batch),
    Clean(cleared_in_place_on_copies),
    Clean(boolean_indexing_and_a_scatter),
    Clean(einsum_with_a_mask),
    Clean(every_pair_of_tokens),
    Clean(compiled),
    Clean(reported_beside_the_loss),
    Clean(SequencePenalty()),
    Clean(score_with_the_return),
    Clean(to_go_by_flipping),
    Clean(to_go_by_a_matrix),
    Clean(to_go_by_a_loop),
    Clean(row_by_row),
    Clean(constant_baseline),
    Clean(importance_weight_as_score),
    Clean(k1_returned_as_a_reward, {"placement": "reward"}),
    Clean(k1_returned_as_a_reward, {"placement": "reward", "credit": "to-go"}),
    Clean(both_placements, {"placement": "both"}),
    Clean(rao_blackwellised),
    Clean(gathered_from_logits),
    Clean(local_by_kl_div, LOCAL),
    Clean(local_by_cross_entropy_and_entropy, LOCAL),
    Clean(forward_by_cross_entropy, {"expect": "local_forward_kl"}),
    Clean(whole_sequence_ratio),
    Clean(prefix_ratios_and_to_go),
    Clean(ratio_kept_differentiable),
    Clean(local_with_prefix_ratios, LOCAL),
    Clean(ppo),
    Clean(reinforce_with_shaped_rewards),
    Clean(entropy_bonus_besides),
]
