"""k3 as a per-token loss times the token's importance ratio, detached."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k3-ratio-detached",
    formula="Σ_t sg(ρ_t) (w_t − 1 + u_t)",
    source=(
        "Zhang et al. 2025 (RPG, arXiv 2505.17508) on what the ratio must weight; DeepSeek-V3.2 (arXiv 2512.02556), "
        "Eq. 7, with the ratio detached"
    ),
    placement="loss",
    claims="k3 with its importance correction",
    known_false="without the ratio's own gradient it is k3 as a loss: the forward KL's, token by token",
    identified={
        "current": {"bandit": {"forward_kl": 1.0}, "tokens": {"local_forward_kl": 1.0}},
        "stale": {"bandit": {"forward_kl": 1.0}, "tokens": {"local_forward_kl@sampler": 1.0}},
    },
    per_token=True,
)


@register(SPEC)
def k3_ratio_detached(logp, ref_logp, old_logp):
    """sg(ρ)·(w − 1 + u) per token. Value: as k3-ratio. Gradient: ρ·(1 − w)·g, the forward KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp().detach() * ((-u).exp() - 1 + u)
