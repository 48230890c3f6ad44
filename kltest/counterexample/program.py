"""Counter-examples as short programs in plain torch: the probabilities, every rollout, the loss and two gradients.

A program is run before it is printed, and printed only if it gives the numbers of the report.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kltest.counterexample.declared import as_torch, summed, written
from kltest.counterexample.environment import SmallEnvironment
from kltest.counterexample.expectation import ROWS, Expectation
from kltest.counterexample.sources import FROM_FILE, FUTURE, Definition, NoSourceError, source_of
from kltest.files import template
from kltest.identify.combinations import Combination
from kltest.loss.calling import Loss
from kltest.loss.global_state import eagerly, preserved
from kltest.loss.jax.bridge import JaxLoss
from kltest.loss.placement import ROW_FIELDS
from kltest.report import CounterExample
from kltest.rollout import SAMPLER_FIELDS
from kltest.truth import ATLAS

TEMPLATE = Path(__file__).parent / "templates" / "program.py.j2"
TABLES = ("torch", "logits", "ref", "old", "at", "y", "mask", "logp", "ref_logp", "old_logp", "reward")
NAMES = frozenset({*TABLES, "u", "p", "q", "true", "expected", "of", *ROWS, "call", "beta"})
WIDTH = 130
# Largest difference, relative to the largest derivative: in float64 that of another order of summation.
TOLERANCES = {"float64": 1e-9}
LOW_PRECISION = 1e-4


def with_program(
    loss: Loss, declared: Combination, environment: SmallEnvironment, example: CounterExample, dtype: str
) -> CounterExample:
    """Return the example with a program that computes both of its gradients, or with a note why there is none."""
    try:
        if isinstance(loss.function, JaxLoss):
            raise NoSourceError("the loss is written for JAX, and these programs are for torch")
        if unwritten := [name for name in declared if not written(name)]:
            raise NoSourceError(f"{unwritten[0]} is not written out there")
        source = source_of(loss.function, loss.name, NAMES)
        form = (example.batch, example.returned, example.summed)
        writer = Program(loss, declared, environment, source, *form)
        # The loss may be one of several results, and may not depend on the policy.
        for first, start in product(("", "[0]", ".loss", "['loss']"), ("", "0 * logits.sum() + ")):
            code = writer.text(first, start)
            if _agrees(code, example, TOLERANCES.get(dtype, LOW_PRECISION)):
                return replace(example, code=code)
    except NoSourceError as reason:
        return replace(example, note=f"no short program without kltest: {reason}")
    return replace(example, note="no short program without kltest gives these numbers: it is called in a special way")


@dataclass
class Program:
    """Writes the program for an environment, the parameters of a loss and its placement.

    `returned` says if the loss gives a scalar, a number per row or a number per token; if `summed`, it adds up the rows
    of a batch. With `named`, all arguments are passed by name.
    """

    loss: Loss
    declared: Combination
    environment: SmallEnvironment
    source: Definition
    batch: int = 1
    returned: str = "tokens"
    summed: bool = False
    named: bool = False

    def __post_init__(self) -> None:
        environment = self.environment
        self.expectation = Expectation(
            self.loss,
            self.source.name,
            *(self.batch, self.returned, self.summed, self.named),
            masked=environment.ends,
            moved=environment.sampler is not None,
            rewarded=any(map(any, environment.reward or ())),
        )

    def text(self, first: str = "", start: str = "") -> str:
        """Return the program; `first` picks the loss from what is returned, `start` is added to the expectation."""
        environment, takes, instance = self.environment, self.loss.takes, self.environment.instance()
        tables = {"logits": environment.policy, "ref": environment.reference, "old": environment.sampler}
        rewarded = (takes & ROW_FIELDS and not self.loss.unrewarded) or "expected_reward" in self.declared
        call, expected = self.expectation.text(first, start)
        text = template(TEMPLATE).render(
            future=FUTURE,
            definitions=self.source.lines,
            tables={name: _rows(table) for name, table in tables.items() if table is not None},
            width=WIDTH,
            paths=instance.paths,
            masked=environment.ends,
            takes=takes,
            moved=self.expectation.moved,
            has_old=any(ATLAS[name].stale for name in self.declared) or takes & SAMPLER_FIELDS,
            summed=lambda of: summed(of, "mask" if environment.ends else ""),
            rewards=instance.environment.returns(instance.paths).tolist() if rewarded else None,
            declared=as_torch(self.declared, masked=environment.ends),
            call=call,
            expected=expected,
            has_stubs="SimpleNamespace(" in call + expected,
        )
        return str(text).rstrip("\n")


def _rows(table: Sequence[Sequence[float]]) -> str:
    """A table as Python; rows that are all equal are written once."""
    same = len(table) > 1 and all(row == table[0] for row in table)
    return f"[{list(table[0])}] * {len(table)}" if same else str([list(row) for row in table])


def _agrees(code: str, example: CounterExample, limit: float) -> bool:
    """True if the program, run here, prints both gradients of the example."""
    printed: list[Any] = []
    try:
        executed(code, {"print": lambda *words: printed.append(words[-1])})
    except Exception:
        return False
    wanted = np.array([[getattr(place, part) for place in example.contexts] for part in ("truth", "found")])
    if np.shape(printed[-2:]) != wanted.shape:
        return False
    return bool(np.abs(np.array(printed[-2:]) - wanted).max() <= limit * np.abs(wanted).max())


def executed(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute a program here with these names, and return them with its own; the global state stays as it was."""
    path = list(sys.path)
    # The program imports a graded file by its own name: it gets the module that is loaded already.
    loaded = {name.removeprefix(FROM_FILE): one for name, one in sys.modules.items() if name.startswith(FROM_FILE)}
    added = {name: loaded[name] for name in loaded.keys() - sys.modules.keys()}
    sys.modules.update(added)
    try:
        with preserved(), contextlib.redirect_stdout(io.StringIO()), eagerly():
            # dont_inherit: this file's own `from __future__` must not apply to the program.
            exec(compile(code, "<program>", "exec", dont_inherit=True), names)
        return names
    finally:
        sys.path[:] = path
        for name in added:
            sys.modules.pop(name, None)
