"""KL510: the coefficient does not do what a coefficient does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings, Row, proportion

if TYPE_CHECKING:
    from kltest.checks.groups.coefficient import Coefficient


def explains(row: Row, findings: Findings) -> bool:
    if moot(findings):
        return False
    kind = what_it_does(findings).kind
    if kind == "ignored":
        return row.identified in (None, {"zero": 1.0})
    return kind == "other" and (row.identified is None or proportion(row.identified, row.expected) is not None)


def what_it_does(findings: Findings) -> Coefficient:
    from kltest.checks.groups.coefficient import coefficient

    return coefficient(findings)


def tells(row: Row, findings: Findings) -> str:
    return "the loss at β is the loss without it" if what_it_does(findings).kind == "ignored" else ""


def examine(findings: Findings) -> Found | None:
    found = what_it_does(findings)
    if found.kind not in ("ignored", "other"):
        return None
    if found.kind == "ignored":
        return Found("The loss takes a coefficient, and neither its value nor its gradient changes with it.")
    words = ", ".join(f"{strength:.4g} at β = {beta:g}" for beta, strength in found.strength.items())
    return Found(f"What β adds to the gradient, as a multiple of what it adds at the β of this grading: {words}.")


def moot(findings: Findings) -> str | None:
    return None if findings.loss.takes_beta else "the loss takes no coefficient"


def squared_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio).square() / 2


def plain_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return kl_coef * log_ratio.square() / 2


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])
BETAS = (0.01, 0.1, 1.0)


def demonstrate() -> Demonstration:
    import numpy as np

    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact

    instance = WORLD.instance()
    scale = float(np.exp(instance.policy[0].sum()))
    rows: list[tuple[str | float, ...]] = []
    for beta in BETAS:
        losses = (squared_coefficient, plain_coefficient)
        found = [exact(bind(loss, Call(beta=beta)), instance).gradient[0, 0] for loss in losses]
        rows.append((f"β = {beta:g}", *(float(beta * part / scale) for part in found)))
    return Demonstration(
        f"{WORLD.words()}\n∂/∂p(0) of what β adds to the loss.", ("coefficient", "as written", "mended"), tuple(rows)
    )


CHECK = Check(
    code="KL510",
    name="coefficient-ignored",
    title="The KL part of the gradient is not proportional to the coefficient",
    what=(
        "The loss takes a coefficient and does something else with it than to multiply its KL term by it: nothing at "
        "all, a square, a limit."
    ),
    why=(
        "Whoever sets the coefficient believes to set the strength of the penalty. Sweeps over it, published settings "
        "and adaptive controllers then move something else, or nothing."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), the coefficient inside of the square; derivatives with "
        "respect to the first probability. At β = 0.1 the penalty should push with 0.1·ln 4 = 0.138629, and pushes "
        "with 0.013863."
    ),
    fix="Multiply the KL term by the coefficient, once, outside of any square, clamp or normalisation.",
    sources=("Ray RLlib #52286, #61782: use_kl_loss is ignored in the loss",),
    wrong=squared_coefficient,
    mended=plain_coefficient,
    demonstrate=demonstrate,
    options={"beta": 0.1},
    explains=explains,
    tells=tells,
    examine=examine,
    moot=moot,
)
