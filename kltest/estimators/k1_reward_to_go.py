"""k1 in the reward, a token charged with its own and all later log-ratios."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-reward-to-go",
    formula="Σ_t log π_t · sg(Σ_(s≥t) u_s)",
    source="Tang & Munos 2025 (arXiv 2506.09477)",
    placement="reward",
    credit="to-go",
    claims="the gradient of the sequence-level KL(π‖ref), with less noise than the whole return",
    known_false="off-policy it is biased without prefix ratios; in some environments the whole return is less noisy",
    identified={
        "current": everywhere({"reverse_kl": 1.0}),
        "stale": {
            "bandit": {"reverse_kl@rollouts": 1.0},
            "tokens": {"local_reverse_kl@rollouts": 1.0, "future_reverse_kl@rollouts": 1.0},
        },
    },
    per_token=True,
)


@register(SPEC)
def k1_reward_to_go(logp, ref_logp):
    """u per token, as a cost. Value: KL(π‖ref). Gradient as placed: Σ_t g_t Σ_(s≥t) u_s. (B, T) → (B, T)."""
    return logp - ref_logp
