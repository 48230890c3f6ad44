"""k1 in the reward from the sampler's log-probs, with the full-sequence ratio."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-reward-stale",
    formula="Σ_t log π_t · sg(ρ_(1:L) Σ_s (log μ_s − log ref_s))",
    source=(
        "verl, trainer/ppo/ray_trainer.py, apply_kl_penalty: the KL of the reward is taken once, from the sampler's "
        "log-probs"
    ),
    placement="reward",
    claims="k1 in the reward",
    known_false=(
        "the policy that is regularised is the sampler: off-policy the gradient lacks that of KL(π‖μ), however exact "
        "the ratio"
    ),
    identified={
        "current": everywhere({"reverse_kl": 1.0}),
        "stale": everywhere({"reverse_kl": 1.0, "to_sampler_kl": -1.0}),
    },
    off_policy_only=True,
)


@register(SPEC)
def k1_reward_stale(logp, ref_logp, old_logp, mask):
    """ρ_(1:L)·(log μ − log ref) per token, as a cost. Value: KL(π‖ref) − KL(π‖μ). (B, T) → (B, T)."""
    log_ratio = (logp - old_logp).where(mask != 0, 0.0).sum(dim=1, keepdim=True)
    return log_ratio.exp() * (old_logp - ref_logp)
