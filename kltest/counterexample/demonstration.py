"""Pitfalls demonstrated in small environments: exact numbers, as a table.

Nothing heavy is imported until a demonstration is run: the list of checks is read without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kltest.counterexample.environment import SmallEnvironment
from kltest.report import align, format_cell


@dataclass(frozen=True)
class Demonstration:
    """Exact numbers of a pitfall: the setting in words, then a table whose cells are texts or numbers."""

    setting: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table as text, numbers with six decimals, the head first."""
        return [self.columns, *(tuple(map(format_cell, row)) for row in self.rows)]

    def text(self) -> str:
        """Return the setting and the aligned table."""
        return "\n".join([self.setting, "", *align(self.cells())])


def of_gradients(
    environment: SmallEnvironment,
    losses: dict[str, Callable[..., Any]],
    *,
    declared: str = "reverse_kl",
    sampler: str = "current",
    batch: int = 1,
    grouped: bool = False,
    call: Callable[[str], dict[str, Any]] = lambda name: {},
) -> Demonstration:
    """Return the declared gradient and the expected gradients of losses, context by context.

    With two actions the derivative is with respect to the probability of the first, otherwise with respect to each
    logit.

    Args:
        environment: The small environment.
        losses: The losses by the names of their columns.
        declared: The declared gradient, as for `--expect`.
        sampler: "current" or "stale".
        batch: Rollouts in a batch.
        grouped: True if the rollouts of a batch are one group.
        call: Returns the options (placement, credit, arguments) of a loss, by its name.
    """
    import numpy as np

    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact, exact_batches
    from kltest.truth import combine, parse

    instance = environment.instance()
    gradients = {"truth": combine(parse(declared), instance)}
    for name, function in losses.items():
        loss = bind(function, Call(**call(name)), name=name)
        if batch == 1:
            gradients[name] = exact(loss, instance, sampler).gradient
        else:
            gradients[name] = exact_batches(loss, instance, sampler, batch, grouped=grouped).gradient
    probabilities = np.exp(instance.policy)
    rows: list[tuple[str | float, ...]] = []
    for context, row in enumerate(probabilities):
        prefix = environment.prefix(context)
        if len(row) == 2:
            scale = row.prod()  # ∂/∂θ(0) = p(0)·p(1)·∂/∂p(0)
            rows.append((f"∂/∂p(0), {prefix}", *(float(g[context, 0] / scale) for g in gradients.values())))
        else:
            for action in range(len(row)):
                rows.append((f"∂/∂θ({action}), {prefix}", *(float(g[context, action]) for g in gradients.values())))
    return Demonstration(environment.words(), ("derivative", *gradients), tuple(rows))
