"""An experiment tried with a few of its settings: its modules, rows computed here, and what it says of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import Claims
from kltest.reproduce.experiment import Experiment, Request, compute_all
from kltest.reproduce.frames import Missing, frame, records
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
        return self.tidied(list(batch) for _, batch in groupby(found, key=lambda one: one["part"]))

    def tidied(self, batches: Iterable[Sequence[Configuration]]) -> list[dict[str, Any]]:
        """The rows of these configurations, batch by batch, tidied."""
        (analysis,) = self.modules("claims")
        rows = [row for batch in batches for rows in compute_all(CHECKOUT, self.name, batch) for row in rows]
        return records(analysis.tidy(rows))

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> dict[str, bool | None]:
        """Return if each claim agrees with rows; None if it was not run."""
        (analysis,) = self.modules("claims")
        return {claim.claim: claim.agrees for claim in analysis.claims(rows)}

    def agree(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Return True if every claim agrees with rows; print the others."""
        wrong = {claim: agrees for claim, agrees in self.verdicts(rows).items() if agrees is not True}
        print(wrong)
        return not wrong

    def may_lack(self, kept: Sequence[dict[str, Any]]) -> set[bool | None]:
        """Assert that no claim disagrees, and that tables and numbers are made, of a part of the rows."""
        (analysis,) = self.modules("claims")
        for make in ("tables", "numbers"):
            getattr(analysis, make, len)(kept)
        found = set(self.verdicts(kept).values())
        assert False not in found
        return found

    def may_lack_parts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Assert that claims agree with rows, and that none disagrees if a part is left out."""
        assert self.agree(rows)
        assert self.may_lack([]) == {None}
        for part in {row["part"] for row in rows}:
            self.may_lack([row for row in rows if row["part"] != part])

    def agree_where_run(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Return True if no claim disagrees with rows."""
        return False not in self.verdicts(rows).values()

    def claims_can_fail(self, rows: Sequence[dict[str, Any]], module: str = "claims") -> None:
        """Assert that each claim of a module that agrees with rows disagrees if one measured column is changed."""
        (analysis,) = self.modules(module)
        assert irrefutable(analysis, frame(rows), dict(Experiment(CHECKOUT, self.name).settings.values)) == []


# Columns whose plausible fault is to hold another's values.
COPIED = {"over_own_length": "kl_per_token", "token ratio": "kl"}


def irrefutable(analysis: ModuleType, rows: pd.DataFrame, settings: dict[str, Any]) -> list[str]:
    """Return the claims, of those with rows, that no change of one measured column, or copy of another, refutes."""
    asked = [one for one in vars(analysis).values() if isinstance(one, Claims)]
    left = {}
    for sentence, *_, judge in (question for claims in asked for question in claims.questions):
        with suppress(Missing):
            judge(rows)
            left[sentence] = judge
    # A setting of words shares its name at most with what is measured in another part.
    kept = {name for name, value in settings.items() if "'" not in str(value)} | {"seed"}
    copies = (rows.assign(**{name: rows[other]}) for name, other in COPIED.items() if name in rows)
    for planted in chain(copies, _planted(rows, [name for name in rows if name not in kept])):
        for sentence, judge in list(left.items()):
            # A judge may choke on nonsense, and that is no disagreement.
            with suppress(Missing, ArithmeticError, ValueError, LookupError, TypeError, AttributeError):
                if not judge(planted)[1]:
                    del left[sentence]
        if not left:
            break
    return list(left)


# A planted change of a column's values: all alike (0.2 is what controllers steer to), each otherwise, in another order.
FLIPS: tuple[Callable[[list, int], Any], ...] = (
    lambda old, place: not old[place],
    lambda old, place: bool(place % 2),
    lambda old, place: old[-1 - place],
)
CHANGES: tuple[Callable[[list, int], Any], ...] = (
    lambda old, place: old[place] + 1,
    lambda old, place: -old[place],
    lambda old, place: old[place] * 10 ** (place % 7),
    lambda old, place: old[place] / 10 ** (place % 5),
    lambda old, place: old[-1 - place],
    lambda old, place: 0.0,
    lambda old, place: 0.2,
)


def _planted(rows: pd.DataFrame, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield the rows with one column changed: a change in all columns before the next, since most claims fall soon."""
    for number in range(len(CHANGES)):
        for name in columns:
            measured = rows[name].map(lambda one: isinstance(one, int | float) and one == one)
            old = rows.loc[measured, name].tolist()
            changes = FLIPS if all(isinstance(one, bool) for one in old) else CHANGES
            if old and number < len(changes):
                planted, new = rows.copy(), [changes[number](old, place) for place in range(len(old))]
                planted.loc[measured, name] = pd.Series(new, rows.index[measured], dtype=object)
                yield planted
    for name in columns:
        if (vectors := rows[name].map(lambda one: isinstance(one, list))).any():
            yield rows.assign(**{name: rows[name].where(~vectors, rows[name][vectors].map(lambda one: one[::-1]))})


def row_of(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the one row that has these values."""
    (row,) = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
    return row


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
