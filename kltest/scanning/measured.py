"""What a part of a graph is, by its values on random rollouts: zero where its sides agree, linear in a number, or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kltest.errors import KltestError
from kltest.symbolic.computed import evaluate
from kltest.symbolic.roles import (
    LOSS,
    MASK,
    PADDING,
    PROB,
    REWARD,
    TOKEN,
    VOCABULARY,
    Roles,
)
from kltest.symbolic.values import CHOICE, INPUT, Node, nodes_in, reached

ROLLOUTS, TOKENS, WORDS = 3, 4, 5
NEAR = 1e-9
LOOPING = ("loop", "mapped")


@dataclass
class Leaves:
    """Fields and unknown numbers that stand at the ends of a part of a graph.

    Attributes:
        fields: the name of a field of a rollout by node, as `ref_logp`.
        unknown: what nothing computes, and no field stands for.
    """

    fields: dict[Node, str] = field(default_factory=dict)
    unknown: list[Node] = field(default_factory=list)


def leaves(roles: Roles, value: Any) -> Leaves:
    """Return the fields and the unknown at the ends of a value: the highest nodes for which a field stands."""
    found = Leaves()
    seen: set[Node] = set()
    stack = list(nodes_in(value))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if name := field_of(roles, node):
            found.fields[node] = name
        elif roles.is_unknown(node):
            found.unknown.append(node)
        else:
            stack.extend(node.parts)
    return found


def field_of(roles: Roles, node: Node) -> str:
    """Return the field of a rollout that stands for a node, the empty string if none does."""
    fact = roles.of(node)
    if node.operation in ("detach", CHOICE, *LOOPING):
        return ""
    if fact.is_field:
        return f"{fact.who}{'logits' if fact.quantity in VOCABULARY else 'logp'}"
    return {MASK: "mask", PADDING: "mask", TOKEN: "tokens", REWARD: "advantage"}.get(fact.quantity, "")


def standing(roles: Roles, node: Node, name: str) -> Callable[[Any], Any]:
    """Return what makes of a field the quantity that a node is of it."""
    quantity = roles.of(node).quantity
    return {
        PROB: torch.exp,
        LOSS: torch.neg,
        PADDING: lambda mask: 1 - mask,
    }.get(quantity, torch.exp if quantity == "probabilities" else lambda value: value)


class Rollouts:
    """Random rollouts: a value for each field, the same for all sides where they agree."""

    def __init__(self, seed: int, *, agree: bool = False, full: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.agree, self.full = agree, full
        self.generator = generator
        self.values: dict[str, torch.Tensor] = {}
        self.tokens = torch.randint(WORDS, (ROLLOUTS, TOKENS), generator=generator)

    def field(self, name: str) -> torch.Tensor:
        """Return the value of a field."""
        key = name.removeprefix("ref_").removeprefix("old_") if self.agree else name
        if key not in self.values:
            self.values[key] = self._drawn(key)
        value = self.values[key]
        return value if name in ("logp", "logits") else value.detach()

    def _drawn(self, name: str) -> torch.Tensor:
        draw = lambda *shape: torch.randn(*shape, generator=self.generator, dtype=torch.float64)  # noqa: E731
        if name.endswith("logits"):
            return torch.log_softmax(draw(ROLLOUTS, TOKENS, WORDS), -1).requires_grad_()
        if name.endswith("logp"):
            return (-draw(ROLLOUTS, TOKENS).abs() - 0.1).requires_grad_()
        if name == "mask":
            lengths = torch.arange(TOKENS, TOKENS - ROLLOUTS, -1)
            live = torch.arange(TOKENS) < lengths[:, None]
            return (torch.ones_like(live) if self.full else live).to(torch.float64)
        if name == "tokens":
            return self.tokens
        return draw(ROLLOUTS, 1) + 3.0


def value_of(
    roles: Roles, node: Any, rollouts: Rollouts, numbers: Mapping[Node, Any], conditions: Mapping[Node, bool]
) -> torch.Tensor:
    """Return what a part of a graph is on rollouts, its entries added up, those of different tokens with random weights.

    Raises KltestError, or what torch raises, if it cannot be computed.
    """
    ends = leaves(roles, node)
    given: dict[Node, Any] = dict(conditions)
    for end, name in ends.fields.items():
        given[end] = standing(roles, end, name)(rollouts.field(name))
    given |= {end: numbers.get(end, 0.5) for end in ends.unknown}
    found = evaluate(list(nodes_in(node)), given)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for one in nodes_in(node):
        value = torch.as_tensor(found[one], dtype=torch.float64)
        value = value.sum(-1) if value.shape[-1:] == (WORDS,) else value
        total = total + (value * torch.rand(value.shape, generator=generator, dtype=torch.float64)).sum()
    return total


def shape_of(node: Node) -> torch.Size:
    """Return the shape of a function of inputs that are named as fields."""
    rollouts = Rollouts(2)
    inputs = {one: one.arguments[0] for one in reached(node) if one.operation == INPUT}
    given = {one: 1.0 if name == "beta" else rollouts.field(name) for one, name in inputs.items()}
    return torch.as_tensor(evaluate([node], given)[node]).shape


def vanishes(roles: Roles, node: Node) -> bool:
    """Return True if a part is zero where its sides agree, or if its gradient is, and it is not zero elsewhere."""
    try:
        same, other = Rollouts(1, agree=True), Rollouts(2)
        at_same = value_of(roles, node, same, {}, {})
        elsewhere = value_of(roles, node, other, {}, {})
    except (KltestError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, ZeroDivisionError):
        return False
    if not torch.isfinite(at_same) or not torch.isfinite(elsewhere):
        return False
    if abs(float(at_same)) < NEAR < abs(float(elsewhere)):
        return True
    return _gradient(at_same, same) < NEAR < _gradient(elsewhere, other)


def _gradient(value: torch.Tensor, rollouts: Rollouts) -> float:
    """Return the size of the gradient with respect to what the vocabulary's log-probs are a softmax of."""
    logits = rollouts.values.get("logits")
    if logits is None or not value.requires_grad:
        return 1.0
    (gradient,) = torch.autograd.grad(value, logits, allow_unused=True)
    if gradient is None:
        return 1.0
    gradient = gradient - logits.detach().exp() * gradient.sum(-1, keepdim=True)
    return float(gradient.abs().max())
