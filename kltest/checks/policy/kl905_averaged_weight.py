"""KL905: a rollout's importance weight is the mean of its tokens' ratios, where their product is meant."""

from collections.abc import Callable

import numpy as np

from kltest.checks.batches import limit
from kltest.environments import Instance
from kltest.identify.findings import Findings, Row
from kltest.truth.off_policy import along, of_rollouts

Mean = Callable[[np.ndarray, np.ndarray], np.ndarray]
SAME = 1e-6


def explains(row: Row, findings: Findings) -> str | None:
    """Name the mean w̄ of a row from another sampler that follows c·E_μ[w̄ Σ_t g_t (R − b)], one c in all instances."""
    if row.sampler == "current" or row.batch > 1 or not row.gradients or row.length == 1:
        return None
    for words, mean in {"geometric": _geometric, "arithmetic": _arithmetic}.items():
        for per_token in (False, True):
            pairs = zip(row.gradients, row.case.instances, strict=True)
            shares = [_share(found, instance, mean, per_token, limit(findings)) for found, instance in pairs]
            if min(shares) > 0 and np.ptp(shares) < SAME * max(shares):
                return f"the {words} mean of a rollout's ratios is its weight, where their product is meant"
    return None


def _share(found: np.ndarray, instance: Instance, mean: Mean, per_token: bool, limit: float) -> float:
    """Return the c of that, with a baseline b for each prompt and perhaps 1/L; NaN if the gradient is none of it."""
    paths = instance.paths
    ratio = np.where(np.isfinite(instance.sampler), instance.policy - instance.sampler, 0.0)
    weight = instance.rollout_weights("stale") * mean(along(instance, ratio), paths.lengths)
    weight = weight / paths.lengths if per_token else weight
    reward = instance.environment.returns(paths)
    prompts = [weight * (paths.prompt == prompt) for prompt in np.unique(paths.prompt)]
    columns = np.stack([of_rollouts(instance, each[:, None]).ravel() for each in (weight * reward, *prompts)], axis=1)
    solved = np.linalg.lstsq(columns, found.ravel(), rcond=None)[0]
    fits = np.linalg.norm(columns @ solved - found.ravel()) <= limit * np.linalg.norm(found)
    return float(solved[0]) if fits else float("nan")


def _geometric(log_ratio: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.exp(log_ratio.sum(axis=1) / lengths)


def _arithmetic(log_ratio: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    padded = log_ratio.shape[1] - lengths  # each adds e⁰ to the sum
    return (np.exp(log_ratio).sum(axis=1) - padded) / lengths


def averaged(logp, old_logp, reward, mask):
    live = mask != 0
    log_weight = (logp - old_logp).where(live, 0.0).sum(-1) / live.sum(-1)
    return -log_weight.exp().detach() * reward * logp.where(live, 0.0).sum(-1)


def multiplied(logp, old_logp, reward, mask):
    live = mask != 0
    log_weight = (logp - old_logp).where(live, 0.0).sum(-1)
    return -log_weight.exp().detach() * reward * logp.where(live, 0.0).sum(-1)
