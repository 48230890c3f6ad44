"""KL103: the policy is pushed the wrong way."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row, local_form, proportion, without_sampler


def explains(row: Row, findings: Findings) -> bool:
    found = without_sampler(row.identified)
    meant = [row.expected, local_form(row.expected)]
    if row.expected.keys() & {"reverse_kl", "local_reverse_kl"}:
        meant += [{"forward_kl": 1.0}, {"local_forward_kl": 1.0}]
    return any((proportion(found, target) or 0) < 0 for target in meant)


def subtracted(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return -log_ratio.square() / 2


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": subtracted, "mended": squared_sum})


CHECK = Check(
    code="KL103",
    name="wrong-sign",
    title="The gradient has the wrong sign",
    what="The expected gradient is a negative multiple of the declared one.",
    why=(
        "A penalty became a bonus: minimising this loss moves the policy away from the reference, faster the "
        "further it is."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294; a sign slip in k2's log-ratio or in the reward gives −1.386294."
    ),
    fix=(
        "The KL is added to a loss that is minimised and subtracted from a reward that is maximised. Check "
        "which convention the surrounding code has, and the order in logp − ref_logp."
    ),
    sources=("Tang & Munos 2025, arXiv 2506.09477",),
    wrong=subtracted,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
)
