"""k3 as a per-token loss (GRPO)."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-loss",
    aliases=("k3", "grpo-kl"),
    formula="Σ_t (w_t − 1 + u_t),  w = e^(−u)",
    source="Shao et al. 2024 (DeepSeekMath, GRPO), Eq. 4; Schulman 2020 for the value",
    placement="loss",
    claims="an unbiased, non-negative, low-variance estimate of KL(π‖ref)",
    known_false="the value is unbiased; its gradient is the forward KL's, token by token",
    identified={
        "current": {"bandit": {"forward_kl": 1.0}, "tokens": {"local_forward_kl": 1.0}},
        "stale": {"bandit": {"forward_kl@rollouts": 1.0}, "tokens": {"local_forward_kl@rollouts": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k3_loss(logp, ref_logp):
    """w − 1 + u per token. Value: KL(π‖ref). Gradient: (1 − w)·g, the forward KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (-u).exp() - 1 + u
