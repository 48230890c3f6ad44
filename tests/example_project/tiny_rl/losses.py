"""KL penalties towards a reference policy."""

import torch


def sequence_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio of each whole answer: its expected gradient is that of KL(policy‖reference)."""
    log_ratio = (logprobs - ref_logprobs).masked_fill(response_mask == 0, 0.0)
    return log_ratio.sum(dim=-1).square() / 2


def token_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The same token by token, which leaves out what a token does to the later ones."""
    log_ratio = (logprobs - ref_logprobs).masked_fill(response_mask == 0, 0.0)
    return log_ratio.square() / 2
