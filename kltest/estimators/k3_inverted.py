"""k3 with its ratio upside down, as a per-token loss."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-inverted",
    formula="Σ_t (e^(u_t) − 1 − u_t)",
    source="Schulman 2020, with the two policies of k3 exchanged",
    placement="loss",
    claims="k3: non-negative and of low variance",
    known_false=(
        "it would be k3 for samples from the reference; for samples from the policy its value is χ²(π‖ref) − KL(π‖ref) "
        "and it follows ½χ²(π‖ref), token by token"
    ),
    identified={
        "current": {"bandit": {"chi_square": 1.0}, "tokens": {"local_chi_square": 1.0}},
        "stale": {"bandit": {"chi_square@rollouts": 1.0}, "tokens": {"local_chi_square@rollouts": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k3_inverted(logp, ref_logp):
    """e^u − 1 − u per token. Value: not KL(π‖ref). Gradient: (e^u − 1)·g, half a chi-square's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u.exp() - 1 - u
