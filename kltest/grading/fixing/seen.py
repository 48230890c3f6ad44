"""The expressions of a function, known by calls on a batch and on four changed ones."""

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.grading.fixing.definition import Editable
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.placement import with_rewards
from kltest.rollout import Rollout, elsewhere

SEE, SCOPE = "__kltest_see__", "__kltest_scope__"
# Expressions whose values are looked at.
LOOKED_AT = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.UnaryOp, ast.IfExp)
# What is inside of these runs many times, or later.
CLOSED = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CLOSED += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # type: ignore[assignment]
FIELDS = ("logp", "ref_logp", "old_logp", "mask", "logits", "ref_logits", "old_logits", "tokens")
# Numbers of two expressions that are the same, for functions that compute in float32.
SAME = 1e-5
LONGEST_NAME = 48


@dataclass
class Seen:
    """An expression that ran exactly once in a call, and was a floating-point tensor.

    Attributes:
        node, statement: the expression, and the innermost statement that it is in.
        value: its value, detached.
        trainable: True if a gradient flows through it.
        of_reference: True if it moves with the reference.
        is_kl: True if it moves with the reference, not with rewards, and is constant where that is the policy.
        of_sampler: True if it moves with the sampler's log-probs, and neither with the reference nor with rewards.
        order: when it was computed.
    """

    node: ast.expr
    statement: ast.stmt
    value: Tensor
    trainable: bool
    order: int
    of_reference: bool = False
    is_kl: bool = False
    of_sampler: bool = False

    def like(self, other: "Seen") -> bool:
        """Return True if both have one shape."""
        return self.value.shape == other.value.shape


@dataclass
class _Recorder:
    """Values of the numbered expressions of one call, and of the local names at each numbered statement."""

    values: dict[int, list[tuple[Any, bool, int]]] = field(default_factory=dict)
    scopes: dict[int, dict[str, Any]] = field(default_factory=dict)
    order: int = 0

    def see(self, number: int, value: Any) -> Any:
        self.order += 1
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self.values.setdefault(number, []).append((kept, getattr(value, "requires_grad", False), self.order))
        return value

    def scope(self, number: int, names: Mapping[str, Any]) -> None:
        self.scopes.setdefault(number, {name: _copy(value) for name, value in names.items()})


def _copy(value: Any) -> Any:
    """Return a name's value as it is now: tensors as copies that tell if a gradient flows through them."""
    return value.detach().clone().requires_grad_(value.requires_grad) if _is_floating(value) else value


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


class HasFields(Protocol):
    """Anything that has the fields of a batch."""

    def peek(self, name: str) -> Any:
        """Return a field."""


@dataclass(frozen=True)
class Body:
    """The statements of a function that ran, its expressions, and the names by which a statement knows the fields."""

    definition: Editable
    batch: HasFields
    expressions: Sequence[Seen]
    scopes: Mapping[ast.stmt, Mapping[str, Any]]
    supported: Mapping[str, Tensor] = field(default_factory=dict)
    """Log-probs of the likeliest tokens, if the function takes such."""

    def names(self, statement: ast.stmt) -> dict[str, str]:
        """Return how each field can be written just before a statement; "log_ratio" is log π/π_ref, if it is there."""
        scope = self.scopes[statement]
        order = min((one.order for one in self.expressions if one.statement is statement), default=10**9)
        written = [(name, value) for name, value in scope.items() if isinstance(value, Tensor)]
        for one in self.expressions:
            text = self.definition.source(one.node)
            short = len(text) <= LONGEST_NAME and "\n" not in text and not isinstance(one.node, ast.Name)
            if one.order < order and short and _free(one.node) <= set(scope):
                written.append((text, one.value.clone().requires_grad_(one.trainable)))
        live = self.batch.peek("mask") != 0
        wanted = {name: self.batch.peek(name).detach() for name in FIELDS}
        wanted["log_ratio"] = wanted["logp"] - wanted["ref_logp"]
        wanted |= self.supported
        found: dict[str, str] = {}
        for text, value in sorted(written, key=lambda pair: (len(pair[0]) > LONGEST_NAME // 3, len(pair[0]))):
            for name, field_value in wanted.items():
                policy = name in ("logp", "logits", "topk_logp", "log_ratio")
                if name in found or (policy and not value.requires_grad):
                    continue
                if same(value, field_value, live) and (name != "mask" or torch.equal(value != 0, live)):
                    found[name] = text
        return found


def same(value: Tensor, field_value: Tensor, live: Tensor) -> bool:
    """Return True if a tensor has a field's numbers at live positions."""
    if value.shape != field_value.shape:
        return False
    where = live if value.dim() == 2 else live[..., None].expand(value.shape) if value.dim() == 3 else None
    one, other = value.detach().double(), field_value.double()
    return torch.allclose(one if where is None else one[where], other if where is None else other[where], atol=SAME)


def _free(node: ast.expr) -> set[str]:
    """Return the names that an expression begins with."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - {"torch", "F"}


def look(definition: Editable, loss: Loss, batch: Rollout) -> Body:
    """Call the function on a batch and on changed ones, and return what its expressions are.

    KltestError if the loss fails on the batch; if it fails on a changed one, nothing moves there.
    """
    expressions, statements, tree = _numbered(definition)
    code = definition.code(tree)
    rewards = torch.linspace(0.1, 0.9, len(batch)).double()
    changed = {
        "reference": batch.replace(**{name: elsewhere(batch.peek(name)) for name in ("ref_logp", "ref_logits")}),
        "rewards": with_rewards(batch, rewards),
        "sampler": batch.replace(**{name: elsewhere(batch.peek(name)) for name in batch if _of_sampler(name)}),
        "near": batch.near_reference().replace(
            old_logp=batch.peek("logp").detach(), old_logits=batch.peek("logits").detach()
        ),
    }
    first = _record(definition, code, loss, batch)
    others = {}
    for name, other in changed.items():
        with suppress(KltestError):
            others[name] = _record(definition, code, loss, other)
    found = []
    for number, calls in first.values.items():
        value, trainable, order = calls[0]
        if len(calls) != 1 or not _is_floating(value):
            continue
        node, statement = expressions[number]
        one = Seen(node, statement, value, trainable, order)
        moved = {name: _moves(value, other.values.get(number)) for name, other in others.items()}
        nears = others["near"].values.get(number, []) if "near" in others else []
        zero = len(nears) == 1 and isinstance(nears[0][0], Tensor) and _is_constant(nears[0][0])
        alone = not moved.get("rewards", False)
        one.of_reference = moved.get("reference", False)
        one.is_kl = one.of_reference and alone and zero
        one.of_sampler = moved.get("sampler", False) and alone and not one.of_reference
        found.append(one)
    found.sort(key=lambda one: one.order)
    scopes = {statements[number]: names for number, names in first.scopes.items()}
    supported = {}
    if (support := loss.support) is not None:
        supported = {
            name: batch.support(name, support.k, support.of).detach() for name in ("topk_logp", "ref_topk_logp")
        }
    return Body(definition, batch, found, scopes, supported)


def _is_constant(value: Tensor) -> bool:
    """Return True for zeros, and for equal numbers of several rows or tokens: a divergence of equals, or more."""
    return bool(value.numel()) and float(value.max() - value.min() if value.dim() else value.abs()) < SAME


def _of_sampler(name: str) -> bool:
    return name in ("old_logp", "old_logits", "rollout_logp", "prox_logp")


def _moves(value: Tensor, calls: "list[tuple[Any, bool, int]] | None") -> bool:
    if not calls or not isinstance(calls[0][0], Tensor) or calls[0][0].shape != value.shape:
        return False
    return not torch.allclose(value, calls[0][0].to(value.dtype), rtol=SAME, atol=SAME, equal_nan=True)


def _record(definition: Editable, code: Any, loss: Loss, batch: Rollout) -> _Recorder:
    recorder = _Recorder()
    assert definition.function is not None
    globals_: dict[str, Any] = definition.function.__globals__
    globals_[SEE], globals_[SCOPE] = recorder.see, recorder.scope
    try:
        with definition.running(code), preserved(0):
            loss.for_experiments().returned(batch.replace())
    finally:
        del globals_[SEE], globals_[SCOPE]
    return recorder


def _numbered(
    definition: Editable,
) -> tuple[list[tuple[ast.expr, ast.stmt]], list[ast.stmt], ast.Module]:
    """Return the expressions of a function by number, its statements by number, and a tree of the file that sees both.

    Nodes are those of `definition.node`; the tree is a copy.
    """
    expressions: list[tuple[ast.expr, ast.stmt]] = []
    statements: list[ast.stmt] = []

    class Seer(ast.NodeTransformer):
        def __init__(self, statement: ast.stmt) -> None:
            self.statement = statement

        def visit(self, node: ast.AST) -> Any:
            if isinstance(node, (*CLOSED, ast.JoinedStr)):
                return node
            own = origin.get(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                # What is called is no value; the object that a method is of is one.
                if isinstance(node.func, ast.Attribute) and not _is_super(node.func.value):
                    node.func.value = self.visit(node.func.value)
                node.args = [self.visit(one) for one in node.args]
                node.keywords = [self.visit(one) for one in node.keywords]
            elif isinstance(node, ast.Subscript):
                node.value = self.visit(node.value)
            else:
                self.generic_visit(node)
            if not isinstance(own, LOOKED_AT) or not isinstance(getattr(node, "ctx", None) or ast.Load(), ast.Load):
                return node
            expressions.append((own, self.statement))
            number: list[Any] = [ast.Constant(len(expressions) - 1), node]
            return ast.copy_location(ast.Call(ast.Name(SEE, ast.Load()), number, []), node)

    def statement_seen(copied: ast.stmt) -> list[ast.stmt]:
        own = origin[copied]
        assert isinstance(own, ast.stmt)
        for name, part in ast.iter_fields(copied):
            if isinstance(copied, CLOSED):
                break
            if isinstance(part, list) and part and isinstance(part[0], ast.stmt):
                setattr(copied, name, [new for one in part for new in statement_seen(one)])
            elif isinstance(part, ast.expr):
                if not (
                    isinstance(copied, ast.AnnAssign | ast.AugAssign | ast.For) and name in ("annotation", "target")
                ):
                    setattr(copied, name, Seer(own).visit(part))
            elif isinstance(part, list):
                for each in part:
                    if isinstance(each, ast.ExceptHandler | ast.match_case):
                        each.body = [new for one in each.body for new in statement_seen(one)]
                    elif isinstance(each, ast.withitem):
                        each.context_expr = Seer(own).visit(each.context_expr)
        statements.append(own)
        names = ast.Call(ast.Name("locals", ast.Load()), [], [])
        call = ast.Call(ast.Name(SCOPE, ast.Load()), [ast.Constant(len(statements) - 1), names], [])
        return [ast.copy_location(ast.Expr(call), copied), copied]

    whole = ast.parse(definition.text)
    node = next(one for one in ast.walk(whole) if _same_place(one, definition.node))
    assert isinstance(node, ast.FunctionDef)
    origin: dict[ast.AST, ast.AST] = dict(zip(ast.walk(node), ast.walk(definition.node), strict=True))
    docstring = [node.body[0]] if ast.get_docstring(node, clean=False) is not None else []
    node.body = [*docstring, *(new for one in node.body[len(docstring) :] for new in statement_seen(one))]
    return expressions, statements, ast.fix_missing_locations(whole)


def _same_place(one: ast.AST, other: ast.FunctionDef) -> bool:
    return isinstance(one, ast.FunctionDef) and (one.lineno, one.col_offset) == (other.lineno, other.col_offset)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
