"""Sequence-level k2, left out in groups whose rewards are all the same."""

from kltest.estimators.grouping import group_sum
from kltest.estimators.spec import UNNAMED, Spec, register

SPEC = Spec(
    name="tied-groups-masked",
    formula="½(Σ_t u_t)²·1{the group's rewards are not all equal}",
    source="TRL #5588 and #5640, proposed and declined: the whole loss of a group without a reward signal is masked",
    placement="loss",
    claims="a KL penalty that is not spent on groups that teach nothing",
    known_false=(
        "the KL term of tied groups belongs to the gradient of the regularised objective: what is lost is E[1{tied}·KL "
        "term], all of it in groups of one"
    ),
    identified={"current": UNNAMED, "stale": UNNAMED},
    couples=True,
)


@register(SPEC)
def tied_groups_masked(logp, ref_logp, mask, reward, group):
    """½(Σu)² if the group's rewards differ, else 0. Gradient: ∇KL − E[1{tied}·Σu·Σg]. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    mean = group_sum(reward, group) / group_sum(reward.new_ones(len(reward)), group)
    differs = ((reward - mean).abs() > 1e-9).to(u.dtype)
    return (u.square() / 2).where(group_sum(differs, group) > 0, 0.0)
