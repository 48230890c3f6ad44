"""KL604: the logged KL counts padding."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def moot(findings: Findings) -> str | None:
    from kltest.checks.logged_values import logged

    return logged.no_kl(findings) or logged.only_one_length(findings)


def examine(findings: Findings) -> Found | None:
    from kltest.checks.logged_values import logged

    found = findings.once(logged.moves_with_padding)
    return Found(found) if found else None


def logs_all_positions(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    total = log_ratio.where(mask != 0, 0.0).sum(-1)
    return total.square() / 2, {"kl": log_ratio.sum(-1).mean()}


def logs_live_positions(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0)
    total = log_ratio.sum(-1)
    return total.square() / 2, {"kl": total.mean()}


WORLD = SmallWorld(policy=[(0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5), (0.5, 0.5)], length=2, ends=True)


def demonstrate() -> Demonstration:
    from kltest.checks.logged_values import logged

    losses = {"as written": logs_all_positions, "mended": logs_live_positions}
    return logged.demonstrate_padding(WORLD, losses, (0.0, 1.0, -1.0))


CHECK = Check(
    code="KL604",
    name="metric-ignores-mask",
    title="The logged KL counts padding",
    what='The logged "kl" changes with what stands at positions that the mask rules out.',
    why=(
        "Padded positions hold whatever the model says there, or a sentinel. The metric then depends on how much "
        "padding a batch happens to carry and on how it was filled: it moves while the policy does not, and runs "
        "with different maximal lengths cannot be compared."
    ),
    example=(
        "Up to two tokens, the second of two actions ending the rollout, π = (0.8, 0.2) at the root and equal to "
        "ref = (0.5, 0.5) afterwards: KL(π‖ref) = 0.192745. A fifth of the rollouts have one token and one padded "
        "position. With a log-ratio of 1 written there the metric is 0.392745 in expectation, with −1 it is −0.007255."
    ),
    fix="Apply the mask that the loss applies: (log_ratio * mask).sum(-1).mean(), or cut padding out beforehand.",
    sources=("TRL #6803, #6809: objective/kl of Online DPO includes padding",),
    wrong=logs_all_positions,
    mended=logs_live_positions,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)
