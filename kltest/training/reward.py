"""The reward part: the score-function gradient of E[R], with a baseline and an importance ratio.

With A = R − b, the ascent direction is the mean over rows of A·Σ_t c_t·g_t. The ratio determines c_t:

    none: c_t = 1      token: c_t = ρ_t      sequence: c_t = ρ_1·…·ρ_L
    clipped: c_t = ρ_t, or 0 if ρ_t > 1 + ε and A > 0, or if ρ_t < 1 − ε and A < 0 (the derivative of PPO's clip).

The baseline b is the mean reward of the group's other rollouts (0 for a single rollout); in exact mode without groups
it is the expected reward of the prompt under the sampler.
"""

from typing import Literal

import numpy as np

from kltest.training.batch import Batch

Ratio = Literal["none", "token", "sequence", "clipped"]
# PPO's ε.
CLIP = 0.2


def score_weights(batch: Batch, earned: np.ndarray, log_ratio: np.ndarray | None, ratio: Ratio) -> np.ndarray:
    """Weights (T, M, R) on g_t, zero at dead tokens; (1, M, R) if all tokens of a row have the same.

    `earned` (M, R) is each row's reward; `log_ratio` (T, M, R) is log ρ_t, None if ρ = 1.
    """
    advantage = _less_baseline(batch, earned)
    weight = batch.weights * advantage
    if log_ratio is None or ratio == "none":
        factor = weight[None]
    elif ratio == "sequence":
        factor = (weight * np.exp(batch.along(log_ratio)))[None]
    else:
        token = np.exp(log_ratio)
        if ratio == "clipped":
            beyond = ((advantage > 0) & (token > 1 + CLIP)) | ((advantage < 0) & (token < 1 - CLIP))
            token = np.where(beyond, 0.0, token)
        factor = weight * token
    return factor if batch.live is None else np.where(batch.live, factor, 0.0)


def _less_baseline(batch: Batch, earned: np.ndarray) -> np.ndarray:
    centred = earned - batch.mean(earned)
    if batch.exact and batch.group_size == 1:
        return centred
    # x less the mean of n − 1 others is n/(n − 1) times x less the mean of all; alone, it is x itself.
    sizes = batch.sizes
    if isinstance(sizes, int):
        return centred * (sizes / (sizes - 1)) if sizes > 1 else earned
    return np.where(sizes > 1, centred * (sizes / np.maximum(sizes - 1, 1.0)), earned)
