"""k1 in the reward with PPO's token ratio, plain or clipped: the penalty as it reaches an actor's loss."""

import math
from functools import partial
from typing import Any

from .settings import CLIP


def k1_reward_token_ratio(logp: Any, ref_logp: Any, old_logp: Any, mask: Any, clip: float) -> Any:
    """max(ρ_t·c, clip(ρ_t, 1 − ε, 1 + ε)·c) per token, c = sg(Σ_s u_s) the rollout's cost. (B, T) → (B, T).

    Gradient: ρ_t·c·g_t, or 0 where ρ_t < 1 − ε and c > 0, or ρ_t > 1 + ε and c < 0. Source: Schulman et al. 2017
    (PPO, arXiv 1707.06347), Eq. 7, with the KL inside the reward and no baseline.
    """
    live = mask != 0
    cost = (logp - ref_logp).detach().where(live, 0.0).sum(dim=1, keepdim=True)
    ratio = (logp - old_logp).where(live, 0.0).exp()
    return (ratio * cost).maximum(ratio.clamp(1 - clip, 1 + clip) * cost)


OWN = {
    "k1-reward-token-ratio": partial(k1_reward_token_ratio, clip=math.inf),
    "k1-reward-clipped-ratio": partial(k1_reward_token_ratio, clip=CLIP),
}
