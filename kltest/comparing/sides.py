"""The two losses that are compared: how each is called with a case, in this process or in a child of its own."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kltest.comparing.cases import Case, cases, rollout
from kltest.counterexample.batch import written
from kltest.counterexample.program import executed
from kltest.counterexample.sources import NoSourceError
from kltest.errors import KltestError
from kltest.grading.forms import is_number
from kltest.grading.isolated import Child, Step
from kltest.loss.callables import source_file
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.loss.view import unambiguous
from kltest.moments.differentiate import leaf_gradients

# Seconds that a rank waits for another one, in a call of its loss.
PATIENCE = 20.0
# Characters of the reason why a loss refuses a batch.
WORDS = 300


@dataclass(frozen=True)
class Facts:
    """What is known of a loss before it is compared: its file, the fields that it reads, its numeric parameters.

    `group` is the size of groups that it states, `step` 1, or the rows of a group if it takes no five rows; `dtype` the
    lowest precision in which it computes, `returned` what its first call returned; `beta` the coefficient that was
    given for it, `defaults` those in whose place it gets β.
    """

    file: str
    reads: frozenset[str]
    numbers: Mapping[str, float]
    group: int | None
    step: int
    dtype: str
    returned: str
    beta: float | None
    defaults: Mapping[str, object]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What one call showed: what was returned and logged, and the gradient of the objective at each leaf it used.

    `refused` says why there is nothing; `stopped` that no call was made, or that it never ended.
    """

    returned: str = ""
    value: np.ndarray = field(default_factory=lambda: np.zeros(0))
    objective: float = 0.0
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    logged: Mapping[str, np.ndarray] = field(default_factory=dict)
    refused: str = ""
    stopped: bool = False


@dataclass
class Side:
    """One of the two losses; `deadline` is the end of the time that both have in their children, on the clock.

    If not `isolated`, it is called in this process.
    """

    name: str
    target: Callable[..., Any] | str
    call: Call
    seed: int = 0
    isolated: bool = False
    limit: float | None = None
    deadline: float = float("inf")
    home: str = ""

    def resolved(self) -> Loss:
        """Return the loss, whole: nothing is subtracted from it, and rewards are its own."""
        loss = resolve(self.target, self.call, self.name)
        return loss.changed(less="", unrewarded=False).for_experiments()

    def ask(self, steps: Callable[..., Iterator[Any]], *given: Any) -> Any:
        """Return the one value of a generator function of this side; it runs where the loss does."""
        if not self.isolated:
            return next(steps(self, *given))
        with Child(steps, self, *given) as child:
            return self.step(child).result(self.name)

    def seen(self, tried: Sequence[Case]) -> Iterator[Seen]:
        """Yield what the call of each case showed."""
        if not self.isolated:
            yield from seen(self, tried)
            return
        with Child(seen, self, tried) as child:
            left = len(tried)
            while left:
                step = (
                    self.step(child) if time.monotonic() < self.deadline else Step("ended", message="was not reached")
                )
                if step.kind == "value":
                    yield step.value
                    left -= 1
                    continue
                if step.kind != "ended":
                    step.result(self.name)
                yield from [Seen(refused=f"{self.name} {step.message}", stopped=True)] * left
                return

    def step(self, child: Child) -> Step:
        """Run a child to its next value, within the time that is left."""
        left = None if self.limit is None else max(self.deadline - time.monotonic(), 1e-3)
        return child.step(left, limit=self.limit, home=self.home)


def facts(side: Side) -> Iterator[Facts]:
    """Yield what a loss says of itself, and what its first call shows."""
    if side.isolated:
        torch.set_num_threads(1)
    loss = side.resolved()
    reads, dtype, returned = set(loss.takes), "float64", ""
    notes: list[str] = []
    for case in _first(side.seed, loss.arguments.group_size):
        batch = rollout(case)
        with suppress(KltestError), preserved(side.seed):
            drawn = loss.calls.draws()
            outcome = loss(batch)
            dtype, returned = outcome.dtype, outcome.returned
            notes += ["It draws random numbers: the same in each call"] if drawn.changed() else []
        reads |= batch.accessed
        if returned:
            break
    step = case.group or 1 if returned else 1
    numbers = {
        name: value
        for name, value in loss.arguments.stated.items()
        if isinstance(value, int | float) and is_number(value) and name not in side.call.arguments
    }
    group = loss.arguments.group_size
    yield Facts(
        source_file(loss.function) or "",
        frozenset(reads),
        numbers,
        group[1] if group else None,
        step,
        dtype,
        returned,
        loss.fixed_beta,
        {
            one.name: one.default
            for one in loss.arguments.parameters
            if loss.fields.get(one.name) == "beta" and is_number(one.default)
        },
        (*loss.notes, *notes),
    )


def _first(seed: int, group: tuple[str, int] | None) -> list[Case]:
    """Return the usual batch, then one of groups."""
    size = group[1] if group else 4
    listed = cases(seed, groups=(size,))
    usual = next(one for one in listed if one.environment == "ragged" and len(one.rows) == 5)
    return [usual, next(one for one in listed if one.group)]


def seen(side: Side, tried: Sequence[Case], rank: int = 0, ranks: int = 1) -> Iterator[Seen]:
    """Yield what the call of each case shows, with its share of the rows if there are several ranks."""
    if side.isolated:
        torch.set_num_threads(1)
    loss = side.resolved()
    with preserved(side.seed):
        random = loss.calls.draws()
    with loss.calls.holding(random):
        for case in tried:
            yield _seen(loss, case, np.array_split(np.arange(len(case.rows)), ranks)[rank] if ranks > 1 else None)


def _seen(loss: Loss, case: Case, part: np.ndarray | None) -> Seen:
    try:
        with preserved(case.seed):
            loss, batch = with_options(loss, case), rollout(case)
            batch = batch if part is None else batch.take(part)
            if not unambiguous(batch):
                loss.settle(batch)
            beta = case.beta if case.beta is not None else loss.beta(batch)
            result = loss.returned(batch, beta)
            value = result.loss.to(torch.float64)
            placed = loss.placed(value, batch)
            weights = case.weights.double()
            objective = (placed * (weights if placed.dim() else weights[0])).mean()
            gradients = {name: one.numpy() for name, one in leaf_gradients(loss, objective, batch).items()}
    except KltestError as error:
        return Seen(refused=" ".join(str(error).split())[:WORDS])
    beside = {**result.beside, **({} if result.metric is None else {KL: result.metric})}
    logged = {name: number for name, one in beside.items() if (number := _number(one)) is not None}
    return Seen(result.returned, value.detach().numpy(), float(objective.detach()), gradients, logged)


KL = "KL"
"""What a loss logs as its KL, by whatever name."""


def with_options(loss: Loss, case: Case) -> Loss:
    """Return the loss with the options of a case, for fields of its type."""
    arguments = loss.arguments
    for name, value in case.options:
        arguments = arguments.with_value(name, value)
    loss = loss.changed(arguments=arguments)
    return loss if case.floats == "float64" else loss.for_experiments(getattr(torch, case.floats))


def _number(item: Any) -> np.ndarray | None:
    with suppress(TypeError, ValueError, RuntimeError):
        return torch.as_tensor(item, dtype=torch.float64).detach().numpy()
    return None


# Ranks


def rank(side: Side, tried: Sequence[Case], number: int, ranks: int, store: str) -> Iterator[list[Seen]]:
    """Yield what all cases show on one rank, in a group of gloo that meets through a file."""
    group = torch.distributed
    torch.set_num_threads(1)
    group.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=ranks, timeout=timedelta(seconds=PATIENCE)
    )
    yield list(seen(side, tried, number, ranks))


def on_ranks(side: Side, tried: Sequence[Case], ranks: int, folder: Path) -> list[Seen]:
    """Return what the cases show on several ranks: objectives and gradients averaged, as data parallelism does."""
    store = str(folder / "store")
    children = [Child(rank, side, tried, number, ranks, store) for number in range(ranks)]
    try:
        left = None if side.limit is None else max(side.deadline - time.monotonic(), 1e-3)
        for child in children:
            child.begin(left, limit=side.limit, home=side.home)
        steps: dict[int, Step] = {}
        while len(steps) < ranks:
            for number, child in enumerate(children):
                if number not in steps and (step := child.poll()) is not None:
                    steps[number] = step
            time.sleep(0.01)
    finally:
        for child in children:
            child.close()
    parts = [steps[number].result(side.name) for number in range(ranks)]
    return [_averaged(each) for each in zip(*parts, strict=True)]


def _averaged(parts: Sequence[Seen]) -> Seen:
    refused = next((one for one in parts if one.refused), None)
    if refused is not None:
        return refused
    used = dict.fromkeys(name for one in parts for name in one.gradients)
    arrays = {name: [one.gradients[name] for one in parts if name in one.gradients] for name in used}
    if any(len(each) < len(parts) for each in arrays.values()):
        return Seen(refused="a rank without a gradient", stopped=False)
    gradients = {name: np.concatenate(each) / len(parts) for name, each in arrays.items()}
    objective = float(np.mean([one.objective for one in parts]))
    return Seen("scalar", np.array(objective), objective, gradients)


# The program


def definition(side: Side, case: Case) -> Iterator[Any]:
    """Yield the lines that define a loss and the expression that calls it, or why there are none."""
    loss, batch = side.resolved(), rollout(case)
    try:
        with preserved(side.seed):
            loss = with_options(loss, case)
            beta = case.beta if case.beta is not None else loss.beta(batch)
            loss.returned(batch, beta)
        yield written(loss, len(case.rows), beta)
    except (KltestError, NoSourceError) as reason:
        yield str(reason)


def printed(_: Side, code: str) -> Iterator[list[list[Any]]]:
    """Yield what each line of a program prints, as it was before it became text; nothing if it fails."""
    lines: list[list[Any]] = []
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executed(code, {"print": lambda *words: lines.append([*words])})
    yield lines
