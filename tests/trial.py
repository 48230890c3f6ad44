"""An experiment tried with a few of its settings: its modules, rows computed here, and what it says of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from kltest.reproduce.checkout import Checkout
from kltest.reproduce.experiment import Experiment, Request, compute_all
from kltest.reproduce.frames import records
from kltest.sweeps.settings import Configuration

CHECKOUT = Checkout(Path(__file__).parent.parent)


class Trial:
    """The experiment of a name in this checkout."""

    def __init__(self, name: str) -> None:
        self.name = name

    def modules(self, *parts: str) -> tuple[ModuleType, ...]:
        return tuple(CHECKOUT.load("experiments", self.name, part) for part in parts)

    def computed(self, *changes: str, seeds: int = 1) -> list[dict[str, Any]]:
        """The rows of all configurations with these settings, part by part, tidied."""
        found = Experiment(CHECKOUT, self.name).configurations(Request(changes=changes, seeds=seeds))
        batches = [list(batch) for _, batch in groupby(found, key=lambda one: one["part"])]
        (analysis,) = self.modules("analysis")
        rows = [row for batch in batches for rows in compute_all(CHECKOUT, self.name, batch) for row in rows]
        return records(analysis.tidy(rows))

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> dict[str, bool | None]:
        """Whether each claim agrees with rows; None where it was not run."""
        (analysis,) = self.modules("analysis")
        return {claim.claim: claim.agrees for claim in analysis.claims(rows)}


def representative(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Return a small subset in which every value of every setting occurs: enough to see that an experiment runs."""
    unseen = {(name, repr(value)) for configuration in configurations for name, value in configuration.items()}
    chosen: list[Configuration] = []
    while unseen:
        best = max(configurations, key=lambda one: len(unseen & {(name, repr(value)) for name, value in one.items()}))
        unseen -= {(name, repr(value)) for name, value in best.items()}
        chosen.append(best)
    return chosen


def look_up(numbers: pd.DataFrame, quantity: str, **where: Any) -> Any:
    """Return the value of a quantity at these columns and no others.

    Raises:
        KeyError: there is no such number.
    """
    wanted = {"quantity": quantity, **where}
    for row in records(numbers):
        if {name: value for name, value in row.items() if name != "value"} == wanted:
            return row["value"]
    raise KeyError(f"no number {wanted}")
