"""KL509: no gradient reaches the policy."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return findings.blocked


def moot(findings: Findings) -> str | None:
    return "a value in the reward needs no gradient" if findings.placement == "reward" else None


def detached(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": detached, "mended": squared_sum})


CHECK = Check(
    code="KL509",
    name="gradient-blocked",
    title="The loss has no gradient with respect to the policy",
    what="What the loss returned is not connected to the policy's log-probs: autograd has nothing to follow.",
    why=(
        "A detach, a no_grad block, .item() or a trip through numpy cut the graph. Added to another loss the "
        "term is silently ignored."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294; under torch.no_grad() every estimate has gradient 0, sample by sample."
    ),
    fix=(
        "Remove the detach or no_grad around the term. If it is meant as a value inside the reward, say so: "
        "--placement reward."
    ),
    sources=("OpenRLHF #1309",),
    wrong=detached,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)
