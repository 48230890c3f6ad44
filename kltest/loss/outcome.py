"""Options of a call of a loss, and the outcome of one."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from kltest.estimators.spec import Credit, Placement
from kltest.loss.state import NUMPY, Place, State, generators_of, numbers_of, places_of

Returned = Literal["scalar", "rows", "tokens"]


@dataclass(frozen=True)
class Outcome:
    """A loss on one batch.

    `objective` is the scalar to be differentiated (the KL part, if the loss takes a coefficient); `rows` (B,) are
    its parts, with objective = rows.mean(), if the loss returned one number a sequence or a token, else None.
    `value` is what it returned, detached, if that was (B,) or (B, T); `metric` the logged `metrics["kl"]`, detached:
    a scalar, (B,) or (B, T). All are float64; `dtype` is the lowest floating-point precision on the way.

    No gradient at all is not an error here: the objective then does not require grad, or its gradient with respect to
    the leaves (`rollout.built("logp")`, `rollout.built("logits")`) is None, since nothing connects the two.
    """

    objective: Tensor
    returned: Returned
    rows: Tensor | None = None
    value: Tensor | None = None
    metric: Tensor | None = None
    dtype: str = "float64"


@dataclass
class Calls:
    """The calls of a loss so far: a context manager around each.

    `count` of them returned or raised, in `seconds` together, the longest in `longest`; backward passes through what
    they returned took `backward` seconds; `interrupted` is how long the last one had run when the time was over, 0 if
    none was under way. `state` is what the places where the loss may keep something between calls held before the
    first, random generators aside; `find` lists the `generators` that it may draw from, `places` all places as they are
    now, and `numbers` the whole numbers in its code and in what that reads. What is `held` is made again as it was
    before each call.
    """

    find: Callable[[], list[Place]]
    numbers: Callable[[], set[int]]
    places: Callable[[], Iterable[Place]]
    state: State
    generators: list[Place]
    held: tuple[State, ...] = ()
    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    backward: float = 0.0
    interrupted: float = 0.0
    _began: float = 0.0

    @classmethod
    def of(cls, function: Any, objects: Mapping[str, Any]) -> "Calls":
        """Return the calls of a loss before the first; `objects` are given to it in each, by name."""
        find, numbers = partial(generators_of, function, objects), partial(numbers_of, function, objects)
        places = partial(places_of, function, objects)
        return cls(find, numbers, places, State(one for one in places() if not one.drawn), find())

    def kept(self) -> State:
        """Return what is kept now, as in a list of a prompt that an earlier call made."""
        return State(one for one in self.places() if not one.drawn)

    def draws(self) -> State:
        """Return where all random generators stand that a call may draw from, those made by earlier calls included."""
        self.generators = self.find()
        return State((*self.generators, NUMPY))

    @contextmanager
    def holding(self, *held: State) -> Iterator[None]:
        """Hold this instead of what was held before."""
        before, self.held = self.held, held
        try:
            yield
        finally:
            self.held = before

    def __enter__(self) -> None:
        for one in self.held:
            one.reset()
        self._began = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        took = time.monotonic() - self._began
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.interrupted = took
            return
        self.count += 1
        self.seconds += took
        self.longest = max(self.longest, took)


@dataclass(frozen=True)
class Call:
    """Options of `kltest grade` that shape a call of the loss.

    `placement` and `credit` default to what a registered estimator says of itself, else to loss and return; `beta`
    to the rollout's own, which is 1. `arguments` fills parameters by name: any value, or "@field" for a field of the
    rollout; a dotted name (`self.beta`, `config.clip`) gives an attribute of a stand-in object.
    """

    placement: Placement | None = None
    credit: Credit | None = None
    beta: float | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
