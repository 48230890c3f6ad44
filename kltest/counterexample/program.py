"""Counter-examples as short programs in plain torch: the probabilities, every rollout, the loss and two gradients.

A program is run before it is printed, and printed only if it gives the numbers of the report.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kltest.counterexample.declared import as_torch, summed
from kltest.counterexample.environment import SmallEnvironment
from kltest.counterexample.sources import FROM_FILE, FUTURE, Definition, NoSourceError, is_literal, source_of
from kltest.files import template
from kltest.identify.combinations import Combination
from kltest.loss.arguments import Attributes, FieldOf, SizeOf, SupportOf
from kltest.loss.building import ObjectOf
from kltest.loss.calling import Loss
from kltest.loss.filling import Filling
from kltest.loss.global_state import eagerly, preserved
from kltest.loss.jax.bridge import JaxLoss
from kltest.loss.placement import ROW_FIELDS
from kltest.names import support_size
from kltest.report import CounterExample
from kltest.truth import ATLAS

TEMPLATE = Path(__file__).parent / "templates" / "program.py.j2"
# Indices of the rollouts of a batch, in the program.
ROWS = "ijklmn"
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
        form = self.loss.record.form
        if self.loss.less == "reference":
            raise NoSourceError("what it returns with the policy as reference is subtracted")
        if "rollout" in self.loss.takes:
            raise NoSourceError("it reads the rollout as an object of kltest")
        self.instance = self.environment.instance()
        self.moved = self.environment.sampler is not None
        self.chance = "q" if self.moved else "p.detach()"
        self.rows = ", ".join(ROWS[: self.batch])
        # Index that selects the rollouts of a batch.
        self.at = f"[[{self.rows}]]"
        self.mask = f"mask{self.at}" if self.environment.ends else ""
        self.float, self.of_mask = ("", "") if form is None else (_cast(form.floats), _cast(form.mask))

    def text(self, first: str = "", start: str = "") -> str:
        """Return the program; `first` picks the loss from what is returned, `start` is added to the expectation."""
        environment, takes, paths = self.environment, self.loss.takes, self.instance.paths
        tables = {"logits": environment.policy, "ref": environment.reference, "old": environment.sampler}
        rewarded = (takes & ROW_FIELDS and not self.loss.unrewarded) or "expected_reward" in self.declared
        call, expected = self._expected(first, start)
        text = template(TEMPLATE).render(
            future=FUTURE,
            definitions=self.source.lines,
            tables={name: _rows(table) for name, table in tables.items() if table is not None},
            width=WIDTH,
            paths=paths,
            masked=environment.ends,
            takes=takes,
            moved=self.moved,
            has_old=any(ATLAS[name].stale for name in self.declared) or takes & {"old_logp", "old_logits"},
            summed=lambda of: summed(of, "mask" if environment.ends else ""),
            rewards=self.instance.environment.returns(paths).tolist() if rewarded else None,
            declared=as_torch(self.declared, masked=environment.ends),
            call=call,
            expected=expected,
            has_stubs="SimpleNamespace(" in call + expected,
        )
        return str(text).rstrip("\n")

    def _expected(self, first: str, start: str) -> tuple[str, str]:
        """The lambda that calls the loss, without its keyword, and the sum over all batches that calls it."""
        rows, beta = self.rows, self.loss.fixed_beta or 1.0
        call, cost = f"{'-' * self.loss.shaped}{self._call()}{first}", f"call({rows})"
        parameters = rows
        if self.loss.takes_beta:
            parameters, cost = f"{rows}, beta", f"call({rows}, {beta!r})"
            cost = f"({cost} - call({rows}, 0.0))" if self.loss.less else cost
            cost = f"({cost} / {beta!r})" if beta != 1 else cost
        chance = " * ".join(f"{self.chance}[{row}]" for row in rows.split(", "))
        loops = " ".join(f"for {row} in range({len(self.instance.paths)})" for row in rows.split(", "))
        return f"{parameters}: {call}", f"{start}sum({chance} * {self._placed(cost)} {loops})"

    def _placed(self, cost: str) -> str:
        """The scalar whose gradient one batch gives, for a placement and a credit.

        Scores need no mask: at padding nothing depends on the policy.
        """
        mask, logp, fixed, credit = self.mask, f"logp{self.at}", f"{cost}.detach()", self.loss.credit
        tokens = self.returned == "tokens"
        whole, whole_fixed = (summed(each, mask) if tokens else each for each in (cost, fixed))
        if tokens and credit == "immediate":
            charged = f"({fixed} * {logp}).sum(-1)"
        elif tokens and credit == "to-go":
            live = f"({fixed} * {mask})" if mask else fixed
            charged = f"({live}.flip(1).cumsum(1).flip(1) * {logp}).sum(-1)"
        elif credit == "immediate":
            last = f"[{mask}.cumsum(-1) == {mask}.sum(-1, keepdim=True)]" if mask else "[:, -1]"
            charged = f"({fixed} * {logp}{last})"
        else:
            charged = f"({whole_fixed} * {logp}.sum(-1))"
        placed = {"loss": whole, "reward": charged}.get(self.loss.placement, f"({whole} + {charged})")
        share = f" / {self.batch}" if self.summed else ""
        return placed + (".mean()" if self.returned != "scalar" else "") + share

    def _call(self) -> str:
        """The call with its arguments: by position until a parameter is left out, then by name."""
        fillings = self.loss.arguments.fillings
        begin = takewhile(
            lambda one: one.name in fillings and one.kind is not one.KEYWORD_ONLY, self.loss.arguments.parameters
        )
        by_position = [] if self.named else [parameter.name for parameter in begin]
        parts = [] if self.loss.arguments.receiver is None else [self._value(self.loss.arguments.receiver)]
        parts += [self._value(fillings[name]) for name in by_position]
        parts += [f"{name}={self._value(filling)}" for name, filling in fillings.items() if name not in by_position]
        return f"{self.source.name}({', '.join(parts)})"

    def _value(self, filling: Filling) -> str:
        if isinstance(filling, ObjectOf):
            owner, kind = self.source.name.rpartition(".")[0], type(filling.built).__name__
            if filling is self.loss.arguments.receiver and owner.rpartition(".")[2] == kind and not filling.given:
                return f"{owner}()"
            filling = Attributes({**getattr(filling.built, "__dict__", {}), **filling.given})
        if isinstance(filling, Attributes):
            return f"SimpleNamespace({', '.join(f'{name}={self._value(value)}' for name, value in filling.items())})"
        if isinstance(filling, SupportOf):
            return self._of_support(filling)
        if isinstance(filling, FieldOf):
            return self._field(filling.name)
        if isinstance(filling, SizeOf):
            return str(self._tokens(filling.k))
        if not is_literal(filling):
            raise NoSourceError(f"an argument, a {type(filling).__name__}, cannot be written down")
        return repr(filling)

    def _field(self, name: str) -> str:
        prefix, _, kind = name.rpartition("_")
        if kind == "logits":
            table = {"": "logits.log_softmax(-1)", "ref": "ref", "old": "old" if self.moved else "logits.detach()"}
            rows = f"{table[prefix]}[at{self.at}]"
            if self.mask and not prefix:
                rows = f"torch.where({self.mask}[..., None] > 0, {rows}, {rows}.detach())"
            return rows + self.float
        if name in ROW_FIELDS:
            return self._per_rollout(name)
        fields = {
            **{each: f"{each}{self.at}{self.float}" for each in ("logp", "ref_logp", "old_logp")},
            "mask": f"mask{self.at}{self.of_mask}",
            "tokens": f"y{self.at}",
            "group": f"torch.zeros({self.batch}, dtype=torch.int64)",
            "beta": "beta",
        }
        return fields[name]

    def _of_support(self, filling: SupportOf) -> str:
        ids = f"{self._field(f'{filling.of}logits')}.topk({self._tokens(filling.k)}, -1).indices"
        if filling.name == "topk_ids":
            return ids
        return f"{self._field('logits' if filling.name == 'topk_logp' else 'ref_logits')}.gather(-1, {ids})"

    def _tokens(self, k: int) -> int:
        return support_size(k, self.instance.environment.vocabulary)

    def _per_rollout(self, name: str) -> str:
        value = f"reward{self.at}"
        if self.loss.unrewarded:
            value = f"torch.zeros({self.batch}, dtype=torch.float64)"
        elif name == "advantage" and any(map(any, self.environment.reward or ())):
            mean = f"{self.chance} @ reward" if self.batch == 1 else f"{value}.mean()"
            value = f"({value} - {mean})"
        if self.loss.record.form is not None and self.loss.record.form.per_token:
            value += f"[:, None].repeat(1, {self.instance.paths.shape[1]})"
        return value + self.float


def _cast(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float64 else f".to({dtype})"


def _rows(table: Sequence[Sequence[float]]) -> str:
    """A table as Python; rows that are all equal are written once."""
    same = len(table) > 1 and all(row == table[0] for row in table)
    return f"[{list(table[0])}] * {len(table)}" if same else str([list(row) for row in table])


def _agrees(code: str, example: CounterExample, limit: float) -> bool:
    """True if the program, run here, prints both gradients of the example."""
    printed: list[Any] = []
    path = list(sys.path)
    # The program imports a graded file by its own name: it gets the module that is loaded already.
    loaded = {name.removeprefix(FROM_FILE): one for name, one in sys.modules.items() if name.startswith(FROM_FILE)}
    added = {name: loaded[name] for name in loaded.keys() - sys.modules.keys()}
    sys.modules.update(added)
    try:
        with preserved(), contextlib.redirect_stdout(io.StringIO()), eagerly():
            # dont_inherit: this file's own `from __future__` must not apply to the program.
            program = compile(code, "<program>", "exec", dont_inherit=True)
            exec(program, {"print": lambda *words: printed.append(words[-1])})
    except Exception:
        return False
    finally:
        sys.path[:] = path
        for name in added:
            sys.modules.pop(name, None)
    wanted = np.array([[getattr(place, part) for place in example.contexts] for part in ("truth", "found")])
    if np.shape(printed[-2:]) != wanted.shape:
        return False
    return bool(np.abs(np.array(printed[-2:]) - wanted).max() <= limit * np.abs(wanted).max())
