"""k1 in the reward to go, each log-ratio weighted by its prefix ratio."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-reward-to-go-prefix-ratio",
    formula="Σ_t log π_t · sg(Σ_(s≥t) ρ_(1:s) u_s)",
    source=(
        "per-decision importance weights after Precup, Sutton & Singh 2000 (Eligibility Traces for Off-Policy Policy "
        "Evaluation), on k1 in the reward"
    ),
    placement="reward",
    credit="to-go",
    claims=(
        "the gradient of the sequence-level KL(π‖ref), whatever the sampler, with less noise than the full-sequence "
        "ratio"
    ),
    known_false=(
        "nothing about its expectation; its variance still grows with the length, and in rollouts of a few tokens it "
        "can be the noisier of the two"
    ),
    identified={"current": everywhere({"reverse_kl": 1.0}), "stale": everywhere({"reverse_kl": 1.0})},
)


@register(SPEC)
def k1_reward_to_go_prefix_ratio(logp, ref_logp, old_logp, mask):
    """ρ_(1:s)·u_s per token, a cost to go. Value: KL(π‖ref). Gradient: Σ_t g_t Σ_(s≥t) ρ_(1:s)u_s. (B, T) → (B, T)."""
    prefix = (logp - old_logp).where(mask != 0, 0.0).cumsum(dim=1).exp()
    return prefix * (logp - ref_logp)
