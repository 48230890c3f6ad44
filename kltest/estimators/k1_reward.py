"""k1 in the reward, every token charged with the whole return."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k1-reward",
    formula="Σ_t log π_t · sg(Σ_s u_s)",
    source="Tang & Munos 2025 (arXiv 2506.09477); Shah et al. 2025 (arXiv 2512.21852), K1 in reward",
    placement="reward",
    claims="the gradient of the sequence-level KL(π‖ref)",
    known_false="off-policy it is biased without the full-sequence ratio",
    identified={"current": everywhere({"reverse_kl": 1.0}), "stale": everywhere({"reverse_kl@rollouts": 1.0})},
    per_token=True,
)


@register(SPEC)
def k1_reward(logp, ref_logp):
    """u per token, as a cost. Value: KL(π‖ref). Gradient as placed: Σg·Σu, the reverse KL's. (B, T) → (B, T)."""
    return logp - ref_logp
