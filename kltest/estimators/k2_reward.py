"""k2 in the reward, every token charged with the whole return."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k2-reward",
    formula="Σ_t log π_t · sg(Σ_s u_s²/2)",
    source="Schulman 2020 for the value; Liu et al. 2025 (arXiv 2510.01555) on k1, k2 and k3 in either place",
    placement="reward",
    claims="a non-negative KL penalty in the reward",
    known_false=(
        "of ∇E[Σu²/2] it has the score-function half only: the reverse KL's gradient, token by token, is missing"
    ),
    identified={
        "current": {
            "bandit": {"squared_log_ratio": 1.0, "reverse_kl": -1.0},
            "tokens": {"squared_log_ratio_sum": 1.0, "local_reverse_kl": -1.0},
        },
        "stale": {
            "bandit": {"squared_log_ratio@rollouts": 1.0, "reverse_kl@rollouts": -1.0},
            "tokens": {"squared_log_ratio_sum@rollouts": 1.0, "local_reverse_kl@rollouts": -1.0},
        },
    },
    per_token=True,
)


@register(SPEC)
def k2_reward(logp, ref_logp):
    """u²/2 per token, as a cost. Value: E[u²]/2, not the KL. Gradient as placed: Σg·Σu²/2. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u.square() / 2
