"""The value of k3 with the gradient of k2, as a per-token loss."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-straight-through",
    aliases=("k3+", "low_var_kl+", "straight-through"),
    formula="Σ_t [sg(w_t − 1 + u_t) + u_t²/2 − sg(u_t²/2)]",
    source=(
        "verl, trainer/ppo/core_algos.py, kl_penalty 'k3+' and 'low_var_kl+'; Liu et al. 2025 (arXiv 2510.01555) for "
        "the gradient"
    ),
    placement="loss",
    claims="an unbiased value together with an unbiased gradient of KL(π‖ref)",
    known_false=(
        "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy no ratio "
        "corrects it"
    ),
    identified={
        "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
        "stale": {"bandit": {"reverse_kl@rollouts": 1.0}, "tokens": {"local_reverse_kl@rollouts": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k3_straight_through(logp, ref_logp):
    """k3 in value, k2 in gradient. Value: KL(π‖ref). Gradient: u·g, as k2-loss's. (B, T) → (B, T)."""
    u = logp - ref_logp
    k2 = u.square() / 2
    k3 = (-u).exp() - 1 + u
    return k3.detach() + k2 - k2.detach()
