"""k1 as a per-token loss: the log-ratio itself, differentiated."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-loss",
    aliases=("k1", "kl"),
    formula="Σ_t u_t,  u = log π − log ref",
    source="Schulman 2020 for the value; Tang & Munos 2025 (arXiv 2506.09477) on differentiating it",
    placement="loss",
    claims="an unbiased estimate of KL(π‖ref)",
    known_false=(
        "the value is unbiased; the reference drops out of the gradient, which is zero on-policy and off-policy pushes "
        "π away from the sampler"
    ),
    identified={"current": everywhere({"zero": 1.0}), "stale": everywhere({"from_sampler_kl": -1.0})},
    per_token=True,
)


@register(SPEC)
def k1_loss(logp, ref_logp):
    """u per token. Value: KL(π‖ref). Gradient: g, which is zero in expectation on-policy. (B, T) → (B, T)."""
    return logp - ref_logp
