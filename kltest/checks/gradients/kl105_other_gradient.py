"""KL105: a gradient, but not the declared one, and no better-known mistake."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """A reward's combination without the declared gradient in it; whatever no check explains comes on top."""
    if findings.placement == "loss" or row.identified is None or len(row.identified) < 2:
        return False
    return any(abs(row.identified.get(name, 0.0) - factor) > 1e-3 for name, factor in row.expected.items())


def examine(findings: Findings) -> Found | None:
    """A gradient that is the declared one in mild worlds only; where it is clamped, that is KL504's to tell."""
    from kltest.checks import far_apart as distant
    from kltest.checks.hygiene import extremes

    away = findings.once(distant.differs_much)
    if away is None or findings.once(extremes.dead_zones):
        return None
    return Found(away.words)


def absolute(logp, ref_logp):
    return (logp - ref_logp).abs()


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": absolute, "mended": squared_sum})


CHECK = Check(
    code="KL105",
    name="other-gradient",
    title="The gradient is another one, or none that has a name",
    what=(
        "The expected gradient is not the declared one. Where it was identified the report names it; where it "
        "was not, no combination of up to three named gradients with common coefficients equals it. It may be the "
        "declared one where the policy is near its reference, and another one far away from it."
    ),
    why="The term regularises towards something else than was declared, or follows no objective at all.",
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294; the absolute log-ratio |u| as a loss gives 2, which is twice the "
        "gradient of the total variation distance."
    ),
    fix=(
        "Compare the identified gradient with the one you meant. If it is the one you want, declare it with "
        "--expect; otherwise start from k1 in the reward or ½(Σ_t (logp − ref_logp))² in the loss."
    ),
    sources=("Tang & Munos 2025, arXiv 2506.09477",),
    wrong=absolute,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    examine=examine,
)
