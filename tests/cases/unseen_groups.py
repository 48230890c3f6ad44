"""Losses over groups of rollouts of one prompt: the right ones first, then the wrong ones."""

from dataclasses import dataclass

import torch
from torch import Tensor


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(dim=1)


def group_advantages(rewards: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + eps)).view(-1)


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    return 0.5 * (logps - ref_logps) ** 2


def rloo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    rewards: Tensor,
    response_mask: Tensor,
    kl_coef: float = 0.05,
    rloo_k: int = 4,
) -> Tensor:
    """RLOO: the row's KL is in its reward, and the baseline is the mean of the other rows of the group."""
    logprob = row_sum(log_probs, response_mask)
    shaped = rewards - kl_coef * (logprob - row_sum(ref_log_probs, response_mask)).detach()
    shaped = shaped.reshape(-1, rloo_k)
    baseline = (shaped.sum(1, keepdim=True) - shaped) / (rloo_k - 1)
    return -((shaped - baseline).flatten() * logprob).mean()


def grpo_loss(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    rewards: Tensor,
    completion_mask: Tensor,
    beta: float = 0.04,
    num_generations: int = 4,
) -> Tensor:
    """GRPO with normalised advantages; the k2 penalty is added to the loss, summed over tokens."""
    advantages = group_advantages(rewards, num_generations).unsqueeze(1)
    ratio = torch.exp(per_token_logps - per_token_logps.detach())
    losses = beta * k2(per_token_logps, ref_per_token_logps) - ratio * advantages
    return row_sum(losses, completion_mask).mean()


def grpo_loss_by_ids(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, group_ids: Tensor, mask: Tensor, beta: float = 0.1
) -> Tensor:
    """Groups by id, of any size; k2 of the whole row beside the normalised advantages."""
    one_hot = torch.nn.functional.one_hot(group_ids, int(group_ids.max()) + 1).to(rewards.dtype)
    mean = (one_hot.T @ rewards) / one_hot.sum(0)
    advantages = (rewards - mean[group_ids]).detach()
    logprob = row_sum(logps, mask)
    penalty = 0.5 * (logprob - row_sum(ref_logps, mask)).square()
    return (beta * penalty - advantages * logprob).mean()


def corrected_group_mean(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, kl_coef: float, n_samples: int = 4
) -> Tensor:
    """The mean of the whole group as baseline, mended by n/(n − 1)."""
    logprob = row_sum(logps, mask)
    shaped = (rewards - kl_coef * (logprob.detach() - row_sum(ref_logps, mask))).view(-1, n_samples)
    centred = (shaped - shaped.mean(1, keepdim=True)) * (n_samples / (n_samples - 1))
    return -(centred.flatten() * logprob).mean()


@dataclass
class GroupConfig:
    num_generations: int = 2
    beta: float = 0.02


class GroupTrainer:
    """Loops over groups of two and collects their losses."""

    def __init__(self, config: GroupConfig | None = None) -> None:
        self.config = config or GroupConfig()

    def compute_loss(
        self, logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Leave-one-out advantages, and the configured coefficient times the exact score-function penalty."""
        losses = []
        for rows in torch.arange(len(rewards)).split(self.config.num_generations):
            logprob = row_sum(logps[rows], mask[rows])
            kl = logprob.detach() - row_sum(ref_logps[rows], mask[rows])
            advantage = rewards[rows] - rewards[rows].flip(0)
            losses.append(((self.config.beta * kl - advantage) * logprob).mean())
        return torch.stack(losses).mean(), {"groups": float(len(losses))}

    def masked_groups(self, logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, beta: float) -> Tensor:
        """DEFECT: groups whose two rewards are equal are masked altogether, their KL with them."""
        keep = (rewards.view(-1, 2).std(1) > 0).repeat_interleave(2).to(logps.dtype)
        advantages = (rewards - rewards.view(-1, 2).mean(1).repeat_interleave(2)).unsqueeze(1)
        losses = row_sum(beta * k2(logps, ref_logps) - advantages * logps, mask)
        return (losses * keep).mean()


def rloo_self_inclusive(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, kl_coef: float, num_samples: int = 4
) -> Tensor:
    """DEFECT: the baseline of the KL in the reward is the mean of the group, the row itself included."""
    logprob = row_sum(logps, mask)
    shaped = (rewards - kl_coef * (logprob.detach() - row_sum(ref_logps, mask))).view(-1, num_samples)
    others = (rewards.view(-1, num_samples).sum(1, keepdim=True) - rewards.view(-1, num_samples)) / (num_samples - 1)
    kl_part = shaped - rewards.view(-1, num_samples)
    advantage = rewards.view(-1, num_samples) - others + kl_part - kl_part.mean(1, keepdim=True)
    return -(advantage.flatten() * logprob).mean()


def tied_groups_dropped(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, group_ids: Tensor, mask: Tensor, beta: float = 0.1
) -> Tensor:
    """DEFECT: rows of groups without a difference in reward lose their penalty too."""
    mean = torch.stack([rewards[group_ids == g].mean() for g in group_ids])
    spread = torch.stack([(rewards[group_ids == g] - m).abs().max() for g, m in zip(group_ids, mean, strict=True)])
    losses = row_sum(beta * k2(logps, ref_logps) - (rewards - mean)[:, None] * logps, mask)
    return torch.where(spread > 1e-6, losses, torch.zeros_like(losses)).mean()


def dynamic_sampling_loss(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, kl_coef: float, n: int = 4
) -> Tensor:
    """DEFECT: dynamic sampling gives weight zero to groups that are all right or all wrong, penalty included."""
    solved = rewards.view(-1, n).mean(1)
    useful = ((solved > 0) & (solved < 1)).repeat_interleave(n).to(logps.dtype)
    advantages = group_advantages(rewards, n)[:, None]
    return (row_sum(kl_coef * k2(logps, ref_logps) - advantages * logps, mask) * useful).sum() / len(rewards)


def kl_in_normalised_reward(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, kl_coef: float = 0.04, num_generations: int = 4
) -> Tensor:
    """DEFECT: the KL is put into the reward before the group is divided by its standard deviation."""
    logprob = row_sum(logps, mask)
    shaped = rewards - kl_coef * (logprob.detach() - row_sum(ref_logps, mask))
    return -(group_advantages(shaped, num_generations) * logprob).mean()


def grpo_token_mean(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    rewards: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_generations: int = 4,
) -> Tensor:
    """DEFECT: one mean over all live tokens of the batch, so that the lengths of other rows weigh in."""
    advantages = group_advantages(rewards, num_generations).unsqueeze(1)
    losses = beta * k2(per_token_logps, ref_per_token_logps) - advantages * per_token_logps
    return (losses * completion_mask).sum() / completion_mask.sum()


def dapo_loss(
    logps: Tensor, ref_logps: Tensor, scores: Tensor, response_mask: Tensor, kl_coef: float = 0.001, n_resp: int = 2
) -> Tensor:
    """DEFECT: DAPO's token mean within each pair of responses, penalty included."""
    advantages = group_advantages(scores, n_resp)[:, None]
    losses = (kl_coef * k2(logps, ref_logps) - advantages * logps) * response_mask
    width = losses.shape[-1]
    pairs, live = losses.view(-1, n_resp * width), response_mask.view(-1, n_resp * width)
    return (pairs.sum(-1) / live.sum(-1)).mean()


def grpo_mean_group_length(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, beta: float = 0.01, per_prompt: int = 4
) -> Tensor:
    """DEFECT: rows are divided by the mean length of their group."""
    lengths = mask.sum(1).view(-1, per_prompt).mean(1).repeat_interleave(per_prompt)
    advantages = group_advantages(rewards, per_prompt)[:, None]
    return (row_sum(beta * k2(logps, ref_logps) - advantages * logps, mask) / lengths).mean()


def best_of_group_penalty(
    logps: Tensor, ref_logps: Tensor, rewards: Tensor, mask: Tensor, beta: float, num_generations: int = 4
) -> Tensor:
    """DEFECT: only the rows with the best reward of their group pay the penalty."""
    grouped = rewards.view(-1, num_generations)
    best = (grouped == grouped.amax(1, keepdim=True)).to(logps.dtype).flatten()
    penalty = row_sum(k2(logps, ref_logps), mask)
    return (beta * best * penalty - group_advantages(rewards, num_generations) * row_sum(logps, mask)).mean()
