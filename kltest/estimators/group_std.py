"""k1 in the reward of advantages that are divided by their group's standard deviation."""

from kltest.estimators.grouping import group_sum
from kltest.estimators.spec import UNNAMED, Spec, register

SPEC = Spec(
    name="group-std",
    formula="−Σ_t log π_t · sg((r_i − mean)/(std + 1e−4)),  r = R − β·Σ_t u_t, over the group's n rollouts",
    source=(
        "Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), group-normalised advantages, with the KL in the reward; "
        "Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783) on the division"
    ),
    placement="loss",
    claims="a KL penalty of weight β beside the task reward",
    known_false=(
        "in a group of equal task rewards β cancels: the push is the same for every β > 0; elsewhere it is not "
        "proportional to β"
    ),
    identified={"current": UNNAMED, "stale": UNNAMED},
    couples=True,
)


@register(SPEC)
def group_std(logp, ref_logp, mask, reward, group, beta):
    """−normalised (R − β·Σu)·Σlog π, detached weight. Gradient: a multiple of no named one. (B, T) → (B,)."""
    live = mask != 0
    regularised = reward - beta * (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    rows = group_sum(reward.new_ones(len(reward)), group)
    centred = regularised - group_sum(regularised, group) / rows
    std = (group_sum(centred.square(), group) / (rows - 1).clamp(min=1)).sqrt()
    return -centred / (std + 1e-4) * logp.where(live, 0.0).sum(dim=1)
