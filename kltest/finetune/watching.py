"""What a batch and its update tell by themselves: metrics that need no further rollouts."""

from __future__ import annotations

import torch

from kltest.finetune.objective import advantages, clipped
from kltest.finetune.settings import Settings
from kltest.finetune.update import Followed
from kltest.language_models.rollouts import Rollouts

Record = dict[str, float]


def of_batch(batch: Rollouts, followed: Followed, end: tuple[int, ...]) -> Record:
    """Of the joint batch before its first update; `sampler_gap` of this process's part. Names as in METRICS."""
    fields = followed.fields
    reward, live = fields.reward, fields.mask
    gap = (followed.logp - batch.sampled_logp).abs().where(batch.mask, 0.0).max()
    last = fields.tokens.gather(1, live.sum(dim=1, keepdim=True) - 1)
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
    return record if followed.logged is None else {**record, "kl_logged": followed.logged}


def of_ratios(followed: Followed, settings: Settings) -> Record:
    """Of a batch whose sampler is stale; `settings` are resolved. Names as in METRICS."""
    fields = followed.fields
    log_ratio = (fields.logp - fields.old_logp).where(fields.mask, 0.0)
    record = {"ratio_largest": float(log_ratio.exp().max())}
    if settings.clip > 0:
        if settings.ratio == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
        advantage = advantages(fields.reward, fields.group, settings.baseline, settings.scale)[:, None]
        cut = clipped(log_ratio.exp(), advantage, settings.clip) & fields.mask
        record["clipped"] = float(cut.sum() / fields.mask.sum())
    return record
