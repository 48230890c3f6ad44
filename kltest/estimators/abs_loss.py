"""The absolute log-ratio as a per-token loss."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="abs-loss",
    aliases=("abs",),
    formula="Σ_t |u_t|",
    source="verl, trainer/ppo/core_algos.py, kl_penalty 'abs'",
    placement="loss",
    claims="a symmetric, bounded-gradient penalty on the distance from the reference",
    known_false=(
        "it is no estimate of a KL: its gradient is twice total variation's, token by token, and as strong however "
        "near the reference"
    ),
    identified={
        "current": {"bandit": {"total_variation": 2.0}, "tokens": {"local_total_variation": 2.0}},
        "stale": {"bandit": {"total_variation@rollouts": 2.0}, "tokens": {"local_total_variation@rollouts": 2.0}},
    },
    per_token=True,
)


@register(SPEC)
def abs_loss(logp, ref_logp):
    """|u| per token. Value: E|u|, not the KL. Gradient: sign(u)·g, twice total variation's. (B, T) → (B, T)."""
    return (logp - ref_logp).abs()
