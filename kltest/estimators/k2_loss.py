"""k2 as a per-token loss: half the squared log-ratio."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k2-loss",
    aliases=("k2", "mse"),
    formula="Σ_t u_t²/2",
    source="Schulman 2020 for the value; Liu et al. 2025 (arXiv 2510.01555) for the gradient",
    placement="loss",
    claims="the gradient of KL(π‖ref): as a loss, what k1 is in the reward",
    known_false=(
        "the value is biased; on sequences no token answers for the KL of those after it; off-policy no ratio corrects "
        "it"
    ),
    identified={
        "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
        "stale": {"bandit": {"reverse_kl@rollouts": 1.0}, "tokens": {"local_reverse_kl@rollouts": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k2_loss(logp, ref_logp):
    """u²/2 per token. Value: E[u²]/2, not the KL. Gradient: u·g, the local reverse KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u.square() / 2
