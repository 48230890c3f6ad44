"""KL401: groups without a reward signal are left out, and their KL term with them."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def masks(findings: Findings) -> bool:
    from kltest.checks.groups.groups import masks_tied_groups

    return masks_tied_groups(findings)


def explains(row: Row, findings: Findings) -> bool:
    return row.batch > 1 and masks(findings)


def tells(row: Row, findings: Findings) -> str:
    from kltest.checks.groups.groups import lost_to_ties

    ties, lost = lost_to_ties(row, findings)
    share = "" if lost is None else f", {lost:.3g} of the KL term's gradient"
    return f"a group of {row.batch} ties with probability {ties:.3g}, and with it E[1{{tied}}·KL term] is lost{share}"


def examine(findings: Findings) -> Found | None:
    if not masks(findings):
        return None
    return Found(
        "In a group whose rewards are all the same the KL part of the gradient is zero; with other rewards, and "
        "nothing else changed, it is not. With P(r) the probability of a reward a group of n ties with probability "
        "Σ_r P(r)^n, and what is lost is E[1{tied}·KL term]."
    )


def moot(findings: Findings) -> str | None:
    from kltest.checks.groups.groups import sees_rewards

    return None if sees_rewards(findings) else "the loss sees neither rewards nor advantages"


def masked_where_tied(logp, ref_logp, mask, rewards, group):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    differs = (rewards[:, None] != rewards) & (group[:, None] == group)
    return (log_ratio.square() / 2).where(differs.any(-1), 0.0)


def kept_where_tied(logp, ref_logp, mask, rewards, group):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], reward=[(1.0, 0.0)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": masked_where_tied, "mended": kept_where_tied}, batch=2, grouped=True)


CHECK = Check(
    code="KL401",
    name="tied-groups-masked",
    title="The KL term of groups whose rewards are all equal is masked",
    what=(
        "In a group whose rollouts all got the same reward the loss is zero, its KL term included: the expected "
        "gradient loses E[1{tied}·KL term]."
    ),
    why=(
        "Where rewards tie the advantage is zero and the gradient of E[R] − β·KL is the KL term alone: it belongs "
        "there. Without it another objective is followed, and the penalty is lifted exactly on prompts that "
        "are always solved or never, where the policy is free to drift."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), reward 1 for the first and 0 for the second, groups of two; "
        "derivatives with respect to the first probability. Groups tie with probability 0.8² + 0.2² = 0.68. The truth "
        "is ln 4 = 1.386294; masked, 0.827033 of it is left."
    ),
    fix=(
        "Mask the policy-gradient part alone, which is zero there anyway, and add the KL term of every rollout to the "
        "loss."
    ),
    sources=("TRL #5588", "TRL #5640"),
    wrong=masked_where_tied,
    mended=kept_where_tied,
    demonstrate=demonstrate,
    explains=explains,
    tells=tells,
    examine=examine,
    moot=moot,
)
