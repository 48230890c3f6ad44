"""k2 as a per-token loss times the token's importance ratio, detached."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k2-ratio-detached",
    aliases=("unbiased_gradient",),
    formula="Σ_t sg(ρ_t) u_t²/2",
    source="Liu et al. 2025 (arXiv 2510.01555); OpenRLHF, compute_approx_kl with unbiased_gradient",
    placement="loss",
    claims="the gradient of KL(π‖ref), corrected for the sampler",
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
def k2_ratio_detached(logp, ref_logp, old_logp):
    """sg(ρ)·u²/2 per token. Value: E_π[u²]/2, not the KL. Gradient: ρ·u·g, as k3-ratio's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp().detach() * u.square() / 2
