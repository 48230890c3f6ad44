"""k3 in the loss and in the reward."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k3-both",
    formula="Σ_t (w_t − 1 + u_t) + Σ_t log π_t · sg(Σ_s (w_s − 1 + u_s))",
    source="Tang & Munos 2025 (arXiv 2506.09477): the product rule for E_π[k]",
    placement="both",
    claims="the gradient of the sequence-level KL(π‖ref), each half cancelling the other's bias",
    known_false=(
        "only with the full coefficient in both places; off-policy it is biased without the full-sequence ratio"
    ),
    identified={
        "current": everywhere({"reverse_kl": 1.0}),
        "stale": {
            "bandit": {"reverse_kl@rollouts": 1.0},
            "tokens": {"reverse_kl@rollouts": 1.0, "other_tokens_forward_kl@rollouts": -1.0},
        },
    },
    per_token=True,
)


@register(SPEC)
def k3_both(logp, ref_logp):
    """w − 1 + u per token, in both places. Value: KL(π‖ref). Gradient as placed: the reverse KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (-u).exp() - 1 + u
