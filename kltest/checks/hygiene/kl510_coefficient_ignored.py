"""KL510: the KL part of the gradient is not proportional to the coefficient."""

from __future__ import annotations

import numpy as np

from kltest.checks.check import Found
from kltest.checks.groups.coefficient import coefficient, no_coefficient
from kltest.counterexample.demonstration import Demonstration
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row, proportion
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import exact


def explains(row: Row, findings: Findings) -> bool:
    if no_coefficient(findings):
        return False
    kind = coefficient(findings).kind
    if kind == "ignored":
        return row.identified in (None, {"zero": 1.0})
    return kind == "other" and (row.identified is None or proportion(row.identified, row.expected) is not None)


def tells(row: Row, findings: Findings) -> str:
    return "the loss at β is the loss without it" if coefficient(findings).kind == "ignored" else ""


def examine(findings: Findings) -> Found | None:
    found = coefficient(findings)
    if found.kind not in ("ignored", "other"):
        return None
    if found.kind == "ignored":
        return Found("The loss takes a coefficient, and neither its value nor its gradient changes with it.")
    words = ", ".join(f"{strength:.4g} at β = {beta:g}" for beta, strength in found.strength.items())
    return Found(f"What β adds to the gradient, as a multiple of what it adds at the β of this grading: {words}.")


moot = no_coefficient


def squared_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio).square() / 2


def plain_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return kl_coef * log_ratio.square() / 2


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])
BETAS = (0.01, 0.1, 1.0)


def demonstrate() -> Demonstration:
    instance = ENVIRONMENT.instance()
    scale = float(np.exp(instance.policy[0].sum()))
    rows: list[tuple[str | float, ...]] = []
    for beta in BETAS:
        losses = (squared_coefficient, plain_coefficient)
        found = [exact(bind(loss, Call(beta=beta)), instance).gradient[0, 0] for loss in losses]
        rows.append((f"β = {beta:g}", *(float(beta * part / scale) for part in found)))
    setting = f"{ENVIRONMENT.words()}\n∂/∂p(0) of what β adds to the loss."
    return Demonstration(setting, ("coefficient", "as written", "fixed"), tuple(rows))
