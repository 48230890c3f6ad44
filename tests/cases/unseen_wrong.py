"""Losses wrong in one way on ordinary input: the classics, hygiene, logged values, and what is easily misnamed."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


# Which gradient


def k1_penalty(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: the log-ratio itself as loss; its expected gradient is zero."""
    return kl_coef * masked_sum(log_prob - ref_log_prob, response_mask).mean()


def k3_penalty(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    beta: float = 0.04,
) -> Tensor:
    """DEFECT: k3 as loss term, declared as the local reverse KL."""
    delta = ref_per_token_logps - per_token_logps
    losses = beta * (torch.exp(delta) - delta - 1) - advantages[:, None] * per_token_logps
    return masked_sum(losses, completion_mask).mean()


def swapped_kl_div(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: F.kl_div with input and target swapped is KL(ref‖π)."""
    return masked_sum(F.kl_div(logits, ref_logits, reduction="none", log_target=True).sum(-1), mask).mean()


def token_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: token-level k2, declared as the gradient of the KL over sequences."""
    return beta * 0.5 * masked_sum((logps - ref_logps) ** 2, mask).mean()


def full_kl_as_sequence(logits: Tensor, ref_logits: Tensor, response_mask: Tensor) -> Tensor:
    """DEFECT: exact next-token KL, declared as the gradient of the KL over sequences."""
    return masked_sum((logits.exp() * (logits - ref_logits)).sum(-1), response_mask).mean()


def wrong_sign(rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: the penalty is added to the reward."""
    return rewards + kl_coef * masked_sum(logprobs - ref_logprobs, mask)


def wrong_sign_loss(logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: the k2 of the row is subtracted from the loss."""
    row = masked_sum(logps, mask)
    return -(advantages * row + beta * 0.5 * (row - masked_sum(ref_logps, mask)) ** 2).mean()


def row_mean(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 0.05) -> Tensor:
    """DEFECT: each row is divided by its own length."""
    return beta * (masked_sum(0.5 * (logps - ref_logps) ** 2, mask) / mask.sum(-1).clamp(min=1)).mean()


def mean_log_ratio_return(logps: Tensor, ref_logps: Tensor, action_mask: Tensor) -> Tensor:
    """DEFECT: the return is the mean log-ratio of the row instead of its sum."""
    u = masked_sum(logps - ref_logps, action_mask).detach() / action_mask.sum(-1).clamp(min=1)
    return (u * masked_sum(logps, action_mask)).mean()


def token_mean_ppo(
    log_prob: Tensor, ref_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """DEFECT: one mean over the live tokens of the batch."""
    ratio = (log_prob - log_prob.detach()).exp()
    policy = masked_mean(-ratio * advantages[:, None], response_mask)
    penalty = masked_mean(0.5 * (log_prob - ref_log_prob) ** 2, response_mask)
    return policy + kl_coef * penalty, {"actor/pg_loss": policy.item()}


def last_token_only(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: only the last live token of a row is penalised."""
    last = (mask.sum(-1).long() - 1).clamp(min=0)[:, None]
    return beta * 0.5 * (logps.gather(1, last) - ref_logps.gather(1, last)).square().mean()


def k3_reward(scores: Tensor, logprob: Tensor, ref_logprob: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: k3 in place of k1 inside the reward."""
    delta = ref_logprob - logprob
    return scores - kl_coef * masked_sum(delta.exp() - delta - 1, mask)


def discounted_returns(logps: Tensor, ref_logps: Tensor, mask: Tensor, gamma: float = 0.9) -> Tensor:
    """DEFECT: later KL is discounted."""
    kl, running = ((logps - ref_logps) * mask).detach(), torch.zeros(len(logps), dtype=logps.dtype)
    returns = []
    for t in reversed(range(kl.shape[1])):
        running = kl[:, t] + gamma * running
        returns.append(running)
    return masked_sum(torch.stack(returns[::-1], 1) * logps, mask).mean()


def truncated_head(logits: Tensor, ref_logits: Tensor, mask: Tensor, k: int = 1) -> Tensor:
    """DEFECT: only the likeliest token of the policy enters the sum over the vocabulary."""
    p, index = logits.topk(k, dim=-1)
    return masked_sum((p.exp() * (p - ref_logits.gather(-1, index))).sum(-1), mask).mean()


def tempered_policy(logits: Tensor, ref_logits: Tensor, mask: Tensor, temperature: float = 0.7) -> Tensor:
    """DEFECT: the policy's logits are divided by the sampling temperature and the reference's are not."""
    p = F.log_softmax(logits / temperature, dim=-1)
    return masked_sum((p.exp() * (p - ref_logits)).sum(-1), mask).mean()


@dataclass
class PenaltyConfig:
    target_kl: float = 0.1
    entropy_coef: float = 0.1


class PenaltyTrainer:
    """Penalties with a switch."""

    def __init__(self) -> None:
        self.config = PenaltyConfig()

    def ignored(self, logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        """DEFECT: the coefficient is taken and not used; the term goes to the metrics only."""
        self.last_kl = kl_coef * masked_mean(logps - ref_logps, mask).detach()
        return -(advantages * masked_sum(logps, mask)).mean()

    def hinge(self, logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
        """DEFECT: a hinge at the target KL of the batch."""
        kl = masked_sum(0.5 * (logps - ref_logps) ** 2, mask).mean()
        return beta * torch.relu(kl - self.config.target_kl)

    def gated(self, logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        """DEFECT: the penalty is on only where the batch's measured KL is above the target."""
        row = masked_sum(logps, mask)
        u = row - masked_sum(ref_logps, mask)
        switched = kl_coef if u.mean().item() > self.config.target_kl else 0.0
        return (switched * 0.5 * u**2 - advantages * row).mean()

    def scaled_by_kl(self, logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_ctl: float) -> Tensor:
        """DEFECT: the coefficient is multiplied by the batch's KL over the target, at most 4 and at least 1/4."""
        kl = masked_sum(0.5 * (logps - ref_logps) ** 2, mask).mean()
        return kl_ctl * (kl.detach() / self.config.target_kl).clamp(0.25, 4.0) * kl


# Entropy in the reward


def entropy_bonus_reward(rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: the shaped reward also pays a tenth of the surprisal of the row."""
    return rewards - kl_coef * masked_sum(logps - ref_logps, mask) - 0.1 * masked_sum(logps, mask)


def soft_reward(scores: Tensor, logits: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_beta: float) -> Tensor:
    """DEFECT: the entropy of each next-token distribution is paid on its token."""
    entropy = -(logits.exp() * logits).sum(-1)
    return (scores[:, None] / mask.sum(-1, keepdim=True) + 0.2 * entropy - kl_beta * (logp - ref_logp)) * mask


def max_entropy_loss(rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: a loss whose return holds reward, KL and an entropy bonus, all with fixed coefficients."""
    row = masked_sum(logps, mask)
    returns = rewards - 0.1 * (row - masked_sum(ref_logps, mask)) - 0.02 * row
    return -(returns.detach() * row).mean()


# A mixture called beta


def mixture_of_directions(logits: Tensor, ref_logits: Tensor, mask: Tensor, beta: float = 0.5) -> Tensor:
    """DEFECT: `beta` mixes both directions of the KL."""
    reverse = (logits.exp() * (logits - ref_logits)).sum(-1)
    forward = (ref_logits.exp() * (ref_logits - logits)).sum(-1)
    return masked_sum(beta * reverse + (1 - beta) * forward, mask).mean()


def skewed_kl(logits: Tensor, ref_logits: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    """DEFECT: KL to a mixture of reference and policy, `beta` of it the policy."""
    mixture = torch.log((1 - beta) * ref_logits.exp() + beta * logits.exp())
    return masked_sum((logits.exp() * (logits - mixture)).sum(-1), mask).mean()


def jensen_shannon(logits: Tensor, ref_logits: Tensor, completion_mask: Tensor, beta: float = 0.5) -> Tensor:
    """DEFECT: the generalised Jensen–Shannon divergence with weight `beta`."""
    mixture = torch.logsumexp(
        torch.stack([ref_logits + torch.tensor(beta).log(), logits + torch.tensor(1 - beta).log()]), dim=0
    )
    to_mixture = beta * F.kl_div(mixture, ref_logits, reduction="none", log_target=True)
    to_mixture = to_mixture + (1 - beta) * F.kl_div(mixture, logits, reduction="none", log_target=True)
    return masked_sum(to_mixture.sum(-1), completion_mask).mean()


# Padding


def unmasked_sum(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """DEFECT: padded positions are summed with the rest."""
    return 0.5 * (logps - ref_logps).square().sum(-1).mean()


def mask_one_late(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: the mask ends one column late."""
    late = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], dim=1)
    return beta * masked_sum(0.5 * (logps - ref_logps) ** 2, torch.maximum(mask, late)).mean()


def mask_from_tokens(logps: Tensor, ref_logps: Tensor, completion_ids: Tensor, pad_token_id: int = -100) -> Tensor:
    """DEFECT: derives the mask from a pad id that the collator does not write."""
    mask = (completion_ids != pad_token_id).to(logps.dtype)
    return 0.5 * masked_sum(logps - ref_logps, mask).square().mean()


def masked_after_sum(logps: Tensor, ref_logps: Tensor, loss_mask: Tensor) -> Tensor:
    """DEFECT: the reward-to-go is summed over padded positions before the mask is applied."""
    to_go = (logps - ref_logps).detach().flip(1).cumsum(1).flip(1)
    return masked_sum(to_go * logps, loss_mask).mean()


def masked_token_k2(logprob: Tensor, ref_logprob: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, for NaN only: k2 times the mask per token, which keeps a NaN at a masked position."""
    return 0.5 * (logprob - ref_logprob) ** 2 * mask


def masked_token_k1(log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor) -> Tensor:
    """DEFECT, for NaN only: k1 as a cost per token, made zero by the mask as a factor."""
    return torch.mul(log_probs - ref_log_probs, action_mask)


def masked_token_full(logits: Tensor, ref_logits: Tensor, response_mask: Tensor) -> Tensor:
    """DEFECT, for NaN only: the exact KL per token, times the mask."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logits.exp() * (logits - ref_logits)).sum(-1).mul(response_mask)


def overflowing_ratio(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, for extreme input only: k2 written with exponentials, which overflow where k2 does not."""
    u = masked_sum(logps - ref_logps, mask)
    return 0.5 * torch.log(torch.exp(u)).square().mean()


# Inputs and logged values


def mutated_reference(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: the reference's log-probs are overwritten by the log-ratio."""
    ref_logps.neg_().add_(logps.detach())
    log_ratio = ref_logps + logps - logps.detach()
    return beta * 0.5 * masked_sum(log_ratio**2, mask).mean()


class Logged(NamedTuple):
    loss: Tensor
    kl: Tensor


def logs_unmasked_mean(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """DEFECT: the logged KL is a mean over all columns, padded ones too."""
    u = logps - ref_logps
    return beta * 0.5 * masked_sum(u**2, mask).mean(), {"kl": u.detach().mean()}


def logs_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float = 0.1) -> tuple[Tensor, dict[str, float]]:
    """DEFECT: what is logged as KL is the k2 of the loss, which is another number."""
    penalty = masked_sum(0.5 * (logps - ref_logps) ** 2, mask).mean()
    return kl_coef * penalty, {"kl": penalty.item()}


def logs_weighted(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Logged:
    """DEFECT: the logged KL carries the coefficient."""
    u = masked_sum(logps - ref_logps, mask)
    return Logged(0.05 * 0.5 * u.square().mean(), 0.05 * u.detach().mean())


def logs_mutated(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """DEFECT: the logged tensor is squared in place to make the penalty."""
    kl = masked_sum(logps.detach() - ref_logps, mask)
    metrics = {"kl": kl}
    score = (kl.clone() * masked_sum(logps, mask)).mean()
    kl.pow_(2)
    metrics["kl"] = metrics["kl"].mean()
    return score, metrics
