"""Facts of the function of a term that are looked up again and again, read off its syntax tree once."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from kltest.scanning.arithmetic import MODULES
from kltest.scanning.callees import Function
from kltest.scanning.flows import Seed
from kltest.scanning.sides import REFERENCE, side
from kltest.scanning.syntax import FUNCTIONS, FunctionNode, chain, defaults, names_in
from kltest.scanning.terms import Term
from kltest.symbolic.words import is_mask, words


class Branches(NamedTuple):
    """Consequences of a condition: seeds in its first and other branch, a name that matters and that both bind
    (`together`), any name that matters or a way out of the function (`decides`)."""

    first: bool
    other: bool
    together: bool
    decides: bool


class Facts:
    """Facts of the function of a term; `relevant` are the names that matter to it."""

    def __init__(self, term: Term, relevant: set[str]) -> None:
        self.term, self.relevant = term, relevant
        # Of nodes that nobody changes.
        self.adds_up, self.branches, self.holds = cache(self._adds_up), cache(self._branches), cache(self.term.holds)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the function."""
        return list(ast.walk(self.term.function.node))

    @cached_property
    def alone(self) -> "list[tuple[Seed, Facts]]":
        """The facts for each seed of a term that has several."""
        seeds = self.term.seeds if len(self.term.seeds) > 1 else []
        return [(seed, Facts(replace(self.term, seeds=[seed]), self.relevant)) for seed in seeds]

    @cached_property
    def stored(self) -> frozenset[str]:
        """Names that the function binds."""
        return frozenset(n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

    @cached_property
    def compared(self) -> dict[str, list[Any]]:
        """Constants that an expression is compared with, by its text."""
        found: dict[str, list[Any]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                if not isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
                    continue
                try:
                    other = ast.literal_eval(node.comparators[0])
                except (ValueError, TypeError):
                    continue
                cases = other if isinstance(other, list | tuple | set) else [other]
                found.setdefault(ast.unparse(node.left), []).extend(cases)
        return found

    @cached_property
    def counters(self) -> frozenset[str]:
        """Names that count the rollouts in loops: of range and enumerate."""
        return frozenset(self._counters())

    def _counters(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
                first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
                if getattr(node.iter.func, "id", "") in ("range", "enumerate") and isinstance(first, ast.Name):
                    yield first.id

    @cached_property
    def of_reference(self) -> frozenset[str]:
        """Names that are computed from a reference, and into which the term does not flow."""
        read = self._computed(lambda value: any(_is_reference(node) for node in ast.walk(value)))
        return read - self._computed(self.term.holds)

    @cached_property
    def of_sides(self) -> frozenset[str]:
        """Names of log-probs, and those that are computed from them."""
        stated = frozenset(n.id for n in self.nodes if isinstance(n, ast.Name) and side(n.id))
        return stated | self._computed(lambda value: any(side(chain(node)) for node in ast.walk(value)))

    def _computed(self, begins: Callable[[ast.AST], bool]) -> frozenset[str]:
        """Return the names computed from expressions for which `begins` holds, or from one another."""
        bound: list[tuple[set[str], ast.expr]] = []
        for node in self.nodes:
            match node:
                case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                    bound += [(names_in(target), value) for target, value in zip(targets, values, strict=True)]
                case ast.AugAssign(target, _, value):
                    bound.append((names_in(target), value))
                case ast.Assign(targets, value) if not isinstance(value, ast.Dict):
                    bound.append((names_in(*targets), value))
        found = {name for targets, value in bound if begins(value) for name in targets}
        while more := {name for targets, value in bound if names_in(value) & found for name in targets} - found:
            found |= more
        return frozenset(found)

    @cached_property
    def sampled(self) -> bool:
        """True if both log-probs of sampled tokens and logits are handed in."""
        return {"logp", "logits"} <= {
            stated.quantity for name in self.term.function.parameters if (stated := side(name))
        }

    @cached_property
    def positions(self) -> frozenset[str]:
        """Names that the function computes as a position in a rollout: of int(…), x.item() and the like."""
        counts = ("int", "item", "argmax", "argmin", "index", "nonzero")
        return frozenset(
            name
            for node in self.nodes
            if isinstance(node, ast.Assign)
            and any(
                isinstance(n, ast.Call) and chain(n.func).rsplit(".", 1)[-1] in counts for n in ast.walk(node.value)
            )
            for name in names_in(*node.targets)
        )

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Constant defaults of the function's parameters, and of `self.x` by the class and its constructor."""
        return defaults_of(self.term.function)

    def _adds_up(self, node: ast.For) -> bool:
        """Return True for a loop over rollouts, or parts of them, in which the term is added up or listed."""
        variables, body = names_in(node.target), list(_all(node.body))
        if isinstance(node.iter, ast.Call) and getattr(node.iter.func, "id", "") == "range":
            parts: list[ast.AST] = [n.slice for n in body if isinstance(n, ast.Subscript)]
        else:
            parts = [n for n in ast.walk(node.iter) if side(chain(n)) or is_mask(chain(n))]
            variables |= names_in(*parts)
        if not variables & names_in(*parts) or not self.holds(*node.body):
            return False
        added = [n.target for n in body if isinstance(n, ast.AugAssign)]
        listed = [
            n.func.value
            for n in body
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("append", "extend")
        ]
        again = [n.targets[0] for n in body if isinstance(n, ast.Assign) and names_in(n.targets[0]) & names_in(n.value)]
        return bool(names_in(*added, *listed, *again) & self.relevant)

    @cached_property
    def factors(self) -> set[str]:
        """Texts that are factors and nothing else: no share of an interpolation, no argument of a call."""
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for node in self.nodes:
            if isinstance(node, ast.BinOp):
                found[isinstance(node.op, ast.Mult)] |= {ast.unparse(node.left), ast.unparse(node.right)}
            elif isinstance(node, ast.Call):
                found[False].update(map(ast.unparse, (*node.args, *(each.value for each in node.keywords))))
        return found[True] - found[False]

    @cached_property
    def rests(self) -> set[str]:
        """Texts that may be the rest of an interpolation, `1 - share`."""
        return {ast.unparse(n) for n in self.nodes if isinstance(n, ast.BinOp) and isinstance(n.left, ast.Constant)}

    def is_of_padding(self, name: str, text: str) -> bool:
        """Return True for a mask that is called one of padding and is used as one: many such are of live tokens."""
        if not {"pad", "padding", "invalid", "ignored"}.intersection(words(name)):
            return False
        filled: list[ast.expr] = []
        turned: list[ast.expr] = []
        for node in self.nodes:  # what a call fills comes before what is in its arguments
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("masked_fill"):
                filled += node.args
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert) and node not in filled:
                turned.append(node.operand)
            elif (
                isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and ast.unparse(node.left) in ("1", "1.0")
            ):
                turned.append(node.right)
        return text in map(ast.unparse, [*turned, *filled])

    def has_tokens(self, text: str) -> bool:
        """Return True if an expression, or what is computed of it, is masked or summed up over tokens."""
        found = self._computed(lambda value: text in map(ast.unparse, ast.walk(value)))

        def reads(node: ast.expr) -> bool:
            return bool(names_in(node) & found) or text in map(ast.unparse, ast.walk(node))

        for node in self.nodes:
            match node:
                case ast.BinOp(one, ast.Mult(), other):
                    if any(is_mask(chain(a)) and reads(b) for a, b in ((one, other), (other, one))):
                        return True
                case ast.Call(ast.Attribute(value, "sum" | "mean"), given, keywords):
                    operands = [value, *given] if chain(value) not in MODULES else given
                    if operands and reads(operands[0]) and (len(operands) > 1 or keywords):
                        return True
        return False

    @cached_property
    def sees_masks(self) -> bool:
        """True if the function names a mask, or labels to be ignored."""
        said = [n.arg for n in self.nodes if isinstance(n, ast.arg | ast.keyword) and n.arg]
        said += [chain(n) for n in self.nodes if isinstance(n, ast.Name | ast.Attribute | ast.Subscript)]
        ignored = ("ignore_index", "pad_token_id")
        return any(is_mask(name) or name.endswith(ignored) for name in said) or any(
            isinstance(n, ast.Constant) and n.value == 100 for n in self.nodes
        )

    def is_of_rows(self, text: str) -> bool:
        """Return True for a mask that is put beside those of tokens, one number for each rollout."""
        beside = {f"{text}{way}" for way in (".unsqueeze(1)", "[:, None]", ".view(-1, 1)", ".reshape(-1, 1)")}
        if not self.term.whole:  # of these, it may also be that of tokens beside the vocabulary
            beside |= {f"{text}{way}" for way in (".unsqueeze(-1)", ".unsqueeze(dim=-1)", "[..., None]")}
        return any(ast.unparse(n) in beside for n in self.nodes if isinstance(n, ast.Call | ast.Subscript))

    def _branches(self, node: ast.If) -> Branches:
        """Return what a condition decides over."""
        bound = [
            {n.id for n in _all(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            for part in (node.body, node.orelse)
        ]
        leaves = any(isinstance(n, ast.Return | ast.Raise) for n in _all([*node.body, *node.orelse]))
        return Branches(
            self.holds(*node.body),
            self.holds(*node.orelse),
            bool(bound[0] & bound[1] & self.relevant),
            leaves or bool((bound[0] | bound[1]) & self.relevant),
        )


def _is_reference(node: ast.AST) -> bool:
    stated = side(chain(node)) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else None
    return stated is not None and stated.who == REFERENCE


@lru_cache(maxsize=1000)
def defaults_of(function: Function) -> dict[str, Any]:
    """Return the constant defaults of a function's parameters, and of `self.x` by its class and the constructor."""
    found: dict[str, Any] = {}
    if isinstance(function.node, FUNCTIONS):
        found |= defaults(function.node.args)
    for node in ast.walk(function.source.tree) if function.owner else ():
        if isinstance(node, ast.ClassDef) and node.name == function.owner:
            for method in node.body:
                if isinstance(method, FUNCTIONS) and method.name == "__init__":
                    found |= {f"self.{name}": value for name, value in defaults(method.args).items()}
                    _take_kept(found, method, function.settings)
                elif isinstance(method, ast.AnnAssign) and isinstance(method.value, ast.Constant):
                    found[f"self.{ast.unparse(method.target)}"] = method.value.value
    return found


def _all(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _take_kept(found: dict[str, Any], constructor: FunctionNode, settings: Mapping[str, Any]) -> None:
    """Take what a constructor keeps in self: a constant, a parameter, or an option of a configuration."""
    own = defaults(constructor.args)
    for node in ast.walk(constructor):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self")) as target], value):
                match value:
                    case ast.Name(name):
                        given = own.get(name)
                    case ast.Attribute(_, name):
                        given = settings.get(name)
                    case ast.Call(_, [*_, ast.Constant(str()), ast.Constant(given)]) | ast.Constant(given):
                        pass
                    case _:
                        continue
                if given is not None:
                    found[ast.unparse(target)] = given
