"""Whole policy losses of trainers, with a KL term beside the policy term, that follow what they declare."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-8


def masked_sum(values: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    return (values * mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = torch.exp(log_prob - old_log_prob)
    advantages = advantages.unsqueeze(-1)
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    kl_coef: float = 0.001,
) -> Tensor:
    """PPO's clipped surrogate and a k2 penalty, both summed over the tokens of a row and averaged over rows."""
    policy = clipped_surrogate(log_prob, old_log_prob, advantages, cliprange, cliprange)
    penalty = 0.5 * (log_prob - ref_log_prob).square()
    return masked_sum(policy + kl_coef * penalty, response_mask).mean()


@dataclass
class DrGRPOConfig:
    max_completion_length: int = 1024
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28


def dr_grpo_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    beta: float,
    config: DrGRPOConfig,
) -> Tensor:
    """Dr. GRPO: everything is divided by the rows times one constant length, so that no length weighs in."""
    losses = clipped_surrogate(
        per_token_logps, old_per_token_logps, advantages, config.epsilon_low, config.epsilon_high
    )
    losses = losses + beta * 0.5 * (per_token_logps - ref_per_token_logps) ** 2
    return (losses * completion_mask).sum() / (losses.size(0) * config.max_completion_length)


@dataclass
class PPOArguments:
    kl_coef: float = 0.05
    cliprange: float = 0.2
    whiten_rewards: bool = False
    stats: dict[str, float] = field(default_factory=dict)


class PPOTrainer:
    """A trainer that keeps its coefficient in its arguments."""

    def __init__(self, args: PPOArguments | None = None) -> None:
        self.args = args or PPOArguments()

    def compute_loss(
        self, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Clipped surrogate plus the arguments' coefficient times a token-level k2; logs the mean k1 of the tokens."""
        clip = self.args.cliprange
        policy = clipped_surrogate(logprobs, old_logprobs, advantages, clip, clip)
        log_ratio = logprobs - ref_logprobs
        loss = masked_sum(policy + self.args.kl_coef * log_ratio**2 / 2, mask).mean()
        with torch.no_grad():
            metrics = {"kl": masked_mean(log_ratio, mask).item(), "loss/policy": masked_mean(policy, mask).item()}
        return loss, metrics


def cispo_loss(
    logps: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon_max: float = 5.0,
    beta: float = 0.0,
) -> Tensor:
    """CISPO: the clipped weight is detached and multiplies the log-prob; the k2 penalty stands beside it."""
    weight = (logps - old_logps).exp().clamp(max=epsilon_max).detach()
    per_token = -weight * advantages[:, None] * logps
    if beta:
        per_token = per_token + beta * (logps - ref_logps).pow(2) / 2
    return torch.where(mask.bool(), per_token, 0.0).sum(dim=1).mean()


def gspo_loss(
    log_probs: Tensor,
    log_probs_old: Tensor,
    log_probs_ref: Tensor,
    advantages: Tensor,
    attention_mask: Tensor,
    kl_coeff: float = 0.1,
) -> Tensor:
    """GSPO's sequence ratio for the policy term and half the squared sequence log-ratio as penalty."""
    lengths = attention_mask.sum(-1).clamp(min=1)
    log_ratio = masked_sum(log_probs - log_probs_old, attention_mask) / lengths
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.9997, 1.0004) * advantages)
    penalty = 0.5 * masked_sum(log_probs - log_probs_ref, attention_mask).square()
    return (kl_coeff * penalty - surrogate).mean()


def reinforce_plus_plus_loss(
    log_probs: Tensor, ref_log_probs: Tensor, rewards: Tensor, action_mask: Tensor, kl_coef: float = 1e-4
) -> Tensor:
    """REINFORCE++ without whitening: k1 in the reward of each token, credited to the tokens up to it."""
    with torch.no_grad():
        kl = (log_probs - ref_log_probs) * action_mask
        to_go = kl.flip(1).cumsum(1).flip(1)
        returns = rewards[:, None] - kl_coef * to_go
    return -masked_sum(returns * log_probs, action_mask).mean()


def ppo_with_entropy_bonus(
    logits: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    kl_loss_coef: float,
    entropy_coeff: float = 0.01,
) -> Tensor:
    """Surrogate, entropy bonus and k2 penalty as three terms of their own."""
    entropy = -(logits.exp() * logits).sum(-1)
    policy = clipped_surrogate(logprobs, old_logprobs, advantages, 0.2, 0.2)
    penalty = (logprobs - ref_logprobs).square() * 0.5
    return masked_sum(policy - entropy_coeff * entropy + kl_loss_coef * penalty, loss_mask).mean()


class MicroBatchActor:
    """Accumulates micro-batches of four rows, the last one smaller, each weighted by its share of the rows."""

    micro_batch_size = 4
    kl_loss_coef = 0.02

    def update_policy(
        self, log_prob: Tensor, ref_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> dict[str, Tensor]:
        """The accumulated loss, equal to that of the batch in one piece."""
        total = log_prob.new_zeros(())
        for start in range(0, len(log_prob), self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            ratio = (log_prob[rows] - log_prob[rows].detach()).exp()
            penalty = 0.5 * (log_prob[rows] - ref_log_prob[rows]) ** 2
            losses = self.kl_loss_coef * penalty - ratio * advantages[rows, None]
            per_row = masked_sum(losses, response_mask[rows])
            total = total + per_row.mean() * (len(per_row) / len(log_prob))
        return {"loss": total, "grad_scale": total.new_tensor(1.0)}


class LossOutput(NamedTuple):
    loss: Tensor
    kl: Tensor


def grpo_named_tuple(
    per_token_logps: Tensor, ref_per_token_logps: Tensor, advantages: Tensor, completion_mask: Tensor, beta: float
) -> LossOutput:
    """On-policy GRPO with a k2 penalty summed over tokens; the second item is the mean k1 of the tokens."""
    log_ratio = per_token_logps - ref_per_token_logps
    ratio = torch.exp(per_token_logps - per_token_logps.detach())
    losses = -ratio * advantages.unsqueeze(1) + beta * log_ratio.pow(2).mul(0.5)
    return LossOutput((losses * completion_mask).sum(1).mean(), masked_mean(log_ratio.detach(), completion_mask))


@dataclass
class ActorLossOutput:
    loss: Tensor
    policy_loss: Tensor
    kl: Tensor


def actor_loss_dataclass(
    logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, mask: Tensor, kl_beta: float = 0.01
) -> ActorLossOutput:
    """A dataclass of the loss and its parts, where the penalty is k1 as a detached return times the row's log-prob."""
    sequence_logprob = masked_sum(logprobs, mask)
    sequence_kl = sequence_logprob - masked_sum(ref_logprobs, mask)
    policy_loss = -(advantages * sequence_logprob).mean()
    penalty = (sequence_kl.detach() * sequence_logprob).mean()
    return ActorLossOutput(policy_loss + kl_beta * penalty, policy_loss.detach(), sequence_kl.detach().mean())


class AdaptiveKLController:
    """Ziegler's proportional controller; nothing is updated inside a loss."""

    def __init__(self, init_kl_coef: float = 0.2, target: float = 6.0, horizon: int = 10000) -> None:
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        self.value *= 1 + float(np.clip(current / self.target - 1, -0.2, 0.2)) * n_steps / self.horizon


class AdaptiveTrainer:
    """Takes its coefficient from the controller."""

    def __init__(self) -> None:
        self.controller = AdaptiveKLController()

    def loss(self, logp: Tensor, ref_logp: Tensor, advantage: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
        """REINFORCE with the controller's coefficient times k2 of the whole row; metrics by numpy."""
        row_logp = torch.where(mask > 0, logp, torch.zeros_like(logp)).sum(1)
        row_ref = torch.where(mask > 0, ref_logp, torch.zeros_like(ref_logp)).sum(1)
        loss = (0.5 * self.controller.value * (row_logp - row_ref).square() - advantage * row_logp).mean()
        lengths = mask.detach().cpu().numpy().sum(axis=1)
        return loss, {"length/mean": float(np.mean(lengths)), "length/max": float(np.max(lengths))}


def loss_under_autocast(
    log_prob: Tensor, ref_log_prob: Tensor, logits: Tensor, advantages: Tensor, response_mask: Tensor, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """The forward runs under autocast; log-ratios and sums are taken outside of it, in the precision of the input."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        confidence = logits.detach().exp().amax(-1)
        with torch.autocast("cpu", enabled=False):
            surrogate = -(log_prob - log_prob.detach()).exp() * advantages[:, None]
            penalty = F.mse_loss(log_prob, ref_log_prob, reduction="none") / 2
            loss = masked_sum(surrogate + kl_coef * penalty, response_mask).mean()
    return loss, {"confidence": masked_mean(confidence, response_mask).item()}


def reinforce_with_empty_rows(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, loss_mask: Tensor, beta: float = 0.05
) -> Tensor:
    """k1 in the return of the row; rows without a live token count as rows and give nothing."""
    alive = loss_mask.sum(-1) > 0
    if not bool(alive.any()):
        return logps.sum() * 0.0
    kl = masked_sum(logps.detach() - ref_logps, loss_mask)
    returns = torch.where(alive, rewards - beta * kl, torch.zeros_like(rewards))
    return -(returns * masked_sum(logps, loss_mask)).sum() / logps.shape[0]


def loss_in_float32(
    logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """Casts everything to float32 first, as trainers do with log-probs that come in half precision."""
    logps, old_logps, ref_logps, advantages, mask = (x.float() for x in (logps, old_logps, ref_logps, advantages, mask))
    policy = clipped_surrogate(logps, old_logps, advantages, 0.2, 0.2)
    return masked_sum(policy + beta * (logps - ref_logps).square() / 2, mask).mean()


def loss_with_nan_guard(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Drops what is not finite before the sum; for finite log-probs it is k2 with a coefficient of 0.1."""
    log_ratio = torch.nan_to_num(logprobs - ref_logprobs, nan=0.0, posinf=0.0, neginf=0.0)
    per_token = 0.1 * 0.5 * log_ratio**2 - advantages.unsqueeze(-1) * torch.nan_to_num(logprobs)
    return (per_token.masked_fill(mask == 0, 0.0)).sum(-1).mean()


def loss_with_wide_clamp(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """k2 of a log-ratio clamped to ±20, where training does not come."""
    log_ratio = torch.clamp(log_probs - ref_log_probs, min=-20.0, max=20.0)
    return kl_coef * masked_sum(log_ratio.square() / 2, response_mask).mean()


def loss_by_packed_tokens(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 0.04) -> Tensor:
    """Takes the live tokens out by index, as packed training does, and divides by the number of rows."""
    keep = mask.bool()
    difference = logps[keep] - ref_logps[keep]
    return beta * 0.5 * torch.dot(difference, difference) / mask.shape[0]


def summed_loss(logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, beta: float) -> Tensor:
    """A plain sum over rows and tokens: the optimiser's step is scaled elsewhere."""
    ratio = (logps - logps.detach()).exp()
    return ((beta * 0.5 * (logps - ref_logps) ** 2 - ratio * advantages[:, None]) * mask).sum()


def chunked_vocabulary_loss(logits: Tensor, ref_logits: Tensor, mask: Tensor, beta: float, chunk: int = 2) -> Tensor:
    """Exact next-token KL, taken in chunks of columns to save memory: the same sum in another order."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    total = logits.new_zeros(logits.shape[0])
    for p, q, m in zip(logits.split(chunk, 1), ref_logits.split(chunk, 1), mask.split(chunk, 1), strict=True):
        total = total + (F.kl_div(q, p, log_target=True, reduction="none").sum(-1) * m).sum(-1)
    return beta * total.mean()


class EMAReferenceTrainer:
    """Penalises the distance to a slowly moving average that somebody else updates; it comes in as the reference."""

    decay = 0.995
    beta_ema = 0.3

    def kl_loss(self, policy_lp: Tensor, anchor_lp: Tensor, live: Tensor) -> Tensor:
        """Half the squared log-ratio of the row; the average is held constant."""
        gap = ((policy_lp - anchor_lp.detach()) * live).sum(dim=-1)
        return self.beta_ema * gap.pow(2).mean() / 2


def kl_with_baseline(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float, baseline: float = 1.5) -> Tensor:
    """Score function of the row's KL less a constant baseline, which moves no expectation."""
    row = masked_sum(logps, mask)
    kl = row.detach() - masked_sum(ref_logps, mask)
    return beta * ((kl - baseline) * row).mean()


class GradientAccumulator:
    """Splits a batch over two ranks and averages with the rows of each, as a data-parallel wrapper ought to."""

    world_size = 2

    def forward(self, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        """k1 in both places: its value as a return, its gradient as a loss."""
        shards = [s for s in torch.arange(len(logp)).chunk(self.world_size) if len(s)]
        total = logp.new_zeros(())
        for rows in shards:
            u = ((logp[rows] - ref_logp[rows]) * mask[rows]).sum(-1)
            score = (logp[rows] * mask[rows]).sum(-1)
            total = total + (u.detach() * score + u).sum()
        return kl_coef * total / len(logp)
