"""k3 in the reward, every token charged with the whole return."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-reward",
    formula="Σ_t log π_t · sg(Σ_s (w_s − 1 + u_s))",
    source="Shah et al. 2025 (arXiv 2512.21852), K3 in reward",
    placement="reward",
    claims="an unbiased, non-negative, low-variance KL penalty in the reward",
    known_false=(
        "the value is unbiased; w depends on the policy, so the gradient lacks the forward KL's, token by token, and "
        "vanishes to first order near the reference at T = 1"
    ),
    identified={
        "current": {
            "bandit": {"reverse_kl": 1.0, "forward_kl": -1.0},
            "tokens": {"reverse_kl": 1.0, "local_forward_kl": -1.0},
        },
        "stale": {
            "bandit": {"reverse_kl@rollouts": 1.0, "forward_kl@rollouts": -1.0},
            "tokens": {
                "reverse_kl@rollouts": 1.0,
                "local_forward_kl@rollouts": -1.0,
                "other_tokens_forward_kl@rollouts": -1.0,
            },
        },
    },
    per_token=True,
)


@register(SPEC)
def k3_reward(logp, ref_logp):
    """w − 1 + u per token, as a cost. Value: KL(π‖ref). Gradient as placed: Σg·Σ(w − 1 + u). (B, T) → (B, T)."""
    u = logp - ref_logp
    return (-u).exp() - 1 + u
