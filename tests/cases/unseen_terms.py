"""KL terms as functions of their own, and KL inside rewards, that follow what they declare."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.sum(values * mask, dim=-1)


def low_var_kl(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Schulman's k3 per token, with no clamp: it overflows for extreme log-ratios and follows the forward KL."""
    kl = ref_logprob - logprob
    return torch.exp(kl) - kl - 1


def mse_kl(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """k2 per token; the caller masks."""
    return 0.5 * (logprob - ref_logprob).square()


def masked_mse_kl(logprob: Tensor, ref_logprob: Tensor, mask: Tensor) -> Tensor:
    """k2 per token with zeros at masked positions, whatever stands there."""
    safe = torch.where(mask.bool(), logprob - ref_logprob, torch.zeros_like(logprob))
    return 0.5 * safe.square()


def straight_through_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Forward value of k3, gradient of k2."""
    log_ratio = log_probs - ref_log_probs
    k2 = 0.5 * log_ratio**2
    k3 = torch.expm1(-log_ratio) + log_ratio
    return k2 - k2.detach() + k3.detach()


def sequence_k3(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 1.0) -> Tensor:
    """k3 of the log-ratio of the row: on-policy its gradient is that of KL(ref‖π) over sequences."""
    delta = masked_sum(ref_logps - logps, mask)
    return beta * (torch.expm1(delta) - delta).mean()


def full_kl_div(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """F.kl_div(input=log ref, target=log π) sums π·(log π − log ref) over the vocabulary."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    per_token = F.kl_div(ref_logits, logits, reduction="none", log_target=True).sum(-1)
    return (per_token * mask).sum(-1).mean()


def full_kl_forward(logits: Tensor, ref_logits: Tensor, loss_mask: Tensor, kl_coef: float) -> Tensor:
    """Distillation's direction, and said so: KL(ref‖π) of each next-token distribution."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    per_token = F.kl_div(logits, ref_logits.exp(), reduction="none").sum(-1)
    return kl_coef * masked_sum(per_token, loss_mask).mean()


def full_kl_by_logsumexp(logits: Tensor, ref_logits: Tensor, mask: Tensor, max_length: int = 2048) -> Tensor:
    """Exact next-token KL of freshly normalised logits, divided by a constant length."""
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = torch.einsum("btv,btv->bt", log_p.exp(), log_p - log_q)
    return torch.where(mask.bool(), kl, kl.new_zeros(())).sum() / (mask.shape[0] * max_length)


def generalized_divergence(logits: Tensor, ref_logits: Tensor, mask: Tensor, beta: float = 1.0) -> Tensor:
    """Interpolates by `beta` from KL(ref‖π) at 0 over Jensen–Shannon to KL(π‖ref) at 1, its default."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    if beta == 0:
        kl = F.kl_div(logits, ref_logits, reduction="none", log_target=True)
    elif beta == 1:
        kl = F.kl_div(ref_logits, logits, reduction="none", log_target=True)
    else:
        mixture = torch.log((1 - beta) * logits.exp() + beta * ref_logits.exp())
        kl = beta * F.kl_div(mixture, ref_logits, reduction="none", log_target=True)
        kl = kl + (1 - beta) * F.kl_div(mixture, logits, reduction="none", log_target=True)
    return (kl.sum(-1) * mask).sum(-1).mean()


def rao_blackwell_loss(logits: Tensor, ref_logits: Tensor, logp: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Exact next-token KL, differentiated, plus the later ones credited to the tokens before them."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    per_token = (logits.exp() * (logits - ref_logits)).sum(-1)
    per_token = torch.where(mask > 0, per_token, torch.zeros_like(per_token))
    later = per_token.detach().flip(1).cumsum(1).flip(1) - per_token.detach()
    return beta * (per_token + later * logp * mask).sum(1).mean()


def top_k_with_sampled_tail(
    logits: Tensor, ref_logits: Tensor, logp: Tensor, ref_logp: Tensor, tokens: Tensor, mask: Tensor, k: int = 1
) -> Tensor:
    """Head of the k likeliest tokens with its log-ratio detached, and k2 of the sampled token outside the head."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    head = logits.detach().topk(k, dim=-1).indices
    p, q = logits.gather(-1, head), ref_logits.gather(-1, head)
    head_term = (p.exp() * (p - q).detach()).sum(-1)
    outside = (head != tokens.unsqueeze(-1)).all(-1)
    tail_term = torch.where(outside, 0.5 * (logp - ref_logp) ** 2, torch.zeros_like(logp))
    return ((head_term + tail_term) * mask).sum(-1).mean()


def chi_square_penalty(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """e^u − 1 − u of the row, whose gradient is that of half the chi-square divergence."""
    u = masked_sum(logps - ref_logps, mask)
    return beta * (u.exp() - 1 - u).mean()


def absolute_penalty(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """|u| of the row: twice the total variation."""
    return masked_sum(logps - ref_logps, mask).abs().mean()


def sequence_ratio_k2(
    logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float = 0.01
) -> Tensor:
    """k2 of the row, weighted by the detached ratio of the whole row: exact for any sampler."""
    weight = masked_sum(logps.detach() - old_logps, mask).exp()
    return kl_coef * (weight * 0.5 * masked_sum(logps - ref_logps, mask) ** 2).mean()


def sequence_ratio_differentiable(
    log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor
) -> Tensor:
    """The estimate Σ ρ·u of the KL with a ratio that is differentiated."""
    ratio = torch.exp(masked_sum(log_prob - old_log_prob, response_mask))
    return (ratio * masked_sum(log_prob - ref_log_prob, response_mask)).mean()


def prefix_ratio_k2(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """k2 per token, weighted by the detached ratio of the tokens up to it."""
    weight = ((logps.detach() - old_logps) * mask).cumsum(-1).exp()
    return beta * masked_sum(weight * 0.5 * (logps - ref_logps).square(), mask).mean()


def prefix_ratio_to_go(log_probs: Tensor, log_probs_old: Tensor, log_probs_ref: Tensor, action_mask: Tensor) -> Tensor:
    """Reward-to-go k1 where each later log-ratio carries the ratio of the tokens up to it."""
    with torch.no_grad():
        ratio = ((log_probs - log_probs_old) * action_mask).cumsum(1).exp()
        weighted = ratio * (log_probs - log_probs_ref) * action_mask
        to_go = weighted.flip(1).cumsum(1).flip(1)
    return masked_sum(to_go * log_probs, action_mask).mean()


def token_ratio_k3(
    per_token_logps: Tensor, old_per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor
) -> Tensor:
    """Token ratio, differentiated, times k3: the local KL with the prefixes of the sampler, and declared as that."""
    ratio = (per_token_logps - old_per_token_logps).exp()
    delta = ref_per_token_logps - per_token_logps
    return ((ratio * (delta.exp() - delta - 1)) * completion_mask).sum(-1).mean()


def token_ratio_k3_detached(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Token ratio, detached, times k3: the local forward KL with the prefixes of the sampler, and declared as that."""
    delta = ref_logps - logps
    k3 = delta.exp() - delta - 1
    return beta * (torch.exp(logps - old_logps).detach() * k3 * mask).sum(1).mean()


@dataclass(frozen=True)
class RewardShaping:
    kl_coef: float = 0.05
    reward_clip: float = 10.0


def apply_kl_penalty(
    token_level_scores: Tensor, log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """The score of the row on its last live token, less the coefficient times k1 on every token."""
    last = (response_mask.cumsum(-1) == response_mask.sum(-1, keepdim=True)) & (response_mask > 0)
    scores = torch.where(last, token_level_scores[:, None], torch.zeros_like(log_prob))
    return (scores - kl_coef * (log_prob - ref_log_prob)) * response_mask


def shape_rewards(rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_beta: float) -> Tensor:
    """One number a row: the reward less the coefficient times the log-ratio of the row."""
    return rewards - kl_beta * masked_sum(logprobs - ref_logprobs, mask)


def compute_reward(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor, config: RewardShaping
) -> Tensor:
    """Clips the score, not the KL, and adds it through a one-hot mask of the last token."""
    kl_reward = -config.kl_coef * (log_probs - ref_log_probs) * action_mask
    last = action_mask.shape[1] - 1 - action_mask.long().fliplr().argmax(dim=1, keepdim=True)
    clipped = scores.clamp(-config.reward_clip, config.reward_clip).to(kl_reward.dtype)
    return kl_reward + torch.zeros_like(kl_reward).scatter_(1, last, clipped.unsqueeze(1))


class RewardManager:
    """Shapes the reward of each row; built from its defaults."""

    def __init__(self, kl_coef: float = 0.1, gamma: float = 1.0) -> None:
        self.kl_coef, self.gamma = kl_coef, gamma

    def discounted(self, rewards: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
        """Discounts by a gamma that is one, so that nothing is discounted."""
        steps = (mask.cumsum(-1) - 1).clamp(min=0)
        kl = (logp - ref_logp).detach() * self.gamma**steps
        return rewards - self.kl_coef * torch.where(mask.bool(), kl, torch.zeros_like(kl)).sum(-1)

    def penalty(self, policy_logprobs: Tensor, reference_logprobs: Tensor, alive: Tensor) -> Tensor:
        """k1 of the row as a cost, its parameters under names of its own."""
        return ((policy_logprobs - reference_logprobs) * alive).sum(-1)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str = "kl") -> Tensor:
    """The token-level penalty by its name; the default is k1."""
    if kl_penalty in ("kl", "k1"):
        return logprob - ref_logprob
    if kl_penalty in ("mse", "k2"):
        return 0.5 * (logprob - ref_logprob).square()
    raise NotImplementedError(kl_penalty)


def sequence_k3_value(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """k3 of the row as a cost: it follows the reverse KL less the forward one, and is declared so."""
    u = masked_sum(logps - ref_logps, mask)
    return torch.exp(-u) - 1 + u


def weighted_cost(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio of the row times the ratio of the row to the sampler, for a reward that is used off-policy."""
    return masked_sum(logps - old_logps, mask).exp() * masked_sum(logps - ref_logps, mask)


def half_and_half(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """k1 as value and as gradient; the token form, for both places at once."""
    return torch.where(mask > 0, logps - ref_logps, torch.zeros_like(logps))
