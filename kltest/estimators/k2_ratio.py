"""k2 as a per-token loss times the token's importance ratio, differentiable."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k2-ratio",
    formula="Σ_t ρ_t u_t²/2",
    source="Schulman 2020 for the value; DeepSeek-V3.2 (arXiv 2512.02556), Eq. 7, with k2 in place of k3",
    placement="loss",
    claims="k2 with its importance correction",
    known_false=(
        "k2's value is biased, and differentiating the ratio brings that bias into the gradient: it follows E[u²]/2"
    ),
    identified={
        "current": {"bandit": {"squared_log_ratio": 1.0}, "tokens": {"local_squared_log_ratio": 1.0}},
        "stale": {"bandit": {"squared_log_ratio": 1.0}, "tokens": {"local_squared_log_ratio@sampler": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k2_ratio(logp, ref_logp, old_logp):
    """ρ·u²/2 per token. Value: E_π[u²]/2, not the KL. Gradient: ρ·(u + u²/2)·g. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp() * u.square() / 2
