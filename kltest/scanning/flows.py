"""The value of an expression: the sides that it is made of, and the log-ratios that flow into it, in which form.

A *seed* is a place where the log-probs of two sides meet. Its *form* changes on its way: the log-ratio itself, its
exponential (an importance ratio), its square, k3, …; what decides whether it is a KL term is the form that arrives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

from kltest.scanning.sides import MIXED, Side

LOG_RATIO, SHIFTED, RATIO, SQUARE, ABSOLUTE, K3, FULL, DIVERGENCE, ENTROPY, OTHER = (
    "log-ratio",
    "shifted",
    "ratio",
    "square",
    "absolute",
    "k3",
    "full",
    "divergence",
    "entropy",
    "other",
)
KL_LIKE = frozenset({SQUARE, ABSOLUTE, K3, FULL, DIVERGENCE})
"""Forms that are a divergence whatever they are called; a log-ratio is one by its name or by its reference."""


@dataclass(eq=False)
class Seed:
    """A meeting of two sides: lines `first` to `last`, the `left` and the `right` side as written, and who they are.

    `parameter` is set for what flows into a function through one of its parameters, `named` for what is only called KL,
    `quiet` for what is made under torch.no_grad(). `weights` is who weights the log-probs of a (cross-)entropy.
    """

    first: int
    last: int
    who: frozenset[str] = frozenset()
    texts: tuple[str, str] = ("", "")
    guess: str = ""
    parameter: str = ""
    named: str = ""
    quiet: bool = False
    weights: str | None = None


@dataclass(frozen=True)
class Flow:
    """A seed in a form."""

    seed: Seed
    form: str

    def order(self) -> tuple[object, ...]:
        """Return a key to sort by, so that nothing depends on how a set is walked."""
        seed = self.seed
        return (seed.first, seed.last, sorted(seed.who), seed.texts, seed.parameter, seed.named, self.form)


@dataclass(frozen=True)
class Value:
    """The sides and the flows that an expression carries."""

    sides: frozenset[Side] = frozenset()
    flows: frozenset[Flow] = frozenset()
    items: "tuple[Value, ...]" = field(default=(), compare=False)

    def __or__(self, other: "Value") -> "Value":
        return Value(self.sides | other.sides, self.flows | other.flows)

    def turned(self, quantity: str) -> "Value":
        """Return the same with all sides in one quantity."""
        return Value(frozenset(Side(quantity, each.who, each.sure) for each in self.sides), self.flows)

    def flowing(self) -> "Value":
        """Return the same without sides."""
        return Value(frozenset(), self.flows, self.items)

    def formed(self, **forms: str) -> "Value":
        """Return the same with forms exchanged: `formed(log_ratio="square")`; `every` exchanges all."""
        table = {name.replace("_", "-"): form for name, form in forms.items()}
        every = table.get("every")
        return Value(self.sides, frozenset(Flow(f.seed, every or table.get(f.form, f.form)) for f in self.flows))


NOTHING = Value()


def seeded(seed: Seed, form: str) -> Value:
    """Return the value that carries one seed in a form."""
    return Value(flows=frozenset({Flow(seed, form)}))


def joined(values: Iterable[Value]) -> Value:
    """Return what any of the values carries."""
    total = NOTHING
    for value in values:
        if value.sides or value.flows:
            total = total | value
    return total


def added(left: Value, right: Value) -> Value:
    """Return what a sum or difference carries: a log-ratio and its exponential make k3."""
    total = Value(frozenset(), left.flows | right.flows)
    k3 = set()
    for one, other in product(total.flows, repeat=2):
        if one.form == RATIO and other.form in (LOG_RATIO, SHIFTED) and _same(one.seed, other.seed):
            k3 |= {one, other}
    if not k3:
        return total
    kept = {flow for flow in total.flows if flow not in k3}
    return Value(frozenset(), frozenset(kept | {Flow(flow.seed, K3) for flow in k3}))


def multiplied(left: Value, right: Value) -> Value:
    """Return what a product carries: a log-ratio times itself is a square, one times a probability a full sum."""
    squared = {
        flow
        for flow, other in product(left.flows, right.flows)
        if flow.form == other.form == LOG_RATIO and _same(flow.seed, other.seed)
    }
    if squared:
        return Value(frozenset(), frozenset(Flow(flow.seed, SQUARE) for flow in squared))
    total = Value(frozenset(), left.flows | right.flows)
    if any(side.quantity == "prob" for side in left.sides | right.sides):
        return total.formed(log_ratio=FULL)
    return total


def completed(left: Value, right: Value) -> Seed | None:
    """Return the seed of a cross-entropy that comes together with the entropy of what weights it."""
    for one, other in ((left, right), (right, left)):
        entropies = {flow.seed.weights for flow in other.flows if flow.form == ENTROPY}
        if crossed := [flow for flow in one.flows if flow.form == FULL and flow.seed.weights in entropies]:
            return min(crossed, key=Flow.order).seed
    return None


def mixed(quantity: str, *parts: frozenset[Side]) -> Value | None:
    """Return a mixture of probabilities, or of their logs, if the parts are those of several sides."""
    whose = [{each.who for each in sides if each.quantity == quantity} for sides in parts]
    several = all(whose) and len(set().union(*whose)) > 1
    return Value(frozenset({Side(quantity, MIXED)})) if several else None


def _same(one: Seed, other: Seed) -> bool:
    return one is other or (bool(one.who) and one.who == other.who and abs(one.first - other.first) < 60)
