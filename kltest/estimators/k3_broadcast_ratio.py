"""k3 as a per-token loss times one sequence ratio, the geometric mean, differentiable."""

from kltest.estimators.spec import Spec, register

_MIXED = {
    "reverse_kl@mean_ratio": 1 / 3,
    "local_forward_kl@mean_ratio": 2 / 3,
    "other_tokens_forward_kl@mean_ratio": -1 / 3,
}
SPEC = Spec(
    name="k3-broadcast-ratio",
    formula="Σ_t ρ̄ (w_t − 1 + u_t),  ρ̄ = (Π_s ρ_s)^(1/L)",
    source="TRL, GRPOTrainer with importance_sampling_level='sequence' and use_bias_correction_kl",
    placement="loss",
    claims="k3 with its importance correction, at the level of the sequence",
    known_false=(
        "on-policy at a fixed length T it follows the forward KL's token-by-token gradient, 1/T of the way towards the "
        "reverse KL's; off-policy, for T > 1, it is biased further, about as much as without a ratio"
    ),
    identified={
        "current": {
            "bandit": {"reverse_kl": 1.0},
            "sequence": {"local_forward_kl": 2 / 3, "reverse_kl": 1 / 3},
            "ragged": None,
            "mdp": {"local_forward_kl": 2 / 3, "reverse_kl": 1 / 3},
        },
        "stale": {"bandit": {"reverse_kl": 1.0}, "ragged": None, "sequence": _MIXED, "mdp": _MIXED},
    },
)


@register(SPEC)
def k3_broadcast_ratio(logp, ref_logp, old_logp, mask):
    """exp(mean log ρ)·(w − 1 + u) per token. Gradient: ρ̄[Σ(1 − w)g + Σk3·Σg/L]; above at T = 3. (B, T) → (B, T)."""
    live = mask != 0
    log_ratio = (logp - old_logp).where(live, 0.0).sum(dim=1, keepdim=True)
    u = (logp - ref_logp).where(live, 0.0)
    return (log_ratio / live.sum(dim=1, keepdim=True).clamp(min=1)).exp() * ((-u).exp() - 1 + u)
