"""k3 as a per-token loss, its log-ratio and its value clamped."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-clamped",
    aliases=("low_var_kl",),
    formula="Σ_t clamp(w_t − 1 + u_t, −10, 10)",
    source="verl, trainer/ppo/core_algos.py, kl_penalty 'low_var_kl'",
    placement="loss",
    claims="k3, made safe against overflow",
    known_false=(
        "if the clamp is silent it is k3 as a loss, the forward KL's gradient; at u below −2.6 or above 11 it has "
        "no gradient at all, just where the policy is furthest from the reference"
    ),
    identified={
        "current": {"bandit": {"forward_kl": 1.0}, "tokens": {"local_forward_kl": 1.0}},
        "stale": {"bandit": {"forward_kl@rollouts": 1.0}, "tokens": {"local_forward_kl@rollouts": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k3_clamped(logp, ref_logp, log_bound=20.0, bound=10.0):
    """clamp(w − 1 + u, ±bound), u clamped to ±log_bound. Gradient: (1 − w)·g, 0 beyond the bounds. (B, T) → (B, T)."""
    u = (logp - ref_logp).clamp(-log_bound, log_bound)
    return ((-u).exp() - 1 + u).clamp(-bound, bound)
