"""k1 in the reward of whole groups, the rollouts of one prompt, and a penalty that depends on the group's rewards."""

from kltest.estimators.spec import UNNAMED, Spec, everywhere, register


def group_sum(values, group):
    """(B,) for every row the sum of `values` (B,) over the rows that share its number in `group` (B,) int."""
    _, place = group.unique(return_inverse=True)
    return values.new_zeros(int(place.max()) + 1).index_add(0, place, values)[place]


@register(
    Spec(
        name="group-mean",
        formula="Σ_t log π_t · sg(k_i − (1/n)Σ_j k_j),  k = Σ_t u_t, j over the group's n rollouts",
        source=(
            "Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), the group's mean as baseline, with the KL in the reward"
        ),
        placement="loss",
        claims="the gradient of the sequence-level KL(π‖ref), with less noise",
        known_false=(
            "the baseline contains the rollout that it is subtracted from: 1 − 1/n of the gradient, three quarters of "
            "it in groups of four"
        ),
        identified={
            "current": everywhere({"reverse_kl": 0.75}),
            "stale": everywhere({"centred_reverse_kl@rollouts": 0.75}),
        },
        couples=True,
    )
)
def group_mean(logp, ref_logp, mask, group):
    """(k − group's mean of k)·Σlog π, detached weight. Gradient: (1 − 1/n)·∇KL, above at n = 4. (B, T) → (B,)."""
    live = mask != 0
    cost = (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    mean = group_sum(cost, group) / group_sum(cost.new_ones(len(cost)), group)
    return (cost - mean) * logp.where(live, 0.0).sum(dim=1)


@register(
    Spec(
        name="leave-one-out",
        aliases=("rloo",),
        formula="Σ_t log π_t · sg(k_i − (1/(n−1))Σ_(j≠i) k_j),  k = Σ_t u_t, j over the group's n rollouts",
        source="Ahmadian et al. 2024 (RLOO, arXiv 2402.14740), with the KL in the reward; Kool et al. 2019",
        placement="loss",
        claims="the gradient of the sequence-level KL(π‖ref), with less noise",
        known_false="off-policy it is biased without the full-sequence ratio",
        identified={
            "current": everywhere({"reverse_kl": 1.0}),
            "stale": everywhere({"centred_reverse_kl@rollouts": 1.0}),
        },
        couples=True,
    )
)
def leave_one_out(logp, ref_logp, mask, group):
    """(k − the others' mean of k)·Σlog π, detached weight; k itself alone. Gradient: ∇KL. (B, T) → (B,)."""
    live = mask != 0
    cost = (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    others = group_sum(cost.new_ones(len(cost)), group) - 1
    baseline = (group_sum(cost, group) - cost) / others.clamp(min=1)
    return (cost - baseline.where(others > 0, 0.0)) * logp.where(live, 0.0).sum(dim=1)


@register(
    Spec(
        name="group-std",
        formula="−Σ_t log π_t · sg((r_i − mean)/(std + 1e−4)),  r = R − β·Σ_t u_t, over the group's n rollouts",
        source=(
            "Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), group-normalised advantages, with the KL in the "
            "reward; Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783) on the division"
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
)
def group_std(logp, ref_logp, mask, reward, group, beta):
    """−normalised (R − β·Σu)·Σlog π, detached weight. Gradient: a multiple of no named one. (B, T) → (B,)."""
    live = mask != 0
    regularised = reward - beta * (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    rows = group_sum(reward.new_ones(len(reward)), group)
    centred = regularised - group_sum(regularised, group) / rows
    std = (group_sum(centred.square(), group) / (rows - 1).clamp(min=1)).sqrt()
    return -centred / (std + 1e-4) * logp.where(live, 0.0).sum(dim=1)


@register(
    Spec(
        name="tied-groups-masked",
        formula="½(Σ_t u_t)²·1{the group's rewards are not all equal}",
        source=(
            "TRL #5588 and #5640, proposed and declined: the whole loss of a group without a reward signal is masked"
        ),
        placement="loss",
        claims="a KL penalty that is not spent on groups that teach nothing",
        known_false=(
            "the KL term of tied groups belongs to the gradient of the regularised objective: what is lost is "
            "E[1{tied}·KL term], all of it in groups of one"
        ),
        identified={"current": UNNAMED, "stale": UNNAMED},
        couples=True,
    )
)
def tied_groups_masked(logp, ref_logp, mask, reward, group):
    """½(Σu)² if the group's rewards differ, else 0. Gradient: ∇KL − E[1{tied}·Σu·Σg]. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    mean = group_sum(reward, group) / group_sum(reward.new_ones(len(reward)), group)
    differs = ((reward - mean).abs() > 1e-9).to(u.dtype)
    return (u.square() / 2).where(group_sum(differs, group) > 0, 0.0)
