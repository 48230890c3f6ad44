"""Wrong losses as other people's libraries write them, importable by a program that knows nothing of kltest."""

import contextlib
import io
import json
import math
import os
import sys

import torch
import torch.nn.functional as F

SCALE = 3.0


def output(code, folder):
    """Run a program in a folder, and return the lines that it prints."""
    os.chdir(folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<program>", "exec"), {})
    assert not any(module.partition(".")[0] == "kltest" for module in sys.modules)
    return out.getvalue().splitlines()


def printed(code, folder):
    """Run a program in a folder, and return what it prints, a value a line."""
    return [json.loads(line) for line in output(code, folder)]


def k3_per_token(logp, ref_logp):
    delta = ref_logp - logp
    return torch.expm1(delta) - delta


def k3_of_sequences(logp, ref_logp, mask):
    delta = torch.where(mask.bool(), ref_logp - logp, 0.0).sum(-1)
    return torch.exp(delta) - delta - 1


def k3_scalar(log_probs, ref_log_probs, response_mask):
    delta = ref_log_probs - log_probs
    kl = torch.exp(delta) - delta - 1
    return (kl * response_mask).sum() / response_mask.sum()


def k2_per_token(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def with_metrics(logp, ref_logp, mask):
    u = logp - ref_logp
    return (u * mask).sum(-1), {"kl": (u * mask).sum(-1).mean().detach()}


def whole_distribution(logits, ref_logits, mask):
    kl = F.kl_div(ref_logits, logits, log_target=True, reduction="none").sum(-1)
    return (kl * mask).sum(-1)


def wrong_for_three_actions(logp, ref_logp, logits):
    factor = 1.0 if logits.shape[-1] == 2 else 2.0
    return factor * 0.5 * (logp - ref_logp).sum(-1) ** 2


def no_ratio(logp, ref_logp, old_logp, mask):
    return 0.5 * torch.where(mask > 0, logp - ref_logp, 0.0).sum(-1) ** 2 + 0.0 * old_logp.sum()


def token_ratio(logp, ref_logp, old_logp):
    return (logp - old_logp).exp().detach() * 0.5 * (logp - ref_logp) ** 2


def divided_where_lengths_differ(logp, ref_logp, mask):
    u = torch.where(mask > 0, logp - ref_logp, 0.0).sum(-1)
    return 0.5 * u * u * mask.shape[1] / mask.sum(-1)


def square_root(logp, ref_logp, mask):
    u = torch.where(mask > 0, logp - ref_logp, 0.0).sum(-1)
    return torch.sqrt(1 + u * u)


def scaled(logp, ref_logp, mask, scale):
    u = torch.where(mask > 0, logp - ref_logp, 0.0).sum(-1)
    return scale * u * u * SCALE / math.pi


def policy_loss(logp, ref_logp, old_logp, advantages, mask, beta):
    ratio = torch.exp(logp - old_logp)
    policy = -ratio * (advantages[:, None] if advantages.dim() == 1 else advantages)
    delta = ref_logp - logp
    return ((policy + beta * (torch.exp(delta) - delta - 1)) * mask).sum(-1)


def baseline_of_the_group(logp, ref_logp, reward, mask):
    total = torch.where(mask > 0, logp - ref_logp, 0.0).sum(-1)
    cost = (total - total.mean() - 0.0 * reward).detach()
    return (cost * torch.where(mask > 0, logp, 0.0).sum(-1)).mean()


def leave_one_out_added_up(logp, ref_logp, reward, mask):
    total = torch.where(mask > 0, logp - ref_logp, 0.0).sum(-1).detach() + 0.0 * reward
    cost = total - (total.sum() - total) / (len(total) - 1)
    return (cost * torch.where(mask > 0, logp, 0.0).sum(-1)).sum()


def in_single_precision(logp, ref_logp):
    delta = (ref_logp - logp).float()
    return torch.exp(delta) - delta - 1


def leaks_padding(logp, ref_logp):
    return 0.5 * (logp - ref_logp).sum(-1) ** 2


class Trainer:
    def loss(self, logp, ref_logp):
        return self.coefficient * (logp - ref_logp) ** 2
