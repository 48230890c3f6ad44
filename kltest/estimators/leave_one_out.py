"""k1 in the reward, less the mean over the other rollouts of the group."""

from kltest.estimators.grouping import group_sum
from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="leave-one-out",
    aliases=("rloo",),
    formula="Σ_t log π_t · sg(k_i − (1/(n−1))Σ_(j≠i) k_j),  k = Σ_t u_t, j over the group's n rollouts",
    source="Ahmadian et al. 2024 (RLOO, arXiv 2402.14740), with the KL in the reward; Kool et al. 2019",
    placement="loss",
    claims="the gradient of the sequence-level KL(π‖ref), with less noise",
    known_false="off-policy it is biased without the full-sequence ratio",
    identified={"current": everywhere({"reverse_kl": 1.0}), "stale": everywhere({"centred_reverse_kl@rollouts": 1.0})},
    couples=True,
)


@register(SPEC)
def leave_one_out(logp, ref_logp, mask, group):
    """(k − the others' mean of k)·Σlog π, detached weight; k itself alone. Gradient: ∇KL. (B, T) → (B,)."""
    live = mask != 0
    cost = (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    others = group_sum(cost.new_ones(len(cost)), group) - 1
    baseline = (group_sum(cost, group) - cost) / others.clamp(min=1)
    return (cost - baseline.where(others > 0, 0.0)) * logp.where(live, 0.0).sum(dim=1)
