"""k1 in the reward, a token charged with its own log-ratio only."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k1-reward-immediate",
    formula="Σ_t log π_t · sg(u_t)",
    source="Tang & Munos 2025 (arXiv 2506.09477), the partial gradient",
    placement="reward",
    credit="immediate",
    claims="k1 in the reward",
    known_false="a discount of zero: no token answers for the KL of those after it",
    identified={
        "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
        "stale": {"bandit": {"reverse_kl@rollouts": 1.0}, "tokens": {"local_reverse_kl@rollouts": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k1_reward_immediate(logp, ref_logp):
    """u per token, as a cost. Value: KL(π‖ref). Gradient as placed: Σ_t g_t u_t, no future credit. (B, T) → (B, T)."""
    return logp - ref_logp
