"""The reward part: the score-function gradient of E[R], with a baseline and an importance ratio.

With A = R − b, the ascent direction is the mean over rows of A·Σ_t c_t·g_t. The ratio determines c_t:

    none: c_t = 1      token: c_t = ρ_t      sequence: c_t = ρ_1·…·ρ_L
    clipped: c_t = ρ_t, or 0 if ρ_t > 1 + ε and A > 0, or if ρ_t < 1 − ε and A < 0 (the derivative of PPO's clip).

The baseline b is 0 ("none"), the mean reward of the row's group ("mean"), or the mean of the group's other rollouts
("leave-one-out"; 0 for a single rollout). "mean" includes the rollout itself, which scales the gradient by 1 − 1/n. In
exact mode without groups both means are the expected reward of the prompt under the sampler.
"""

from typing import Literal

import numpy as np

from kltest.training.batch import Batch

Baseline = Literal["none", "mean", "leave-one-out"]
Ratio = Literal["none", "token", "sequence", "clipped"]


def score_weights(
    batch: Batch, earned: np.ndarray, log_ratio: np.ndarray | None, baseline: Baseline, ratio: Ratio, clip: float
) -> np.ndarray:
    """Weights (T, M, R) on g_t, zero at dead tokens; (1, M, R) if all tokens of a row have the same.

    `earned` (M, R) is each row's reward; `log_ratio` (T, M, R) is log ρ_t, None if ρ = 1.
    """
    advantage = _less_baseline(batch, earned, baseline)
    weight = batch.weights * advantage
    if log_ratio is None or ratio == "none":
        factor = weight[None]
    elif ratio == "sequence":
        factor = (weight * np.exp(batch.along(log_ratio)))[None]
    else:
        token = np.exp(log_ratio)
        if ratio == "clipped":
            beyond = ((advantage > 0) & (token > 1 + clip)) | ((advantage < 0) & (token < 1 - clip))
            token = np.where(beyond, 0.0, token)
        factor = weight * token
    return factor if batch.live is None else np.where(batch.live, factor, 0.0)


def _less_baseline(batch: Batch, earned: np.ndarray, baseline: Baseline) -> np.ndarray:
    if baseline == "none":
        return earned
    centred = earned - batch.mean(earned)
    if baseline == "mean" or (batch.exact and batch.group_size == 1):
        return centred
    # x less the mean of n − 1 others is n/(n − 1) times x less the mean of all; alone, it is x itself.
    sizes = batch.sizes
    if isinstance(sizes, int):
        return centred * (sizes / (sizes - 1)) if sizes > 1 else earned
    return np.where(sizes > 1, centred * (sizes / np.maximum(sizes - 1, 1.0)), earned)
