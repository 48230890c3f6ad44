"""KL102: the gradient is the other KL's."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row, without_sampler

FORWARD = frozenset({"forward_kl", "local_forward_kl"})


def explains(row: Row, findings: Findings) -> bool:
    plain = without_sampler(row.identified)
    return plain is not None and len(plain) == 1 and set(plain) <= FORWARD


def moot(findings: Findings) -> str | None:
    declared = {name.removesuffix("@sampler") for name in findings.expect}
    return "a forward KL is what was declared" if declared & FORWARD else None


def k3_as_loss(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 + (logp - ref_logp)


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": k3_as_loss, "mended": squared_sum})


CHECK = Check(
    code="KL102",
    name="forward-kl-gradient",
    title="The gradient is that of KL(ref‖π), the other direction",
    what=(
        "The expected gradient is the forward KL's (on sequences usually its token-by-token form), not that "
        "of the KL that the value estimates."
    ),
    why=(
        "k3 is an excellent estimate of the value of KL(π‖ref), but differentiating the estimate is not "
        "estimating the gradient: its weight 1 − ref/π is the forward KL's. Far from the reference the two "
        "differ in size without bound, and coordinates can have opposite signs."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294; k3 in the loss gives 0.5/0.2 − 0.5/0.8 = 1.875, which is ∇KL(ref‖π)."
    ),
    fix=(
        "Use k1 in the reward (whole return or reward-to-go), or multiply k3 by the differentiable importance "
        "ratio exp(logp − old_logp) for the token-level gradient, or take ½(Σ_t (logp − ref_logp))² as the "
        "loss. If mode-covering behaviour is wanted, declare it: --expect forward_kl."
    ),
    sources=(
        "Tang & Munos 2025, arXiv 2506.09477",
        "Shah et al. 2025, arXiv 2512.21852",
        "DeepSeek-V3.2, arXiv 2512.02556, §3.1",
    ),
    wrong=k3_as_loss,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)
