"""KL505: the loss writes into its inputs."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found
from kltest.checks.losses import squared_sum

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import inputs

    return inputs.writes(findings)


def in_place(logp, ref_logp, mask):
    log_ratio = ref_logp.neg_().add_(logp)
    return log_ratio.where(mask != 0, 0.0).sum(-1).square() / 2


def demonstrate() -> Demonstration:
    from kltest.checks.demonstrations import row
    from kltest.counterexample.demonstration import Demonstration

    columns, values = {"as written": in_place, "mended": squared_sum}, []
    for loss in columns.values():
        stored = row((log(0.5),))
        values.append([float(loss(row((log(0.8),)), stored, row((1.0,)))) for _ in range(2)])
    first, second = zip(*values, strict=True)
    return Demonstration(
        "one token, π = 0.8, ref = 0.5; the reference's log-probs are stored, for two epochs",
        ("", *columns),
        (("value, first epoch", *first), ("value, second epoch", *second)),
    )


CHECK = Check(
    code="KL505",
    name="input-mutated",
    title="The loss writes into its inputs",
    what=(
        "After the call an input is not bit for bit what it was: through an operation in place, a view, .data, "
        ".numpy(), or an item of a stored list. Writing what stood there already is no change."
    ),
    why=(
        "A batch is used again: by the next epoch, by the micro-batch whose view shares the memory, by what is logged. "
        "All of them see the changed numbers, and none of them fails."
    ),
    example=(
        "One token with π = 0.8 and a stored ref = 0.5. The first epoch's value is (ln 1.6)²/2 = 0.110452; the "
        "log-ratio was computed in the stored reference's memory, so that the second epoch's is (ln 0.5)²/2 = 0.240227."
    ),
    fix=(
        "Use operations that return a new tensor (sub, where, masked_fill instead of sub_, masked_fill_, x[...] = y), "
        "or work on a clone()."
    ),
    sources=("slime #2114",),
    wrong=in_place,
    mended=squared_sum,
    demonstrate=demonstrate,
    examine=examine,
)
