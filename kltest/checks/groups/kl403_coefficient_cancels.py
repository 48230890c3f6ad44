"""KL403: advantages are divided by a deviation to which the KL term itself contributes."""

from __future__ import annotations

import numpy as np

from kltest.checks.check import Found
from kltest.checks.groups.coefficient import coefficient, no_coefficient
from kltest.counterexample.demonstration import Demonstration
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import exact_batches


def explains(row: Row, findings: Findings) -> bool:
    return no_coefficient(findings) is None and coefficient(findings).kind == "cancels"


def examine(findings: Findings) -> Found | None:
    if coefficient(findings).kind != "cancels":
        return None
    return Found(
        "In a group of equal rewards the KL part of the gradient is the same at β = 0.02, 0.2 and 2; in other groups "
        "it is not proportional to β either."
    )


moot = no_coefficient


def normalised_with_the_kl(logp, ref_logp, mask, rewards, kl_coef):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    value = rewards - kl_coef * cost
    advantages = (value - value.mean()) / (value.std() + 1e-4)
    return -(advantages * logp.where(mask != 0, 0.0).sum(-1)).mean()


def normalised_without_the_kl(logp, ref_logp, mask, rewards, kl_coef):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio.square() / 2 - advantages * logp.where(mask != 0, 0.0).sum(-1)).mean()


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], reward=[(1.0, 1.0)])
BETAS = (0.01, 0.1, 1.0)


def demonstrate() -> Demonstration:
    instance = ENVIRONMENT.instance()
    scale = float(np.exp(instance.policy[0].sum()))
    rows: list[tuple[str | float, ...]] = []
    for beta in BETAS:
        found = [
            exact_batches(bind(loss, Call(beta=beta)), instance, size=2, grouped=True).gradient[0, 0]
            for loss in (normalised_with_the_kl, normalised_without_the_kl)
        ]
        rows.append((f"β = {beta:g}", *(float(beta * part / scale) for part in found)))
    return Demonstration(
        f"{ENVIRONMENT.words()}\nEvery rollout has reward 1; groups of 2; ∂/∂p(0) of the KL part.",
        ("coefficient", "as written", "fixed"),
        tuple(rows),
    )
