"""KL101: the term has no effect in expectation."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified == {"zero": 1.0} and not findings.blocked


def moot(findings: Findings) -> str | None:
    return "zero is what was declared" if set(findings.expect) <= {"zero"} else None


def k1_as_loss(logp, ref_logp):
    return logp - ref_logp


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": k1_as_loss, "mended": squared_sum})


CHECK = Check(
    code="KL101",
    name="zero-gradient",
    title="The KL term's expected gradient is zero",
    what=(
        "The gradient is not zero sample by sample, but its expectation is: the term adds noise and "
        "regularises nothing."
    ),
    why=(
        "Differentiating log π − log ref through the policy gives ∇log π, whose mean under the policy is "
        "zero. The logged value looks right and the coefficient seems to be set, yet the policy drifts as if "
        "β were 0."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294. k1 in the loss has weight 1 on every sample: 0.8·(1/0.8) − 0.2·(1/0.2) "
        "= 0."
    ),
    fix=(
        "Put k1 into the reward, detached (reward − β·(logp − ref_logp).detach()), or use ½(Σ_t (logp − "
        "ref_logp))² as the loss: both follow ∇KL(π‖ref)."
    ),
    sources=(
        "Tang & Munos 2025, arXiv 2506.09477",
        "Liu et al. 2025, arXiv 2510.01555",
    ),
    wrong=k1_as_loss,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)
