"""k1 plus λ of the control variate w − 1, in the loss and in the reward."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="lambda-baseline",
    formula="k_λ = u + λ(w − 1);  Σ_t k_λ,t + Σ_t log π_t · sg(Σ_s k_λ,s)",
    source="Schulman 2020 for the control variate λ(w − 1); λ = 0 is k1-both, λ = 1 is k3-both",
    placement="both",
    claims="the gradient of the sequence-level KL(π‖ref), its variance tuned by λ",
    known_false=(
        "the λ of the least noisy value is not that of the least noisy gradient; off-policy it is biased without the "
        "full-sequence ratio"
    ),
    identified={
        "current": everywhere({"reverse_kl": 1.0}),
        "stale": {
            "bandit": {"reverse_kl@rollouts": 1.0, "from_sampler_kl": -0.5},
            "tokens": {"reverse_kl@rollouts": 1.0, "other_tokens_forward_kl@rollouts": -0.5, "from_sampler_kl": -0.5},
        },
    },
    per_token=True,
)


@register(SPEC)
def lambda_baseline(logp, ref_logp, lam=0.5):
    """u + λ(w − 1) per token, in both places. Value: KL(π‖ref). Gradient: the reverse KL's, any λ. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u + lam * ((-u).exp() - 1)
