"""Losses that are right on short rollouts, small batches, near references or narrow padding, and wrong further out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1)


def row_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    return 0.5 * row_sum(logps - ref_logps, mask) ** 2


def score_loss(costs: Tensor, logps: Tensor, mask: Tensor) -> Tensor:
    return row_sum(costs.detach() * logps, mask).mean()


# Log-ratios to the reference


def bounded_k2(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kl_coef: float = 0.05) -> Tensor:
    """DEFECT: the log-ratio of a token is clamped to ±2, beyond which nothing pulls back."""
    log_ratio = (log_prob - ref_log_prob).clamp(-2.0, 2.0)
    return kl_coef * row_sum(0.5 * log_ratio**2, response_mask).mean()


def clamped_low_var_kl(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """DEFECT: k3 clamped to ±10, which cuts the gradient where the policy is far below the reference."""
    kl = (ref_logprob - logprob).clamp(-20, 20)
    return torch.clamp(kl.exp() - kl - 1, min=-10, max=10)


def bounded_kl_reward(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: the KL of a token is clamped to ±4 before it is taken from the reward."""
    kl = (logprobs - ref_logprobs).clamp(min=-4, max=4)
    return scores - 0.1 * row_sum(kl, mask)


def huber_kl(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: a Huber loss in place of the square, linear beyond 2.5."""
    return beta * row_sum(F.huber_loss(logps, ref_logps, reduction="none", delta=2.5), mask).mean()


def far_bounded_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT, far out only: the log-ratio of a token is clamped to ±12."""
    return beta * row_sum(0.5 * torch.clamp(logps - ref_logps, -12, 12).square(), mask).mean()


def far_bounded_row(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, far out only: the KL of a row is clamped to ±15 in its return."""
    kl = row_sum(logps - ref_logps, mask).detach().clamp(-15, 15)
    return (kl * row_sum(logps, mask)).mean()


# Batches


@dataclass
class StepConfig:
    rows_per_step: int = 8
    micro_batch: int = 4
    token_budget: int = 16


class BatchedTrainer:
    """Ways to put a batch together, each of them wrong beyond a size."""

    def __init__(self, config: StepConfig | None = None) -> None:
        self.config = config or StepConfig()

    def truncated_batch(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: only the first eight rows are used, and the sum is divided by all of them."""
        n = self.config.rows_per_step
        return row_k2(logps[:n], ref_logps[:n], mask[:n]).sum() / len(logps)

    def dropped_remainder(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: beyond one micro-batch, the rows of the incomplete last one are dropped but counted."""
        rows, size = len(logps), self.config.micro_batch
        used = rows if rows < size else rows - rows % size
        return row_k2(logps[:used], ref_logps[:used], mask[:used]).sum() / rows

    def summed_micro_batches(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: the means of micro-batches of eight are added up and not divided by their number."""
        chunks = zip(logps.split(8), ref_logps.split(8), mask.split(8), strict=True)
        return torch.stack([row_k2(a, b, c).mean() for a, b, c in chunks]).sum()

    def unequal_micro_batches(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT, in single batches only: a mean of means, in which the rows of a short last chunk weigh more."""
        chunks = zip(logps.split(16), ref_logps.split(16), mask.split(16), strict=True)
        return torch.stack([row_k2(a, b, c).mean() for a, b, c in chunks]).mean()

    def longest_dropped(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: in batches of more than eight the longest row is dropped, to save padding."""
        losses = row_k2(logps, ref_logps, mask)
        if len(losses) <= self.config.rows_per_step:
            return losses.mean()
        keep = mask.sum(-1).argsort(stable=True)[:-1]
        return losses[keep].mean()

    def token_budget(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: a batch with more live tokens than the budget is scaled down to it."""
        live = float(mask.sum())
        return row_k2(logps, ref_logps, mask).mean() * min(1.0, self.config.token_budget / live)

    def centred_beyond_four(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """DEFECT: from five rows on, the KL of a row is centred by a mean that includes it."""
        row = row_sum(logps, mask)
        kl = (row - row_sum(ref_logps, mask)).detach()
        return ((kl - kl.mean() if len(kl) > 4 else kl) * row).mean()


def bessel_rows(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    """DEFECT: one row fewer than there are is counted, as for a variance, but the wrong way round."""
    rows = logps.shape[0]
    return beta * row_k2(logps, ref_logps, mask).mean() * (max(rows - 1, 1) / rows)


def smoothed_mean(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """DEFECT: the sum over rows is divided by the rows plus one."""
    return row_k2(log_probs, ref_log_probs, response_mask).sum() / (log_probs.size(0) + 1)


def last_row_left_out(logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: the last row of a batch is left over for the next one and still counted."""
    losses = row_k2(logps, ref_logps, mask)
    return kl_coef * (losses[: max(len(losses) - 1, 1)].sum() / len(losses))


# Tokens


def discount_after_eight(
    rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, gamma: float = 0.97
) -> Tensor:
    """DEFECT: the penalty of tokens after the eighth is discounted."""
    steps = (torch.arange(logps.shape[1]) - 7).clamp(min=0)
    return rewards - 0.1 * row_sum((logps - ref_logps) * gamma**steps, mask)


def first_sixteen(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT: only the first sixteen tokens are penalised."""
    return beta * row_sum(0.5 * (logps - ref_logps)[:, :16] ** 2, mask[:, :16]).mean()


def windowed_credit(logps: Tensor, ref_logps: Tensor, action_mask: Tensor, kl_beta: float = 0.05) -> Tensor:
    """DEFECT: a token is credited with the KL of the next forty tokens and not with what comes later."""
    kl = ((logps - ref_logps) * action_mask).detach()
    to_go = kl.flip(1).cumsum(1).flip(1)
    later = F.pad(to_go, (0, 40))[:, 40:]
    return kl_beta * score_loss(to_go - later, logps, action_mask)


def decayed_credit(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: credit is whole for four tokens and then falls with the distance."""
    kl = ((logps - ref_logps) * mask).detach()
    position = torch.arange(kl.shape[1])
    distance = (position[None, :] - position[:, None]).to(kl.dtype)
    weight = torch.where(distance >= 0, 0.95 ** (distance - 4).clamp(min=0), torch.zeros_like(distance))
    return score_loss(kl @ weight.T, logps, mask)


def overlong_filter(logps: Tensor, ref_logps: Tensor, mask: Tensor, max_tokens: int = 40) -> Tensor:
    """DEFECT: rows longer than forty tokens are filtered out."""
    short = (mask.sum(-1) <= max_tokens).to(logps.dtype)
    return (short * row_k2(logps, ref_logps, mask)).mean()


def long_rows_divided(logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: rows of more than five tokens are divided by their length over five."""
    return kl_coef * (row_k2(logps, ref_logps, mask) / (mask.sum(-1) / 5).clamp(min=1)).mean()


def prefix_exempt_later(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """DEFECT: after the third token only every other token is penalised."""
    position = torch.arange(log_prob.shape[1])
    counted = (position < 3) | (position % 2 == 0)
    return row_sum(0.5 * (log_prob - ref_log_prob).square() * counted, response_mask).mean()


# Precision


def autocast_full_kl(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, in float32: the sum over the vocabulary is a matrix product, which autocast takes to bfloat16."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        per_token = torch.einsum("btv,btv->bt", logits.exp(), logits - ref_logits)
    return (per_token.to(mask.dtype) * mask).sum(-1).mean()


def half_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, in float32: log-probs of a float32 model are brought down to half precision."""
    if logps.dtype == torch.float32:
        logps, ref_logps = logps.half(), ref_logps.half()
    return (0.5 * (logps - ref_logps).to(mask.dtype).square() * mask).sum(-1).mean()


def bfloat16_ratio(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT, in float32: the exponential of k3 is taken in bfloat16, where 1 − w cancels."""
    delta = ref_logps - logps
    low = delta.to(torch.bfloat16) if delta.dtype == torch.float32 else delta
    k3 = (low.exp() - 1).to(delta.dtype) - delta
    return beta * row_sum(k3, mask).mean()


def quantised_log_ratio(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, in float32: the detached log-ratio is sent between workers in steps of a half."""
    u = row_sum(logps - ref_logps, mask).detach()
    if u.dtype == torch.float32:
        u = (2 * u).round() / 2
    return (u * row_sum(logps, mask)).mean()


# One log-ratio for a batch


def batch_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
    """DEFECT, noise only: the log-ratios of all rows are added before they are squared."""
    total = ((logps - ref_logps) * mask).sum()
    return beta * 0.5 * total**2 / len(logps)


def batch_reinforce(rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT, noise only: each row is charged with the KL of the whole batch."""
    kl = ((logps - ref_logps) * mask).sum().detach()
    row = row_sum(logps, mask)
    return ((kl_coef * kl - rewards) * row).mean()


def batch_k3(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT, noise only: one k3 of the log-ratio of the concatenated batch, divided by the rows."""
    delta = ((ref_logps - logps) * mask).sum()
    return (delta.exp() - delta - 1) / logps.shape[0]


def batch_token_k2(log_prob: Tensor, ref_log_prob: Tensor, loss_mask: Tensor) -> Tensor:
    """DEFECT, noise only: log-ratios are added over the rows of each column before they are squared."""
    column = ((log_prob - ref_log_prob) * loss_mask).sum(0)
    return 0.5 * column.square().sum() / log_prob.shape[0]


# Columns


def mean_over_columns(logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    """DEFECT: zeros at padded positions are averaged with the rest, so that the width weighs in."""
    return beta * (0.5 * (logps - ref_logps) ** 2 * mask).mean()


def mean_over_batch_width(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """DEFECT: the exact sequence gradient, divided by the number of columns of the batch."""
    return (row_k2(logps, ref_logps, mask) / logps.size(-1)).mean()


def padded_to_eight(log_probs: Tensor, ref_log_probs: Tensor, attention_mask: Tensor) -> Tensor:
    """DEFECT: divides by the number of blocks of eight columns that the batch takes."""
    blocks = -(-log_probs.shape[1] // 8)
    return row_k2(log_probs, ref_log_probs, attention_mask).mean() / blocks


def cut_at_twelve(logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """DEFECT: batches wider than twelve columns are scaled by twelve over the width."""
    return kl_coef * row_k2(logps, ref_logps, mask).mean() * min(1.0, 12 / mask.shape[1])
