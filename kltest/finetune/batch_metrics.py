"""Metrics of a training batch and its update, which need no further rollouts."""

from __future__ import annotations

import torch

from kltest.finetune.objective import advantages, clipped
from kltest.finetune.settings import Settings
from kltest.finetune.update import UpdateInfo
from kltest.language_models.rollouts import Rollouts

Record = dict[str, float]


def of_batch(batch: Rollouts, info: UpdateInfo, end: tuple[int, ...]) -> Record:
    """Return metrics of the joint batch at its first update; names as in METRICS.

    Args:
        batch: This process's rollouts; `sampler_gap` is of these alone.
        info: Of the first update.
        end: Ids of end tokens.
    """
    fields = info.fields
    reward, live = fields.reward, fields.mask  # (B,), (B, T)
    gap = (info.logp - batch.sampled_logp).abs().where(batch.mask, 0.0).max()
    last = fields.tokens.gather(1, live.sum(dim=1, keepdim=True) - 1)  # (B, 1)
    _, group = fields.group.unique(return_inverse=True)
    largest = torch.full_like(reward[: int(group.max()) + 1], -torch.inf).scatter_reduce(0, group, reward, "amax")
    smallest = torch.full_like(largest, torch.inf).scatter_reduce(0, group, reward, "amin")
    record = {
        "reward": float(reward.mean()),
        "length": float(live.sum() / len(live)),
        "ended": float(torch.isin(last, torch.tensor(end, device=last.device)).float().mean()),
        "tied_groups": float((largest == smallest).to(reward).mean()),
        "sampler_gap": float(gap),
    }
    return record if info.logged is None else {**record, "kl_logged": info.logged}


def of_ratios(info: UpdateInfo, settings: Settings) -> Record:
    """Return metrics of the importance ratios in the last inner epoch; `settings` are resolved."""
    fields = info.fields
    log_ratio = (fields.logp - fields.old_logp).where(fields.mask, 0.0)  # (B, T)
    record = {"ratio_largest": float(log_ratio.exp().max())}
    if settings.clip > 0:
        if settings.ratio == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
        advantage = advantages(fields.reward, fields.group, settings.baseline, settings.scale)[:, None]
        cut = clipped(log_ratio.exp(), advantage, settings.clip) & fields.mask
        record["clipped"] = float(cut.sum() / fields.mask.sum())
    return record
