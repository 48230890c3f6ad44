"""Programs that call two losses with one batch, written down, and print what each returns and its gradient."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kltest.counterexample.expectation import Expectation
from kltest.counterexample.sources import FUTURE, NoSourceError, source_of
from kltest.files import template
from kltest.loss.calling import Loss
from kltest.loss.jax.bridge import JaxLoss
from kltest.loss.placement import ROW_FIELDS
from kltest.names import FIELDS

TEMPLATE = Path(__file__).parent / "templates" / "batch.py.j2"
NAMES = frozenset({"torch", "show", "raw", "upstream", "inf", "nan", *FIELDS})
# Characters of the numbers that a program may hold, and equal neighbours that are written once.
MOST, ALIKE = 12_000, 6


class Called(NamedTuple):
    """The lines that define a loss, and the expression that calls it with the fields of a batch."""

    lines: tuple[str, ...]
    call: str

    @property
    def fields(self) -> set[str]:
        """The fields that the call reads."""
        return {node.id for node in ast.walk(ast.parse(self.call)) if isinstance(node, ast.Name)} & {*FIELDS}


@dataclass(frozen=True)
class _OnBatch(Expectation):
    """Writes the call of a loss with one batch, whose fields are tensors by their names, at one β."""

    at = ""
    beta: float = 1.0

    def __post_init__(self) -> None:
        self.check()
        if self.loss.placement != "loss":
            raise NoSourceError("what it returns is placed in the reward")

    def _field(self, name: str) -> str:
        if name in ("tokens", "group", "beta"):
            return repr(self.beta) if name == "beta" else name
        form = self.loss.record.form
        repeated = name in ROW_FIELDS and form is not None and form.per_token
        return f"{name}{'[:, None].expand_as(mask)' * repeated}{self._cast('mask' if name == 'mask' else 'floats')}"


def written(loss: Loss, rows: int, beta: float) -> Called:
    """Return how a loss is defined and called at this β; NoSourceError if a few lines cannot say it."""
    if isinstance(loss.function, JaxLoss):
        raise NoSourceError("the loss is written for JAX, and these programs are for torch")
    source = source_of(loss.function, loss.name, NAMES)
    sign = "-" * loss.shaped
    return Called(source.lines, sign + _OnBatch(loss, source.name, rows, masked=True, beta=beta).called())


def program(
    words: str,
    called: Sequence[Called],
    fields: Mapping[str, np.ndarray],
    *,
    upstream: Sequence[float],
    leaves: Sequence[str],
    picks: Sequence[str],
) -> str:
    """Return the program.

    Args:
        words: What is compared, for its first line.
        called: The losses.
        fields: The numbers of the batch.
        upstream: What comes in from above, a row each.
        leaves: Fields at which the gradient is taken; with "raw", the logits that all others are made of.
        picks: Picks what is shown from what each returns, as "[0]".

    Raises:
        NoSourceError: The batch is too large to be written down.
    """
    raw = "raw" in leaves
    needed = {"mask", *(name for one in called for name in one.fields), *leaves} - {"raw"}
    needed |= {"logits", "tokens", "logp"} if raw else set()
    inputs = {name: fields[name] for name in FIELDS if name in needed}
    numbers = {name: _literal(one.tolist()) for name, one in inputs.items()}
    if sum(map(len, numbers.values())) > MOST:
        count = sum(one.size for one in inputs.values())
        raise NoSourceError(f"the smallest input that was found has {count:,} numbers")
    lines = [line for one in called for line in one.lines]
    text = template(TEMPLATE).render(
        words=words,
        future=FUTURE in lines,
        stubs=any("SimpleNamespace(" in one.call for one in called),
        special=not all(np.isfinite(one).all() for one in inputs.values()),
        inputs=numbers,
        upstream=list(upstream) if set(upstream) != {1.0} else None,
        leaves=leaves,
        raw=raw,
        called=[
            (letter, [line for line in lines if line != FUTURE], f"{one.call}{pick}")
            for letter, lines, one, pick in zip("AB", _one_by_one(called), called, picks, strict=True)
        ],
    )
    return str(text).rstrip("\n")


def _literal(numbers: Any) -> str:
    """Return nested lists of numbers as Python; many equal neighbours are written once."""
    if not isinstance(numbers, list):
        return repr(numbers + 0)  # no minus zero
    runs = ((text, len([*same])) for text, same in groupby(map(_literal, numbers)))
    parts = (f"*[{text}] * {count}" if count >= ALIKE else ", ".join([text] * count) for text, count in runs)
    return f"[{', '.join(parts)}]"


def _one_by_one(called: Sequence[Called]) -> Iterator[Sequence[str]]:
    """Yield the lines of each loss: no import twice, but a module of another folder again, under the same name."""
    first, second = (one.lines for one in called)
    yield first
    folders = [next((line for line in lines if line.startswith("sys.path.")), "") for lines in (first, second)]
    if folders[0] == folders[1]:
        yield [line for line in second if line not in first or not line.startswith(("import ", "from ", "sys.path."))]
        return
    place = second.index(folders[1]) + 1 if folders[1] else 0
    again = f"sys.modules.pop({second[place].split()[1]!r}, None)"
    yield [*second[:place], *([again] if place and folders[0] else []), *second[place:]]
