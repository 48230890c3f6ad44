"""KL404: in groups of one the term reads zero without a word."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.checks.groups.kl401_tied_groups_masked import kept_where_tied, masked_where_tied
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.groups.groups import silent_alone

    silent = silent_alone(findings)
    if silent is None:
        return None
    return Found(
        f"In a group of one rollout the {silent} is zero, for every rollout that was tried; the same rollouts, "
        "repeated as a group whose rewards differ, have one."
    )


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], reward=[(1.0, 0.0)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": masked_where_tied, "mended": kept_where_tied}, batch=1)


CHECK = Check(
    code="KL404",
    name="evaluation-masked",
    title="In groups of one rollout, as in evaluation, the KL silently reads zero",
    what=(
        "What masks groups without a reward signal masks every group of one: its reward never differs from its mean. "
        "The term, and whatever is logged from it, is exactly zero there."
    ),
    why=(
        "Evaluation usually draws one rollout a prompt. The KL that it reports is then 0 at every step, which looks "
        "like a policy that stays at its reference."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), groups of one; derivatives with respect to the first "
        "probability. The truth is ln 4 = 1.386294; masked, every group ties with itself and the term is 0."
    ),
    fix="Apply the mask to the policy-gradient part alone, and compute and log the KL of every rollout before it.",
    sources=("TRL #5588", "TRL #5640"),
    wrong=masked_where_tied,
    mended=kept_where_tied,
    demonstrate=demonstrate,
    examine=examine,
)
