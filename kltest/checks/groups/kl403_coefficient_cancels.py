"""KL403: advantages are divided by a deviation that the KL term itself makes up."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings, Row


def cancels(findings: Findings) -> bool:
    from kltest.checks.groups.coefficient import coefficient

    return coefficient(findings).kind == "cancels"


def explains(row: Row, findings: Findings) -> bool:
    return moot(findings) is None and cancels(findings)


def examine(findings: Findings) -> Found | None:
    if not cancels(findings):
        return None
    return Found(
        "In a group of equal rewards the KL part of the gradient is the same at β = 0.02, 0.2 and 2; in other groups "
        "it is not proportional to β either."
    )


def moot(findings: Findings) -> str | None:
    return None if findings.loss.takes_beta else "the loss takes no coefficient"


def normalised_with_the_kl(logp, ref_logp, mask, rewards, kl_coef):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    value = rewards - kl_coef * cost
    advantages = (value - value.mean()) / (value.std() + 1e-4)
    return -(advantages * logp.where(mask != 0, 0.0).sum(-1)).mean()


def normalised_without_the_kl(logp, ref_logp, mask, rewards, kl_coef):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio.square() / 2 - advantages * logp.where(mask != 0, 0.0).sum(-1)).mean()


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], reward=[(1.0, 1.0)])
BETAS = (0.01, 0.1, 1.0)


def demonstrate() -> Demonstration:
    import numpy as np

    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact_batches

    instance = WORLD.instance()
    scale = float(np.exp(instance.policy[0].sum()))
    rows: list[tuple[str | float, ...]] = []
    for beta in BETAS:
        found = [
            exact_batches(bind(loss, Call(beta=beta)), instance, size=2, grouped=True).gradient[0, 0]
            for loss in (normalised_with_the_kl, normalised_without_the_kl)
        ]
        rows.append((f"β = {beta:g}", *(float(beta * part / scale) for part in found)))
    return Demonstration(
        f"{WORLD.words()}\nEvery rollout has reward 1; groups of 2; ∂/∂p(0) of the KL part.",
        ("coefficient", "as written", "mended"),
        tuple(rows),
    )


CHECK = Check(
    code="KL403",
    name="coefficient-cancels",
    title="The coefficient cancels: the KL term is inside advantages that are divided by their deviation",
    what=(
        "The KL is subtracted from the reward and the advantages are then divided by their standard deviation. Where "
        "the task rewards of a group are equal the deviation is β times that of the KL, and β cancels."
    ),
    why=(
        "In such groups the push is the same for every β > 0, as large as a task reward's: a tiny penalty is not tiny "
        "there. In other groups the penalty is divided by a deviation that it helps to make up, so that it is not "
        "proportional to β anywhere."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), equal rewards, groups of two. Where the two actions differ, "
        "with probability 0.32, the advantages are ±0.707: the derivative with respect to the first probability is "
        "0.707 for β = 1 and 0.706 for β = 0.1, where β·ln 4 is 1.386 and 0.139."
    ),
    fix=(
        "Normalise the task rewards alone, and add the KL term to the loss outside of them; or subtract the mean and "
        "divide by nothing."
    ),
    sources=(
        "Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",
        "Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300",
    ),
    wrong=normalised_with_the_kl,
    mended=normalised_without_the_kl,
    demonstrate=demonstrate,
    explains=explains,
    examine=examine,
    moot=moot,
)
