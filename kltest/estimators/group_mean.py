"""k1 in the reward, less the mean over the group, the rollout itself included."""

from kltest.estimators.grouping import group_sum
from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="group-mean",
    formula="Σ_t log π_t · sg(k_i − (1/n)Σ_j k_j),  k = Σ_t u_t, j over the group's n rollouts",
    source="Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), the group's mean as baseline, with the KL in the reward",
    placement="loss",
    claims="the gradient of the sequence-level KL(π‖ref), with less noise",
    known_false=(
        "the baseline contains the rollout that it is subtracted from: 1 − 1/n of the gradient, three quarters of it "
        "in groups of four"
    ),
    identified={
        "current": everywhere({"reverse_kl": 0.75}),
        "stale": everywhere({"centred_reverse_kl@rollouts": 0.75}),
    },
    couples=True,
)


@register(SPEC)
def group_mean(logp, ref_logp, mask, group):
    """(k − group's mean of k)·Σlog π, detached weight. Gradient: (1 − 1/n)·∇KL, above at n = 4. (B, T) → (B,)."""
    live = mask != 0
    cost = (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    mean = group_sum(cost, group) / group_sum(cost.new_ones(len(cost)), group)
    return (cost - mean) * logp.where(live, 0.0).sum(dim=1)
