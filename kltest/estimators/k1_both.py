"""k1 in the loss and in the reward."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-both",
    formula="Σ_t u_t + Σ_t log π_t · sg(Σ_s u_s)",
    source="Tang & Munos 2025 (arXiv 2506.09477): the product rule for E_π[k]",
    placement="both",
    claims="the gradient of the sequence-level KL(π‖ref)",
    known_false=(
        "the half in the loss is noise without expectation; off-policy it is biased without the full-sequence ratio"
    ),
    identified={
        "current": everywhere({"reverse_kl": 1.0}),
        "stale": everywhere({"from_sampler_kl": -1.0, "reverse_kl@rollouts": 1.0}),
    },
    per_token=True,
)


@register(SPEC)
def k1_both(logp, ref_logp):
    """u per token, in both places. Value: KL(π‖ref). Gradient: Σg·(Σu + 1), the reverse KL's. (B, T) → (B, T)."""
    return logp - ref_logp
