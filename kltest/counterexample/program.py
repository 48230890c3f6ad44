"""Counter-examples as short programs in plain torch: the probabilities, every rollout, the loss and two gradients.

A program is run before it is printed, and printed only if it gives the numbers of the report.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from kltest.counterexample.environment import SmallEnvironment
from kltest.counterexample.formulas import as_torch, summed
from kltest.counterexample.sources import FROM_FILE, FUTURE, NoSourceError, Source, is_literal, source_of
from kltest.environments import Instance
from kltest.identify.findings import Combination
from kltest.loss.arguments import Stub, field_asked, given_to
from kltest.loss.calling import BoundLoss
from kltest.loss.filling import FieldOf, Filling
from kltest.loss.global_state import preserved
from kltest.loss.jax.bridge import JaxLoss
from kltest.loss.modes import eagerly
from kltest.report import CounterExample

ROWS = "ijklmn"
"""Indices of the rollouts of a batch, in the program."""
TABLES = ("torch", "logits", "ref", "old", "at", "y", "mask", "logp", "ref_logp", "old_logp", "reward")
NAMES = frozenset({*TABLES, "u", "p", "q", "true", "expected", "of", *ROWS, "call", "beta"})
WIDTH = 110
# Largest difference, relative to the largest derivative: in float64 that of another order of summation.
TOLERANCES = {"float64": 1e-9}
LOW_PRECISION = 1e-4


def with_program(loss: Any, declared: Combination, example: CounterExample, dtype: str) -> CounterExample:
    """Return the example with a program that computes both of its gradients, or with a note why there is none."""
    if not isinstance(loss, BoundLoss):
        return example
    try:
        if isinstance(loss.function, JaxLoss):
            raise NoSourceError("the loss is written for JAX, and these programs are for torch")
        source = source_of(loss.function, loss.name, NAMES)
        program = _Program(loss, declared, example, source)
        for code in program.variants():
            if _agrees(code, example, TOLERANCES.get(dtype, LOW_PRECISION)):
                return replace(example, code=code)
    except NoSourceError as reason:
        return replace(example, note=f"no short program without kltest: {reason}")
    return replace(example, note="no short program without kltest gives these numbers: it is called in a special way")


@dataclass
class _Program:
    """Writes the program for an environment, the parameters of a loss and its placement."""

    loss: BoundLoss
    declared: Combination
    example: CounterExample
    source: Source

    def __post_init__(self) -> None:
        form = self.loss.form
        if form is not None and form.lists:
            raise NoSourceError("it takes lists of tensors")
        self.instance: Instance = SmallEnvironment.of(self.example).instance()
        self.masked = self.example.ends
        self.moved = self.example.drawn_from_sampler
        self.float = "" if form is None or form.floats == torch.float64 else f".to({form.floats})"
        self.takes = self.loss.takes
        if "rollout" in self.takes:
            raise NoSourceError("it reads the rollout as an object of kltest")

    def variants(self) -> Iterator[str]:
        """Programs to try: the loss may be the first of several results, and may not depend on the policy."""
        for first, blocked in product(("", "[0]"), (False, True)):
            yield "\n".join(self._lines(first, blocked))

    def _lines(self, first: str, blocked: bool) -> Iterator[str]:
        yield from (line for line in self.source.lines if line == FUTURE)
        yield "import torch"
        if self._stubs():
            yield "from types import SimpleNamespace"
        yield from (line for line in self.source.lines if line != FUTURE)
        if any(line.startswith("def ") for line in self.source.lines):
            yield ""
        yield from self._environment()
        yield f"true = {as_torch(self.declared, masked=self.masked)}"
        yield from self._expected(first, blocked)
        yield "for of in (true, expected): print(torch.autograd.grad(of, logits, retain_graph=True)[0].tolist())"

    def _stubs(self) -> bool:
        return self.loss.receiver is not None or any(isinstance(f, Stub) for f in self.loss.fillings.values())

    def _environment(self) -> Iterator[str]:
        paths, contexts = self.instance.paths, self.example.contexts
        tables = {"logits": [place.policy for place in contexts], "ref": [place.reference for place in contexts]}
        if self.moved:
            tables["old"] = [place.sampler or place.policy for place in contexts]
        rows = ", ".join(map(_rows, tables.values()))
        line = f"{', '.join(tables)} = (torch.tensor(rows, dtype=torch.float64).log() for rows in ({rows}))"
        if len(line) <= WIDTH:
            yield line
        else:
            yield from (f"{name} = torch.tensor({_rows(t)}, dtype=torch.float64).log()" for name, t in tables.items())
        yield f"at, y = torch.tensor({paths.contexts.tolist()}), torch.tensor({paths.tokens.tolist()})"
        if self.masked:
            yield f"mask = torch.tensor({paths.mask.astype(float).tolist()}, dtype=torch.float64)"
        elif "mask" in self.takes:
            yield f"mask = torch.ones({paths.shape[0]}, {paths.shape[1]}, dtype=torch.float64)"
        old = ", old[at, y]" if self.moved else ""
        names = "logp, ref_logp" + ", old_logp" * self.moved
        yield f"{names} = logits.requires_grad_().log_softmax(-1)[at, y], ref[at, y]{old}"
        if not self.moved and self._needs_old:
            yield "old_logp = logp.detach()"
        yield f"p = {summed('logp', self.masked)}.exp()"
        if self.moved:
            yield f"q = {summed('old_logp', self.masked)}.exp()"
        if self.masked:
            yield "u = (logp - ref_logp) * mask"
            yield "logp = torch.where(mask > 0, logp, logp.detach())  # padding does not depend on the policy"
        if self.takes & {"reward", "advantage"} or "expected_reward" in self.declared:
            returns = self.instance.environment.returns(paths).tolist()
            yield f"reward = torch.tensor({returns}, dtype=torch.float64)"

    @property
    def _needs_old(self) -> bool:
        names = [name for name in self.declared if "sampler" in name]
        return bool(names) or bool(self.takes & {"old_logp", "old_logits"})

    def _expected(self, first: str, blocked: bool) -> Iterator[str]:
        rows = ROWS[: self.example.batch]
        batch = f"[[{', '.join(rows)}]]"
        chance = " * ".join(f"{'q' if self.moved else 'p.detach()'}[{row}]" for row in rows)
        loops = " ".join(f"for {row} in range({len(self.instance.paths)})" for row in rows)
        start = "0 * logits.sum() + " if blocked else ""
        if self.loss.takes_beta or self.loss.placement == "both":
            beta = self.loss.fixed_beta or 1.0
            yield f"call = lambda {', '.join(rows)}, beta: {self._call(batch)}{first}"
            arguments = ", ".join(rows)
            cost = f"call({arguments}, {beta!r})"
            if self.loss.takes_beta:
                cost = f"({cost} - call({arguments}, 0.0))"
                cost = f"({cost} / {beta!r})" if beta != 1 else cost
        else:
            cost = f"{self._call(batch)}{first}"
            line = f"expected = {start}sum({chance} * {self._placed(cost, batch)} {loops})"
            if len(line) <= WIDTH:
                yield line
                return
            yield f"call = lambda {', '.join(rows)}: {cost}"
            cost = f"call({', '.join(rows)})"
        yield f"expected = {start}sum({chance} * {self._placed(cost, batch)} {loops})"

    def _placed(self, cost: str, batch: str) -> str:
        """The scalar whose gradient one batch gives, for a placement and a credit."""
        mean = ".sum()" if self.example.batch == 1 else ".mean()"
        share = f" / {self.example.batch}" if self.example.summed else ""
        mask = f" * mask{batch}" if self.masked else ""
        tokens, scalar = self.example.returned == "tokens", self.example.returned == "scalar"
        rows = f"({cost}{mask}).sum(-1)" if tokens and self.masked else f"{cost}.sum(-1)" if tokens else cost
        as_loss = rows if scalar else f"{rows}{mean}"
        as_loss = as_loss.replace(".sum(-1).sum()", ".sum()")
        if self.loss.placement == "loss":
            return as_loss + share
        score = f"(logp{batch}{mask})" if self.masked else f"logp{batch}"
        fixed = f"{cost}.detach()"
        if self.loss.credit == "return" or not tokens:
            whole = rows.replace(cost, fixed)
            last = self.loss.credit == "immediate"
            ends = f"[mask{batch}.cumsum(-1) == mask{batch}.sum(-1, keepdim=True)]" if self.masked else "[:, -1]"
            score = f"logp{batch}{ends}" if last else f"{score}.sum(-1)"
            as_reward = f"({whole} * {score}){mean}"
        else:
            live = f"({fixed}{mask})" if self.masked else fixed
            charged = f"{live}.flip(1).cumsum(1).flip(1)" if self.loss.credit == "to-go" else live
            as_reward = f"({charged} * {score}).sum(-1){mean}"
        as_reward = as_reward.replace(".sum(-1).sum()", ".sum()")
        return (as_reward if self.loss.placement == "reward" else f"({as_loss} + {as_reward})") + share

    def _call(self, batch: str) -> str:
        """The call with its arguments: by position until a parameter is left out, then by name."""
        parts = [] if self.loss.receiver is None else [self._stub(self.loss.receiver, batch)]
        gap = False
        known = set()
        for parameter in self.loss.parameters:
            known.add(parameter.name)
            if parameter.name not in self.loss.fillings or parameter.kind is parameter.KEYWORD_ONLY:
                gap = True
            if parameter.name in self.loss.fillings:
                value = self._value(self.loss.fillings[parameter.name], batch)
                parts.append(f"{parameter.name}={value}" if gap else value)
        for name, filling in self.loss.fillings.items():
            if name not in known:
                parts.append(f"{name}={self._value(filling, batch)}")
        return f"{self.source.name}({', '.join(parts)})"

    def _value(self, filling: Filling, batch: str) -> str:
        if isinstance(filling, Stub):
            return self._stub(filling, batch)
        if isinstance(filling, FieldOf):
            return self._field(filling.name, batch)
        if isinstance(filling, str) and (name := field_asked(filling)) is not None:
            return self._field(name, batch)
        if not is_literal(filling):
            raise NoSourceError(f"an argument, a {type(filling).__name__}, cannot be written down")
        return repr(filling)

    def _stub(self, stub: Stub, batch: str) -> str:
        given = {name: self._value(value, batch) for name, value in given_to(stub).items()}
        return f"SimpleNamespace({', '.join(f'{name}={value}' for name, value in given.items())})"

    def _field(self, name: str, batch: str) -> str:
        prefix, _, what = name.rpartition("_")
        if what == "logp":
            return f"{name}{batch}{self.float}"
        if what == "logits":
            return self._all_tokens(prefix, batch) + self.float
        if name == "mask":
            return f"mask{batch}{self._of_mask()}"
        if name == "tokens":
            return f"y{batch}"
        if name == "group":
            return f"torch.zeros({self.example.batch}, dtype=torch.int64)"
        if name == "beta":
            return "beta"
        if name in ("reward", "advantage"):
            return self._per_rollout(name, batch)
        raise NoSourceError(f"it takes the field {name}")

    def _all_tokens(self, prefix: str, batch: str) -> str:
        table = {"": "logits.log_softmax(-1)", "ref": "ref", "old": "old" if self.moved else "logits.detach()"}[prefix]
        rows = f"{table}[at{batch}]"
        if prefix or not self.masked:
            return rows
        return f"torch.where(mask{batch}[..., None] > 0, {rows}, {rows}.detach())"

    def _of_mask(self) -> str:
        form = self.loss.form
        return "" if form is None or form.mask == torch.float64 else f".to({form.mask})"

    def _per_rollout(self, name: str, batch: str) -> str:
        chance = "q" if self.moved else "p.detach()"
        value = f"reward{batch}"
        paid = any(any(place.reward or ()) for place in self.example.contexts)
        if name == "advantage" and paid:
            value = f"(reward{batch} - {f'{chance} @ reward' if self.example.batch == 1 else f'reward{batch}.mean()'})"
        if self.loss.form is not None and self.loss.form.per_token:
            value += f"[:, None].repeat(1, {self.instance.paths.shape[1]})"
        return value + self.float


def _rows(table: Sequence[Sequence[float]]) -> str:
    """A table as Python; rows that are all equal are written once."""
    same = len(table) > 1 and all(row == table[0] for row in table)
    return f"[{list(table[0])}] * {len(table)}" if same else str([list(row) for row in table])


def _agrees(code: str, example: CounterExample, limit: float) -> bool:
    """True if the program, run here, prints both gradients of the example."""
    printed: list[Any] = []
    path, known = list(sys.path), set(sys.modules)
    # The program imports a graded file by its own name: it gets the module that is loaded already.
    for name in [name for name in known if name.startswith(FROM_FILE)]:
        sys.modules.setdefault(name.removeprefix(FROM_FILE), sys.modules[name])
    try:
        with preserved(), contextlib.redirect_stdout(io.StringIO()), eagerly():
            # dont_inherit: this file's own `from __future__` must not apply to the program.
            exec(
                compile(code, "<program>", "exec", dont_inherit=True),
                {"print": lambda *words: printed.append(words)},
            )
    except Exception:
        return False
    finally:
        sys.path[:] = path
        for name in known:
            if name.startswith(FROM_FILE) and name.removeprefix(FROM_FILE) not in known:
                sys.modules.pop(name.removeprefix(FROM_FILE), None)
    expected = ([place.truth for place in example.contexts], [place.found for place in example.contexts])
    if len(printed) < 2:
        return False
    found = [words[-1] for words in printed[-2:]]
    scale = max(float(np.abs(np.array(rows)).max()) for rows in expected)
    return all(
        np.shape(one) == np.shape(other) and float(np.abs(np.array(one) - np.array(other)).max()) <= limit * scale
        for one, other in zip(found, expected, strict=True)
    )
