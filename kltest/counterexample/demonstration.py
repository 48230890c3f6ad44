"""Pitfalls run in worlds small enough for pencil and paper: exact numbers, as a table.

Nothing heavy is imported until a demonstration is run: the list of checks is read without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kltest.environments import Instance

Probabilities = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Demonstration:
    """A pitfall's exact numbers: the setting in words, then a table whose cells are texts or numbers."""

    setting: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text, numbers with six decimals, the head first."""
        return [self.columns, *(tuple(map(written, row)) for row in self.rows)]

    def text(self) -> str:
        """The setting and the table, aligned."""
        return "\n".join([self.setting, "", *aligned(self.cells())])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts as lines, column under column."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def written(cell: str | float) -> str:
    """A cell as text: numbers with six decimals, in scientific notation where those would show nothing of them."""
    if isinstance(cell, str):
        return cell
    if not math.isfinite(cell):
        return str(cell)
    small, large = abs(cell) < 1e-4, abs(cell) >= 1e7
    text = f"{cell:.6g}" if cell != 0 and (small or large) else f"{cell:.6f}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


@dataclass(frozen=True)
class SmallWorld:
    """A token sequence given by its probabilities, a row a context: the root first, then prefixes in order.

    `length` tokens, fixed, or with `ends` up to that, the last action ending the rollout. `sampler` defaults to the
    policy; `reward` (contexts, actions) to 0.
    """

    policy: Probabilities
    reference: Probabilities
    sampler: Probabilities | None = None
    length: int = 1
    ends: bool = False
    reward: Probabilities | None = None

    def instance(self) -> Instance:
        """The world with its policies, ready to be enumerated."""
        import numpy as np

        from kltest.environments import Instance, ragged, sequence

        build = ragged if self.ends else sequence
        reward = None if self.reward is None else np.array(self.reward, dtype=float)
        environment = build(len(self.policy[0]), self.length, reward=reward)
        given = (self.policy, self.reference, self.policy if self.sampler is None else self.sampler)
        return Instance.of(environment, *(np.log(np.array(table, dtype=float)) for table in given))

    def words(self) -> str:
        """The probabilities of every context, as a person writes them down."""
        shown = {"π": self.policy, "ref": self.reference, "sampler": self.sampler}
        lines = []
        for context in range(len(self.policy)):
            parts = [
                f"{name} = ({', '.join(f'{p:.6g}' for p in table[context])})"
                for name, table in shown.items()
                if table is not None
            ]
            lines.append(f"  {self.place(context)}: {', '.join(parts)}")
        kind = f"{self.length} token{'s' * (self.length > 1)}{' at most' * self.ends}"
        return "\n".join([f"{kind} of {len(self.policy[0])} actions", *lines])

    def place(self, context: int) -> str:
        """A context by the actions that lead to it."""
        going_on = len(self.policy[0]) - self.ends
        depth, first = 0, 0
        while context >= first + going_on**depth:
            first += going_on**depth
            depth += 1
        taken = [(context - first) // going_on**later % going_on for later in reversed(range(depth))]
        return f"after {' '.join(map(str, taken))}" if depth else "root"


def of_gradients(
    world: SmallWorld,
    losses: dict[str, Callable[..., Any]],
    *,
    declared: str = "reverse_kl",
    sampler: str = "current",
    batch: int = 1,
    grouped: bool = False,
    call: Callable[[str], dict[str, Any]] = lambda name: {},
) -> Demonstration:
    """The truth and the expected gradients of losses, place by place, under the names that they are given.

    With two actions the derivative is that with respect to the first one's probability, otherwise those with respect
    to the logits. `call(name)` gives the options (placement, credit, arguments) of a loss.
    """
    import numpy as np

    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact, exact_batches
    from kltest.truth import combine, parse

    instance = world.instance()
    found = {"truth": combine(parse(declared), instance)}
    for name, function in losses.items():
        loss = bind(function, Call(**call(name)), name=name)
        if batch == 1:
            found[name] = exact(loss, instance, sampler).gradient
        else:
            found[name] = exact_batches(loss, instance, sampler, batch, grouped=grouped).gradient
    probabilities = np.exp(instance.policy)
    rows: list[tuple[str | float, ...]] = []
    for context in range(len(probabilities)):
        place = world.place(context)
        if probabilities.shape[1] == 2:
            scale = probabilities[context].prod()
            rows.append((f"∂/∂p(0), {place}", *(float(g[context, 0] / scale) for g in found.values())))
        else:
            for action in range(probabilities.shape[1]):
                rows.append((f"∂/∂θ({action}), {place}", *(float(g[context, action]) for g in found.values())))
    return Demonstration(world.words(), ("derivative", *found), tuple(rows))
