"""Parts of a graph by their values on random rollouts: zero where their sides agree, or linear in a number."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch

from kltest.errors import KltestError
from kltest.names import SUPPORT_FIELDS, field_named
from kltest.symbolic.computed import evaluate
from kltest.symbolic.operations import words_of
from kltest.symbolic.roles import (
    GATHERS,
    INFINITE,
    LOGITS,
    LOSS,
    MASK,
    MOVES,
    PADDING,
    PROB,
    PROBS,
    RATIO,
    REWARD,
    SUPPORT,
    TOKEN,
    TOP,
    TOP_LOG_PROBS,
    TOP_PROBS,
    VOCABULARY,
    Fact,
    Roles,
    is_counter,
    is_filled,
    parts_of,
)
from kltest.symbolic.values import CHOICE, INPUT, Graph, Node, nodes_in, reached, under, walked
from kltest.symbolic.words import POLICY, REFERENCE, SAMPLER, is_mask, says

ROLLOUTS, TOKENS, WORDS = 3, 4, 5
NEAR = 1e-9
NUMBER = "number"
"""The input that stands for a number that is not known."""
SOME = 0.5
FAR = 1e4
"""What stands for a limit that nothing says, so that it limits nothing."""
LIKELIEST = 2
"""How many tokens of a random rollout stand for the likeliest."""
SIZE = "k"
"""The parameter that says how many those are, where nothing else does."""
OWN_IDS = "student_topk_ids"
"""The parameter of the likeliest tokens of the policy."""
NO_NUMBERS: Mapping[Node, Any] = {}
LOOPING = ("loop", "mapped")
RESHAPES = words_of(
    "view view_as reshape flatten unflatten permute transpose squeeze unsqueeze movedim expand expand_as"
)
DATA = (MASK, PADDING, TOKEN, REWARD)
# Operations of which one argument has to be of truths, and its place.
CONDITIONS = {"item": 1, "masked_fill": 1, "masked_select": 1, "where": 0}
# What a log-prob is computed by from logits, and a probability from a log-prob.
UNDONE = words_of("log_softmax softmax log exp detach same clone masked_fill")
FAILURES = (
    *(KltestError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, ZeroDivisionError),
    *(AssertionError, OverflowError),
)


@dataclass
class Leaves:
    """Fields and unknown numbers that stand at the ends of a part of a graph.

    Attributes:
        fields: the name of a field of a rollout by node, as `ref_logp`.
        unknown: what nothing computes, and no field stands for.
    """

    fields: dict[Node, str] = field(default_factory=dict)
    unknown: list[Node] = field(default_factory=list)


def leaves(roles: Roles, value: Any, *, shaped: bool = True) -> Leaves:
    """Return the fields and the unknown at the ends of a value: the highest nodes for which a field stands.

    Args:
        roles: facts of the nodes.
        value: a node, or a container of nodes.
        shaped: keep what reshapes fields; else fields stand for what is reshaped as well.
    """
    found = Leaves()
    seen: set[Node] = set()
    stack = list(nodes_in(value))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if stands(roles, node, shaped=shaped):
            found.fields[node] = field_of(roles, node)
        elif is_counter(node):
            continue
        elif roles.is_unknown(node):
            found.unknown.append(node)
        else:
            stack.extend(node.parts)
    return found


def stands(roles: Roles, node: Node, *, shaped: bool = True) -> bool:
    """Return True if a field of a rollout stands for a node, and for what it is computed from."""
    return bool(field_of(roles, node)) and not (shaped and _keeps_shape(roles, node))


def _keeps_shape(roles: Roles, node: Node) -> bool:
    """Return True for what gives a field another shape, selects its tokens, or takes an item of it in a loop."""
    if not node.arguments or not isinstance(node.arguments[0], Node):
        return False
    inner = under(node, UNDONE)
    selected = inner.arguments[1] if inner.operation in ("item", "masked_select") else None
    if isinstance(selected, Node) and roles.of(selected).quantity in (MASK, PADDING):
        return True
    counted = node.operation == "item" and _is_counted(node.arguments[1])
    return node.operation in RESHAPES or (counted and bool(field_of(roles, node.arguments[0])))


def _is_chunk(node: Node) -> bool:
    """Return True for a slice that a loop goes on with."""
    return node.operation == "item" and isinstance(node.arguments[1], slice) and _is_counted(node.arguments[1])


def _is_counted(index: Any) -> bool:
    """Return True for an index that a loop counts; a length is none, whatever it is the length of."""
    inner = walked(nodes_in(index), lambda one: () if one.operation in LOOPING else parts_of(one))
    return any(map(is_counter, inner))


def field_of(roles: Roles, node: Node) -> str:
    """Return the field of a rollout that stands for a node, the empty string if none does."""
    fact = roles.of(node)
    detached = node.operation == "detach" and roles.of(node.arguments[0]).sides == fact.sides
    repeated = node.operation in LOOPING and not is_filled(node)
    open_ = node.operation == CHOICE and not is_settled(roles, node)
    if detached or repeated or open_ or is_counter(node):
        return ""
    if fact.is_field:
        return f"{fact.who}{'logits' if fact.quantity in VOCABULARY else 'logp'}"
    if fact.quantity == TOP:
        return f"{fact.who}logits"
    return {MASK: "mask", PADDING: "mask", TOKEN: "tokens", REWARD: "advantage", RATIO: "logp"}.get(fact.quantity, "")


def is_settled(roles: Roles, node: Node) -> bool:
    """Return True for a field that is one whatever its choices.

    It is none if it is the policy's and detached in some of them, or absent in some.
    """
    fact = roles.of(node)
    if node.operation == CHOICE and not all(isinstance(one, Node) for one in node.arguments[1:]):
        return False
    if fact.is_field:
        return fact.who != POLICY or len(roles.flows(node)) == 1
    return fact.quantity in DATA


def source_of(node: Node) -> Node:
    """Return what a field is computed from: the logits of its log-probs, before they are reshaped."""
    while node.operation in UNDONE | RESHAPES and isinstance(node.arguments[0], Node):
        node = node.arguments[0]
    return node


def standing(graph: Graph, roles: Roles, node: Node, stands: Any, *, shaped: bool = True, padded: bool = True) -> Any:
    """Return what a node is of the field that stands for it: an exponential, a negative, with another dimension.

    Args:
        graph: of the nodes.
        roles: their facts.
        node: for which a field stands.
        stands: the input that is the field.
        shaped: as for `leaves`.
        padded: masks of padding are one where there is no token.
    """
    match roles.of(node).quantity:
        case quantity if quantity in (TOP, TOP_LOG_PROBS, TOP_PROBS):
            stands = graph.node(INPUT, _support_field(roles.of(node)))
            if roles.is_renormalised(node):
                stands = graph.node("log_softmax", stands, dim=-1)
            stands = graph.node("exp", stands) if quantity == TOP_PROBS else stands
        case quantity if quantity == MASK and any(is_mask(name) and says(name, *SUPPORT) for name in roles.names(node)):
            stands = graph.node("unsqueeze", stands, -1)
        case quantity if quantity in (PROBS, PROB):
            stands = graph.node("exp", stands)
        case quantity if quantity == RATIO:
            stands = graph.node("exp", graph.node("-", stands, graph.node(INPUT, "old_logp")))
        case quantity if quantity == LOSS:
            stands = graph.node("negated", stands)
        case quantity if quantity == PADDING and padded:
            stands = graph.node("-", 1, stands)
    kept = shaped and node.operation in GATHERS and roles.of(node).quantity not in VOCABULARY
    return graph.node("unsqueeze", stands, -1) if kept else stands


def _support_field(fact: Fact) -> str:
    """Return the parameter that a field of a support fills; the name of the ids says whose likeliest they are."""
    if fact.who == SAMPLER:
        raise KltestError("rollouts have no log-probs of the sampler's likeliest tokens")
    if fact.quantity == TOP:
        return OWN_IDS if fact.who == POLICY else "topk_ids"
    return f"{fact.who}topk_logp"


class Rollouts:
    """Random rollouts: a value for each field, the policy's for those sides that agree with it.

    Log-probs of tokens are of `size`: small ones stay within the limits that losses clamp them to.
    """

    def __init__(self, seed: int, *, agree: Collection[str] = (), full: bool = False, size: float = 1.0) -> None:
        self.seed, self.agree, self.full, self.size = seed, agree, full, size
        self.values: dict[str, torch.Tensor] = {}
        self.support = REFERENCE
        """Whose likeliest tokens the fields of a support are of."""

    def field(self, name: str) -> torch.Tensor:
        """Return the value of a field."""
        if name == OWN_IDS or field_named(name) in SUPPORT_FIELDS:
            ids = self.field(f"{self.support}logits").detach().topk(LIKELIEST, -1).indices
            if not name.endswith("logp"):
                return ids
            return self.field("ref_logits" if name.startswith(REFERENCE) else "logits").gather(-1, ids)
        prefix = name[: name.find("_") + 1]
        key = name.removeprefix(prefix) if prefix in self.agree else name
        value = self.values[key] = _drawn(key, self.seed, self.full)
        value = value * self.size if name.endswith("logp") and self.size != 1 else value
        return value if name in ("logp", "logits") else value.detach()


@lru_cache
def _drawn(name: str, seed: int, full: bool) -> torch.Tensor:
    # A generator for each field, so that a value does not depend on which fields were drawn before it.
    generator = torch.Generator().manual_seed(seed + crc32(name.encode()))
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    if name.endswith("logits"):
        return torch.log_softmax(draw(ROLLOUTS, TOKENS, WORDS), -1).requires_grad_()
    if name.endswith("logp"):
        return (-draw(ROLLOUTS, TOKENS).abs() - 0.1).requires_grad_()
    if name == "mask":
        lengths = torch.arange(TOKENS, TOKENS - ROLLOUTS, -1)
        live = torch.arange(TOKENS) < lengths[:, None]
        return (torch.ones_like(live) if full else live).to(torch.float64)
    if name == "tokens":
        return torch.randint(WORDS, (ROLLOUTS, TOKENS), generator=generator)
    return draw(ROLLOUTS, 1) + 3.0


def filled(
    roles: Roles,
    value: Any,
    numbers: Mapping[Node, Any],
    *,
    shaped: bool = True,
    padded: bool = True,
) -> Any:
    """Return a value as a function of inputs that are named as fields, with numbers for what is not known."""
    ends = leaves(roles, value, shaped=shaped)
    graph, unknown = roles.graph, set(ends.unknown)
    several, ones = supports(value) | _exponents(value), temperatures(roles, value)
    lengths, far = sizes(value), limits(value)

    def conditioned(node: Node, at: int) -> Node:
        arguments = [graph.rewritten(one, replace) for one in node.arguments]
        if node.operation == "masked_fill" and roles.is_unknown(node.arguments[at]):
            arguments[at] = graph.node("-", 1, arguments[at])  # whatever it is called, what it marks is left out
        arguments[at] = graph.node("!=", arguments[at], 0)
        return graph.node(node.operation, *arguments, **graph.rewritten(dict(node.named), replace))

    def replace(node: Node) -> Any:
        if not shaped and node.operation == "range" and not unknown.isdisjoint(reached(node)):
            return graph.node("range", 1)  # of how many passes a loop has, one is followed
        if not shaped and node not in ends.fields and _is_chunk(node):
            return graph.rewritten(node.arguments[0], replace)  # it has all in that one pass
        at = CONDITIONS.get(node.operation)
        if at is not None and node not in ends.fields and roles.of(node.arguments[at]).quantity in (MASK, PADDING):
            return conditioned(node, at)
        if node not in ends.fields:
            if roles.of(node).quantity == INFINITE:
                return graph.node("!=", graph.node("tensor", 0), 0)  # rollouts have none
            usual = LIKELIEST if node in several else 1 if node in lengths | ones else far.get(node, SOME)
            return numbers.get(node, usual) if node in unknown else node
        name = ends.fields[node]
        stands = graph.node(INPUT, name)
        stands = standing(graph, roles, node, stands, shaped=shaped, padded=padded)
        return graph.node("detach", stands) if name in ("logp", "logits") and True not in roles.flows(node) else stands

    return graph.rewritten(value, replace)


def _exponents(value: Any) -> set[Node]:
    """Return what says to which power something is raised: of a negative number that is known for whole ones alone."""
    powers = [one for one in reached(value) if one.operation in ("**", "pow")]
    return reached([each for one in powers for each in one.arguments[1:2]])


def supports(value: Any) -> set[Node]:
    """Return what says how many tokens the likeliest are, in the calls of `topk` in a value."""
    found: set[Node] = set()
    for node in reached(value):
        if node.operation == "topk":
            found |= reached([*node.arguments[1:2], *(one for name, one in node.named if name == "k")])
    return found


def limits(value: Any) -> dict[Node, float]:
    """Return what values are clamped to, each with a number that limits nothing in its place, from below or above."""
    nodes = reached(value)
    divisors = {under(one.arguments[1], RESHAPES | {"same"}) for one in nodes if one.operation in ("/", "div")}
    sides: dict[Node, set[str]] = {}
    guards: dict[Node, float] = {}
    for one in nodes:
        if one.operation == "clamp":
            for side, limit in (*zip(("min", "max"), one.arguments[1:], strict=False), *one.named):
                if isinstance(limit, Node):
                    sides.setdefault(limit, set()).add(side)
                    if one in divisors and side == "min":
                        guards[limit] = NEAR  # it keeps what is divided by from zero
    return {limit: guards.get(limit, -FAR if each == {"min"} else FAR) for limit, each in sides.items()}


def sizes(value: Any) -> set[Node]:
    """Return what says how long a dimension is to which something is reshaped."""
    reshaped = (one for one in reached(value) if one.operation in ("view", "reshape", "unflatten"))
    return {size for one in reshaped for size in nodes_in(one.arguments[1:])}


def temperatures(roles: Roles, value: Any) -> set[Node]:
    """Return what logits are divided by in a value: one, unless something says another, as on the other side."""
    divided = (one for one in reached(value) if one.operation in ("/", "div") and len(one.arguments) == 2)
    known = (one for one in divided if roles.of(under(one.arguments[0], MOVES | GATHERS)).quantity == LOGITS)
    return reached([one.arguments[1] for one in known])


def value_of(node: Any, rollouts: Rollouts, numbers: Mapping[Node, Any] = NO_NUMBERS) -> torch.Tensor:
    """Return a function of fields on rollouts, its entries added up, those of different tokens with random weights."""
    value = computed_of(node, rollouts, numbers).to(torch.float64)
    value = value.sum(-1) if value.shape[-1:] == (WORDS,) else value
    return (value * _weights(value.shape)).sum()


@lru_cache
def _weights(shape: torch.Size) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def computed_of(node: Any, rollouts: Rollouts, numbers: Mapping[Node, Any] = NO_NUMBERS) -> torch.Tensor:
    """Return what a function of inputs that are named as fields, and of numbers, is on rollouts."""
    if not isinstance(node, Node):
        return torch.as_tensor(node)
    given = {}
    inputs = [one for one in reached(node) if one.operation == INPUT]
    if any(one.arguments[0] == OWN_IDS for one in inputs):
        if any(one.arguments[0] == "topk_ids" for one in inputs):
            raise KltestError("it has two supports, of both sides, and rollouts have one")
        rollouts.support = POLICY
    for one in inputs:
        name = one.arguments[0]
        known = {"beta": 1.0, SIZE: LIKELIEST, NUMBER: numbers.get(one, SOME)}
        given[one] = known[name] if name in known else rollouts.field(name)
    return torch.as_tensor(evaluate([node], given)[node])


def vanishes(roles: Roles, node: Node) -> bool:
    """Return True if a part is zero where its sides agree, or if its gradient is, and it is not zero elsewhere."""
    # Padding may be zero on one side alone, where what is made of it is masked later.
    return any(_vanishes(roles, node, shaped, full) for full in (False, True) for shaped in (True, False))


def _vanishes(roles: Roles, node: Node, shaped: bool, full: bool) -> bool:
    try:
        of_fields = filled(roles, node, {}, shaped=shaped)
        same, other = Rollouts(1, agree=(REFERENCE, SAMPLER), full=full), Rollouts(2, full=full)
        at_same, elsewhere = value_of(of_fields, same), value_of(of_fields, other)
    except FAILURES:
        return False
    if not torch.isfinite(at_same) or not torch.isfinite(elsewhere):
        return False
    if abs(at_same.item()) < NEAR < abs(elsewhere.item()):
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
