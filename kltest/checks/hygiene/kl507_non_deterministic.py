"""KL507: the same batch gives different values or gradients."""

from __future__ import annotations

from itertools import count
from math import log
from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found
from kltest.checks.losses import squared_sum

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings

STEP = count()


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import repeat

    return findings.once(repeat.differs)


def every_other_step(logp, ref_logp, mask, step=STEP):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    weight = 2.0 if next(step) % 2 == 0 else 0.0
    return weight * log_ratio.square() / 2


def demonstrate() -> Demonstration:
    from functools import partial

    from kltest.checks.demonstrations import gradient, of_calls, rollout

    batch = rollout((log(0.8),), (log(0.5),))
    return of_calls(
        "one token, π = 0.8, ref = 0.5, the same batch twice",
        {"as written": partial(every_other_step, step=count()), "mended": squared_sum},
        {"gradient, first call": (batch, gradient(0)), "gradient, second call": (batch, gradient(0))},
    )


CHECK = Check(
    code="KL507",
    name="non-deterministic",
    title="The same batch gives different values or gradients",
    what=(
        "Called again with the same rollouts the loss returns another value or has another gradient: it draws random "
        "numbers, or keeps state between calls."
    ),
    why=(
        "What the optimiser follows then depends on how often the loss was called before: by a second epoch, by "
        "gradient checkpointing, by an evaluation. No expectation over rollouts is its gradient's, and a run cannot "
        "be repeated."
    ),
    example=(
        "One token with π = 0.8 and ref = 0.5: the gradient is ln 1.6 = 0.470004. A term that is doubled and applied "
        "every other step has 0.940007 in one call and 0 in the next."
    ),
    fix=(
        "Draw random numbers outside and pass them in, or seed a generator of the loss's own in every call. Keep a "
        "coefficient that adapts in the trainer, as an argument (beta), and change it between steps."
    ),
    sources=("PyTorch, notes on reproducibility",),
    wrong=every_other_step,
    mended=squared_sum,
    demonstrate=demonstrate,
    examine=examine,
)
