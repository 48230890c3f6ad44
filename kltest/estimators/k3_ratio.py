"""k3 as a per-token loss times the token's importance ratio, differentiable."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-ratio",
    aliases=("use_bias_correction_kl",),
    formula="Σ_t ρ_t (w_t − 1 + u_t),  ρ = π/μ",
    source="DeepSeek-V3.2 (arXiv 2512.02556), Eq. 7; TRL, GRPOConfig.use_bias_correction_kl",
    placement="loss",
    claims="an unbiased estimate of KL(π‖ref) in value and gradient",
    known_false=(
        "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy the prefixes "
        "stay the sampler's"
    ),
    identified={
        "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
        "stale": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl@sampler": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k3_ratio(logp, ref_logp, old_logp):
    """ρ·(w − 1 + u) per token. Value: KL(π‖ref), prefixes from μ. Gradient: ρ·u·g. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp() * ((-u).exp() - 1 + u)
