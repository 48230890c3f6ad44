"""k3 of the whole sequence's log-ratio, in the reward."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k3-reward-sequence",
    formula="Σ_t log π_t · sg(e^(−Σu) − 1 + Σu)",
    source="Schulman 2020 for the value; Shah et al. 2025 (arXiv 2512.21852), K3 in reward",
    placement="reward",
    claims="an unbiased, non-negative estimate of the sequence-level KL(π‖ref) in the reward",
    known_false=(
        "the value is unbiased; the gradient lacks the forward KL's and vanishes to first order near the reference"
    ),
    identified={
        "current": everywhere({"reverse_kl": 1.0, "forward_kl": -1.0}),
        "stale": everywhere({"reverse_kl@rollouts": 1.0, "forward_kl@rollouts": -1.0}),
    },
)


@register(SPEC)
def k3_reward_sequence(logp, ref_logp, mask):
    """e^(−Σu) − 1 + Σu per sequence, as a cost. Value: KL(π‖ref). Gradient as placed: that times Σg. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    return (-u).exp() - 1 + u
