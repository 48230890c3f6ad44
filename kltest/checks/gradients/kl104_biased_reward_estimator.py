"""KL104: a term in the reward whose value is fine and whose gradient is not."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import k1_as_reward
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row

# What no estimator of the KL brings along by its own derivative: it comes from somewhere else.
NO_DERIVATIVE = frozenset({"to_sampler_kl", "from_sampler_kl", "entropy", "expected_reward"})


def explains(row: Row, findings: Findings) -> bool:
    if row.identified is None or len(row.identified) < 2:
        return False
    return not set(row.identified) & NO_DERIVATIVE


def moot(findings: Findings) -> str | None:
    return "the term is not placed in the reward" if findings.placement == "loss" else None


def k3_as_reward(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 + (logp - ref_logp)


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(
        WORLD, {"as written": k3_as_reward, "mended": k1_as_reward}, call=lambda name: {"placement": "reward"}
    )


CHECK = Check(
    code="KL104",
    name="biased-reward-estimator",
    title="The estimator in the reward brings a second gradient with it",
    what=(
        "The expected gradient is the declared one minus another: the derivative of the estimator itself, "
        "which a detached reward leaves out."
    ),
    why=(
        "A term in the reward contributes E[∇log π · c]. That equals ∇E[c] only if E[∇c] = 0, which holds for "
        "k1 = log π − log ref and for no other estimator: k3's own gradient is the forward KL's, k2's is the "
        "reverse KL's."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294. k3 in the reward gives ∇KL(π‖ref) − ∇KL(ref‖π) = 1.386294 − 1.875 = "
        "−0.488706: the wrong sign."
    ),
    fix=(
        "Use k1 = logp − ref_logp in the reward; or put the same estimator into the loss as well, with the "
        "full coefficient in both places, so that the missing derivative is restored."
    ),
    sources=(
        "Tang & Munos 2025, arXiv 2506.09477",
        "Shah et al. 2025, arXiv 2512.21852",
    ),
    wrong=k3_as_reward,
    mended=k1_as_reward,
    demonstrate=demonstrate,
    options={"placement": "reward"},
    explains=explains,
    moot=moot,
)
