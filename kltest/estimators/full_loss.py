"""The exact next-token KL as a per-token loss."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="full-loss",
    aliases=("full",),
    formula="Σ_t KL(π(·|s_t)‖ref(·|s_t))",
    source=(
        "verl, trainer/ppo/core_algos.py, kl_penalty 'full'; Tang & Munos 2025 (arXiv 2506.09477) on the partial "
        "gradient"
    ),
    placement="loss",
    claims="the exact KL(π‖ref) of the next token, without sampling noise in the action",
    known_false="exact in every prefix that was visited; how the policy chooses its prefixes gets no gradient",
    identified={
        "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
        "stale": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl@sampler": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def full_loss(logits, ref_logits):
    """Σ_v π_v (log π_v − log ref_v) per token. Value: KL(π‖ref). Gradient: exact in each prefix. (B, T, V) → (B, T)."""
    return (logits.exp() * (logits - ref_logits)).sum(dim=-1)
