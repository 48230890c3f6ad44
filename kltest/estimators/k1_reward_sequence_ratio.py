"""k1 in the reward with the full-sequence ratio."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-reward-sequence-ratio",
    formula="Σ_t log π_t · sg(ρ_(1:L) Σ_s u_s)",
    source=(
        "importance sampling of k1 in the reward (Tang & Munos 2025, arXiv 2506.09477; Shah et al. 2025, arXiv "
        "2512.21852)"
    ),
    placement="reward",
    claims="the gradient of the sequence-level KL(π‖ref), whatever the sampler",
    known_false="nothing about its expectation; its variance grows exponentially with the length",
    identified={"current": everywhere({"reverse_kl": 1.0}), "stale": everywhere({"reverse_kl": 1.0})},
)


@register(SPEC)
def k1_reward_sequence_ratio(logp, ref_logp, old_logp, mask):
    """ρ_(1:L)·u per token, as a cost. Value: KL(π‖ref). Gradient as placed: ρ_(1:L)·Σg·Σu. (B, T) → (B, T)."""
    log_ratio = (logp - old_logp).where(mask != 0, 0.0).sum(dim=1, keepdim=True)
    return log_ratio.exp() * (logp - ref_logp)
