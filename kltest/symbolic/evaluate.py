"""Evaluation of statements and expressions to values of a graph.

*Branches.* Where a condition is not known, both branches are followed, each under what it assumes, and their variables
are joined by choices on the condition. `x == "k1"` and `x == "k2"` exclude each other. A branch that returns or raises
leaves the other one for what follows.

*Loops* over items that are known are unrolled; over others the body is followed once, with inputs that stand for the
item and for what a pass carries to the next.

*Objects.* An attribute that a constructor sets has that value, one that nothing sets is an input of its own. What
cannot be followed is an opaque node, named by what was called.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

from kltest.symbolic.calls import Calls, merge, rest_of, stored
from kltest.symbolic.operations import CONDITIONS, constant_of, is_constant, words_of
from kltest.symbolic.values import (
    ABSENT,
    CHOICE,
    INPUT,
    Builtin,
    Frame,
    Function,
    Graph,
    Kind,
    Node,
    Scope,
    Stored,
    Thing,
    TooLargeError,
    carried_along,
    fixed,
    implied,
    nodes_in,
    reached,
    values_of,
)

BINARY = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"},
    **{ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"},
}
COMPARED = {
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
}
UNARY = {ast.USub: "negated", ast.Not: "not", ast.Invert: "inverted", ast.UAdd: "+"}
DECORATORS = frozenset({"property", "cached_property", "staticmethod", "classmethod"})
NO_GRADIENT = frozenset({"no_grad", "inference_mode", "stop_gradient"})
# Operations whose results have no gradient.
WITHOUT_GRADIENT = words_of(
    "detach zip enumerate reversed list tuple range len size numel dim shape in is not == != < <= > >="
)
# Statements and expressions that one evaluation may follow; beyond, code branches too often to be followed.
BUDGET = 40_000
# Passes of a loop over known items that are followed one by one.
MOST_PASSES = 256


class Evaluator(Calls):
    """Follows functions of a source tree; all values are of one graph.

    Args:
        find: returns the scope of a module by the file that imports it and its dotted name, None if it is not there.
        graph: the graph to add to.
    """

    def __init__(self, find: Callable[[str, str], Scope | None] = lambda file, name: None, graph: Graph | None = None):
        self.graph, self.find = graph or Graph(), find
        self.frames: list[Frame] = []
        self.detached = 0
        self.within: list[str] = []
        self.stores: list[Stored] = []
        self._loops: dict[Node, tuple[Any, dict[Node, Any]]] = {}
        self.left = BUDGET
        self.line = 0
        # The scopes of the functions that were followed, the outermost first, by their definitions.
        self.followed: dict[ast.AST, Scope] = {}
        self._globals: dict[int, tuple[ast.Module, Scope]] = {}

    # Modules and functions

    def renew(self, graph: Graph | None = None) -> None:
        """Give the next function a budget and a graph of its own, or that of the function that defines it."""
        self.graph, self.stores, self._loops, self.left = graph or Graph(), [], {}, BUDGET
        self.frames, self.within, self.detached = [], [], 0
        self.followed.clear()

    def module(self, file: str, tree: ast.Module) -> Scope:
        """Return the scope of a module after its statements."""
        if id(tree) not in self._globals:
            scope = Scope(file)
            # The tree is kept beside its scope, so that its identity is not given to another.
            self._globals[id(tree)] = tree, scope
            self._run(Frame(scope), [one for one in tree.body if not _does(one)])
        return self._globals[id(tree)][1]

    def body(self, function: Function, variables: dict[str, Any]) -> Any:
        """Return what a function returns with its parameters filled."""
        definition = function.definition
        frame = Frame(Scope(function.scope.file, variables, function.scope), function)
        self.followed[definition] = frame.scope
        if isinstance(definition, ast.Lambda):
            with self._inside(frame):
                return self.value(definition.body)
        if _yields(definition):
            return self.graph.node("generator", function.name)
        if any(_last_name(one) in NO_GRADIENT for one in definition.decorator_list):
            with self._without_gradient():
                return self._returned(frame, definition.body)
        return self._returned(frame, definition.body)

    def _returned(self, frame: Frame, statements: Sequence[ast.stmt]) -> Any:
        self._run(frame, statements)
        last = self.graph.node("raises") if frame.ended == "raise" else None
        if frame.ended == "return":
            last = frame.returned.pop()[1]
        for path, value in reversed(frame.returned):
            last = self._on_path(path, value, last)
        return last

    def _on_path(self, path: Sequence[tuple[Node, bool]], value: Any, otherwise: Any) -> Any:
        for condition, holds in reversed(path):
            value = self.graph.choice(condition, *((value, otherwise) if holds else (otherwise, value)))
        return value

    @contextmanager
    def _inside(self, frame: Frame) -> Iterator[None]:
        self.frames.append(frame)
        try:
            yield
        finally:
            self.frames.pop()

    @contextmanager
    def _without_gradient(self) -> Iterator[None]:
        self.detached += 1
        try:
            yield
        finally:
            self.detached -= 1

    @property
    def frame(self) -> Frame:
        """The innermost call."""
        return self.frames[-1]

    def _run(self, frame: Frame, statements: Sequence[ast.stmt]) -> None:
        with self._inside(frame):
            self.block(statements)

    # Statements

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements until the path ends."""
        for at, statement in enumerate(statements):
            if self.frame.ended:
                return
            self._spend()
            self._at_line(statement.lineno)
            if isinstance(statement, ast.If | ast.Match):
                # Where one branch leaves the pass of a loop, the rest of the block belongs to the other.
                if self._branches(statement, statements[at + 1 :]):
                    return
            else:
                follow = getattr(self, f"_{type(statement).__name__.lower()}", None)
                if follow is not None:
                    follow(statement)

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooLargeError("it has more branches than are followed")

    def _expr(self, statement: ast.Expr) -> None:
        self.value(statement.value)

    def _return(self, statement: ast.Return) -> None:
        value = self.value(statement.value) if statement.value else None
        self.frame.returned.append((tuple(self.frame.path), value))
        self.frame.ended = "return"

    def _raise(self, statement: ast.Raise) -> None:
        self.frame.ended = "raise"

    def _continue(self, statement: ast.Continue) -> None:
        self.frame.ended = "continue"

    def _break(self, statement: ast.Break) -> None:
        self.frame.ended = "break"

    def _assign(self, statement: ast.Assign) -> None:
        value = self.value(statement.value)
        for target in statement.targets:
            self.assign(target, value)

    def _annassign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            self.assign(statement.target, self.value(statement.value))

    def _augassign(self, statement: ast.AugAssign) -> None:
        target = statement.target
        before, added = self.value(_loaded(target)), self.value(statement.value)
        if isinstance(before, list) and isinstance(added, list):
            before.extend(added)
        else:
            self.assign(target, self.operator(BINARY[type(statement.op)], before, added))

    def _functiondef(self, statement: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        value: Any = Function(statement, self.frame.scope)
        for decorator in statement.decorator_list:
            if _last_name(decorator) in DECORATORS:
                value = Builtin(_last_name(decorator), lambda inner=value: inner)
            elif self.frame.scope.outer is None and isinstance(found := self.value(decorator), Function):
                self.call(found, (value,), {})  # which may keep it in a table
        self.frame.scope.variables[statement.name] = value

    _asyncfunctiondef = _functiondef

    def _classdef(self, statement: ast.ClassDef) -> None:
        around = self.frame.scope
        scope = Scope(around.file, {}, around)
        kind = Kind(statement, scope.variables, tuple(self.value(base) for base in statement.bases))
        self._run(Frame(scope), statement.body)
        for name, member in scope.variables.items():
            scope.variables[name] = _owned(member, kind, around)
        around.variables[statement.name] = kind

    def _import(self, statement: ast.Import) -> None:
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.frame.scope.variables[name] = self.imported(
                self.frame.scope.file, alias.name if alias.asname else name
            )

    def _importfrom(self, statement: ast.ImportFrom) -> None:
        module = "." * statement.level + (statement.module or "")
        for alias in statement.names:
            value = self.imported_name(self.frame.scope.file, module, alias.name)
            self.frame.scope.variables[alias.asname or alias.name] = value

    def _with(self, statement: ast.With | ast.AsyncWith) -> None:
        detached, before = False, len(self.within)
        for item in statement.items:
            call = self._taken(item.context_expr)
            silent = _last_name(call) in NO_GRADIENT
            detached |= silent
            opened = self.value(call)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, opened)
            if not silent:
                self.within.append(_last_name(call))
        self.detached += detached
        self.block(statement.body)
        self.detached -= detached
        del self.within[before:]

    _asyncwith = _with

    def _taken(self, expression: ast.expr) -> ast.expr:
        """Return the branch of a conditional expression whose condition is known."""
        while isinstance(expression, ast.IfExp) and isinstance(holds := self.truth(self.value(expression.test)), bool):
            expression = expression.body if holds else expression.orelse
        return expression

    def _try(self, statement: ast.Try) -> None:
        """Follow what is tried; where it asserts something, what is done otherwise as well."""
        tried = [*statement.body, *statement.orelse]
        at, first = next(((at, one) for at, one in enumerate(tried) if isinstance(one, ast.Assert)), (0, None))
        if first is not None and statement.handlers:
            tried[at:] = [ast.copy_location(ast.If(first.test, tried[at + 1 :], statement.handlers[0].body), first)]
        self.block([*tried, *statement.finalbody])

    _trystar = _try

    def _assert(self, statement: ast.Assert) -> None:
        condition = self.value(statement.test)
        if isinstance(condition, Node):
            self.frame.path.append((condition, True))

    def _delete(self, statement: ast.Delete) -> None:
        for target in statement.targets:
            if isinstance(target, ast.Name):
                self.frame.scope.variables.pop(target.id, None)

    # Branches

    def _branches(self, statement: ast.If | ast.Match, rest: Sequence[ast.stmt]) -> bool:
        """Follow the branches of a statement; True if that took the rest of its block along."""
        if isinstance(statement, ast.Match):
            statement = _as_conditions(statement)
        condition = self.truth(self._asked(statement.test))
        if isinstance(condition, bool):
            self.block(statement.body if condition else statement.orelse)
            return False
        before = self._state()
        one, ended_one = self._assuming(condition, True, statement.body)
        self.restore(before)
        leaves = ended_one in ("continue", "break")
        other, ended_other = self._assuming(condition, False, [*statement.orelse, *(rest if leaves else ())])
        if not leaves and ended_other in ("continue", "break"):
            self.restore(before)
            one, ended_one = self._assuming(condition, True, [*statement.body, *rest])
            leaves = True
        for ended, state, holds in ((ended_one, other, False), (ended_other, one, True)):
            if ended == "raise":
                self._remember_options([*self.frame.path, (condition, not holds)])
            if ended in ("return", "raise"):
                self.restore(state)
                self.frame.ended = ended_other if holds is False else ended_one
                self.frame.path.append((condition, holds))
                return leaves
        self._join(condition, one, other)
        self.frame.ended = ended_one if ended_one == ended_other else ""
        return leaves

    def _remember_options(self, path: Sequence[tuple[Any, bool]]) -> None:
        """Remember what a symbol is compared with before something raises, if that is what the last condition does."""
        denied = [(one.arguments[0], not holds) if one.operation == "not" else (one, holds) for one, holds in path]
        compared = [values_of(one) if not holds else (None, []) for one, holds in denied]
        symbol, _ = compared[-1]
        if isinstance(symbol, Node):
            self.graph.options.setdefault(symbol, list(chain(*(values for one, values in compared if one is symbol))))

    def _asked(self, test: ast.expr) -> Any:
        """Return the value of a condition, and remember which variable it asks for."""
        value = self.value(test)
        match test:
            case ast.Compare(left=ast.Name(name), ops=[operation], comparators=[ast.Constant(None)]):
                if isinstance(value, Node) and isinstance(operation, ast.Is | ast.IsNot):
                    place = self.frame.scope.file, test.lineno
                    self.graph.asked.setdefault(value, {})[place] = name, isinstance(operation, ast.IsNot)
        return value

    def _assuming(self, condition: Node, holds: bool, statements: Sequence[ast.stmt]) -> tuple["State", str]:
        path = list(self.frame.path)
        self.frame.path.append((condition, holds))
        self.block(statements)
        ended, self.frame.ended, self.frame.path = self.frame.ended, "", path
        return self._state(), ended

    def truth(self, value: Any) -> bool | Node:
        """Return the truth of a condition if it is known or assumed, else its node."""
        if not isinstance(value, Node):
            return bool(value) if is_constant(value) or isinstance(value, list | tuple | dict) else True
        for frame in reversed(self.frames):
            for condition, holds in reversed(frame.path):
                if (known := implied(value, condition, holds)) is not None:
                    return known
        return value

    def _state(self) -> "State":
        """Return copies of all variables and containers that the calls under way can reach."""
        found: State = {}
        for frame in self.frames:
            scope: Scope | None = frame.scope
            # What belongs to a module is seldom changed by its functions, and large.
            while scope is not None and (scope.outer is not None or scope is self.frame.scope):
                _reach(scope.variables, found)
                scope = scope.outer
        return found

    def reachable(self, value: Any) -> "State":
        """Return copies of the containers in a value."""
        found: State = {}
        _reach(value, found)
        return found

    def restore(self, state: "State") -> None:
        """Give containers the content that they had."""
        for container, content in state.values():
            _replace(container, content)

    def _join(self, condition: Node, one: "State", other: "State") -> None:
        """Give each container the content of two branches, chosen by the condition."""
        absent = self.graph.node(INPUT, ABSENT)
        for key in {**one, **other}:
            container = (one.get(key) or other[key])[0]
            contents = [state[key][1] for state in (one, other) if key in state]
            if len(contents) == 1:  # made in one of the branches
                _replace(container, contents[0])
            elif isinstance(container, list):
                pairs = zip_longest(*contents, fillvalue=absent)
                container[:] = [self.graph.choice(condition, *pair) for pair in pairs]
            else:
                _replace(container, self.graph.choice(condition, *contents))
                for name, value in container.items():
                    if isinstance(name, str):
                        self.graph.named(value, name)

    # Loops

    def _for(self, statement: ast.For | ast.AsyncFor) -> None:
        items = self._items(statement.iter)
        if not isinstance(items, Node):
            self._unrolled(statement, items)
        else:
            self._carried(statement, items)

    _asyncfor = _for

    def _items(self, expression: ast.expr) -> Sequence[Any] | Node:
        """Return what a loop runs over if that is known and short, else a node."""
        items = self.value(expression)
        if isinstance(items, list | tuple | range | str) and len(items) <= MOST_PASSES:
            return list(items)
        if isinstance(items, dict) and rest_of(items) is None:
            return list(items)
        if isinstance(items, range):
            return self.graph.node("range", items.start, items.stop, items.step)
        return items if isinstance(items, Node) else self.graph.node("list", self._described(items))

    def _unrolled(self, statement: ast.For | ast.AsyncFor, items: Sequence[Any]) -> None:
        for item in items:
            self.assign(statement.target, item)
            self.block(statement.body)
            if self.frame.ended not in ("", "continue"):
                break
            self.frame.ended = ""
        self.frame.ended = "" if self.frame.ended == "break" else self.frame.ended

    def _carried(self, statement: ast.For | ast.AsyncFor, items: Any) -> None:
        """Follow the body once; variables that it changes become nodes of what they are after the last pass."""
        variables, mark = self.frame.scope.variables, len(self.graph.lines)
        names = [name for name in _changed_in(statement.body) if name in variables]
        kept = {name: fixed(variables[name]) for name in names}
        # The entries of a tuple are carried one by one.
        places = [(name, at) for name in names for at in _places_in(kept[name])]
        before = tuple(kept[name] if at is None else kept[name][at] for name, at in places)
        place = (statement.lineno, statement.col_offset, len(self.frames), mark)
        index = self.graph.node(INPUT, "item", *place)
        counted, element = self._counted(items, index)
        carried = tuple(
            self.graph.node(INPUT, "carried", name, *(() if at is None else (at,)), *place, before)
            for name, at in places
        )
        variables |= _gathered(places, carried)
        self.assign(statement.target, element)
        self._loops[index] = counted, dict(zip(carried, before, strict=True))
        self.block(statement.body)
        del self._loops[index]
        if self.frame.ended in ("continue", "break"):
            self.frame.ended = ""
        after = tuple(fixed(variables[name] if at is None else self.item(variables[name], at)) for name, at in places)
        left = [
            self._left(counted, index, before, carried, after, number) if one is not carried[number] else before[number]
            for number, one in enumerate(after)
        ]
        variables |= _gathered(places, left)

    def _left(
        self,
        counted: Any,
        index: Node,
        before: Sequence[Any],
        carried: Sequence[Node],
        after: Sequence[Any],
        wanted: int,
    ) -> Node:
        """Return what a loop leaves in one of its variables: a loop over that one and those that it is made of."""
        kept = carried_along(carried, after, [wanted])
        chosen = (tuple(values[number] for number in kept) for values in (before, carried, after))
        return self.graph.node("loop", counted, index, *chosen, kept.index(wanted))

    def _counted(self, items: Any, index: Node) -> tuple[Any, Any]:
        """Return what an index counts through in a loop over unknown items, and the item at an index."""
        if isinstance(items, Node) and items.operation == "range":
            return items, index
        return self.graph.node("range", self.graph.node("len", items)), self._at(items, index)

    def _at(self, items: Any, index: Any) -> Any:
        """Return the item at an index; through zip and enumerate, the items of what they run over."""
        if isinstance(items, Node) and items.operation == "zip":
            return tuple(self._at(one, index) for one in items.arguments)
        if isinstance(items, Node) and items.operation == "enumerate":
            first, *start = items.arguments
            return self.operator("+", index, *start) if start else index, self._at(first, index)
        return self.item(items, index)

    def _while(self, statement: ast.While) -> None:
        """Follow the body once; what it changes is then known by what it is made of, not by its value."""
        variables = self.frame.scope.variables
        names = [name for name in _changed_in(statement.body) if name in variables]
        before = {name: variables[name] for name in names}
        self.block(statement.body)
        if self.frame.ended in ("continue", "break"):
            self.frame.ended = ""
        for name in names:
            if isinstance(variables[name], Node) and variables[name] is not before[name]:
                variables[name] = self.graph.node("while loop", variables[name], statement.lineno)

    # Assignment

    def assign(self, target: ast.expr, value: Any) -> None:
        """Give a target a value."""
        match target:
            case ast.Name(id=name):
                self._note(target, name, value)
                self.frame.scope.variables[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                self._unpack(targets, value)
            case ast.Starred(value=inner):
                self.assign(inner, value)
            case ast.Attribute(value=owner, attr=name):
                holder = self.value(owner)
                self._note(target, name, value)
                if isinstance(holder, Thing):
                    holder.attributes[name] = value
            case ast.Subscript(value=owner, slice=key):
                place, holder = self.value(key), self.value(owner)
                if isinstance(place, str):
                    self._note(target, place, value)
                self._write(owner, holder, place, value)
                if (whole := self._of_all_passes(holder, place, value)) is not None:
                    self.store(_last_name(owner), whole, target.lineno)

    def _of_all_passes(self, holder: Any, key: Any, value: Any) -> Node | None:
        """Return as one value what the passes of a loop write in place, each into the entry at its own index, or None.

        It has as many entries as what each of them is made of.
        """
        if not (isinstance(key, Node) and isinstance(value, Node) and key in self._loops):
            return None
        counted, before = self._loops[key]
        written, own = before.get(holder, holder), self.graph.node("item", holder, key)
        entry = self.graph.rewritten(value, lambda one: self.graph.node("item", written, key) if one is own else one)
        inside = reached(entry)
        if not inside.isdisjoint({*before, *self._loops} - {key}):
            return None  # a pass has what another one left, or is one of several inside of it
        read = [one.arguments[0] for one in inside if one.operation == "item" and one.arguments[1] is key]
        read = sorted((one for one in read if isinstance(one, Node) and one is not written), key=lambda one: one.number)
        counted = self._counted(read[0], key)[0] if read else counted
        return self.graph.node("stack", self.graph.node("mapped", counted, key, entry, []))

    def _note(self, target: ast.expr, name: str, value: Any) -> None:
        if self.frame.scope.file:
            self.graph.named(value, name)
        self.store(name, value, getattr(target, "lineno", 0))

    def store(self, name: str, value: Any, line: int) -> None:
        """Remember under which name a function stores a value, and where."""
        scope = self.frame.scope
        if scope.file and scope.outer is not None and any(True for _ in nodes_in(value)):
            self.stores.append(Stored(name, value, scope.file, line, self.frame.function))

    def _unpack(self, targets: Sequence[ast.expr], value: Any) -> None:
        star = next((at for at, one in enumerate(targets) if isinstance(one, ast.Starred)), None)
        if isinstance(value, tuple | list) and star is not None:
            end = len(value) - (len(targets) - star - 1)
            value = [*value[:star], list(value[star:end]), *value[end:]]
        if isinstance(value, tuple | list) and len(value) != len(targets):
            value = self.graph.node("tuple", tuple(value))
        for at, one in enumerate(targets):
            self.assign(one, value[at] if isinstance(value, tuple | list) else self.item(value, at))

    def _write(self, owner: ast.expr, holder: Any, key: Any, value: Any) -> None:
        places = range(-len(holder), len(holder)) if isinstance(holder, list) else ()
        if (isinstance(holder, dict) and is_constant(key)) or (isinstance(key, int) and key in places):
            holder[key] = value
        elif isinstance(holder, Node):
            self.assign(stored(owner), self.graph.node("written", holder, key, value))

    # Expressions

    def value(self, expression: ast.expr) -> Any:
        """Return the value of an expression."""
        self._spend()
        before = self.line
        self._at_line(expression.lineno)
        found = getattr(self, f"_of_{type(expression).__name__.lower()}", self._opaque)(expression)
        self._locate(found)
        self.line = before
        return found

    def _at_line(self, line: int) -> None:
        """Remember the line that is followed; what the library computes stands where it is called."""
        if self.frame.scope.file:
            self.line = line

    @property
    def _place(self) -> tuple[str, int]:
        files = (frame.scope.file for frame in reversed(self.frames))
        return next((file for file in files if file), ""), self.line

    def _locate(self, value: Any) -> None:
        if isinstance(value, Node):
            self.graph.lines.setdefault(value, set()).add(self._place)

    def _opaque(self, expression: ast.expr) -> Any:
        return self.graph.node("unread", type(expression).__name__.lower(), expression.lineno, expression.col_offset)

    def _of_constant(self, expression: ast.Constant) -> Any:
        return expression.value

    def _of_name(self, expression: ast.Name) -> Any:
        scope = self.frame.scope.find(expression.id)
        return scope.variables[expression.id] if scope else self.builtin(expression.id)

    def _of_namedexpr(self, expression: ast.NamedExpr) -> Any:
        value = self.value(expression.value)
        self.assign(expression.target, value)
        return value

    def _of_tuple(self, expression: ast.Tuple) -> Any:
        return tuple(self._entries(expression.elts))

    def _of_list(self, expression: ast.List) -> Any:
        return self._entries(expression.elts)

    _of_set = _of_list

    def _entries(self, expressions: Sequence[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for one in expressions:
            if isinstance(one, ast.Starred):
                inner = self.value(one.value)
                found.extend(inner if isinstance(inner, list | tuple) else [self.graph.node("starred", inner)])
            else:
                found.append(self.value(one))
        return found

    def _of_dict(self, expression: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, one in zip(expression.keys, expression.values, strict=True):
            value = self.value(one)
            if key is not None:
                name = self.value(key)
                found[name if is_constant(name) else self.graph.node("key", name)] = value
            else:
                merge(found, value, self.graph)
        return found

    def _of_joinedstr(self, expression: ast.JoinedStr) -> Any:
        parts = [self.value(one.value if isinstance(one, ast.FormattedValue) else one) for one in expression.values]
        return "".join(map(str, parts)) if all(map(is_constant, parts)) else self.graph.node("text", *map(fixed, parts))

    def _of_lambda(self, expression: ast.Lambda) -> Any:
        return Function(expression, self.frame.scope)

    def _of_ifexp(self, expression: ast.IfExp) -> Any:
        condition = self.truth(self._asked(expression.test))
        if isinstance(condition, bool):
            return self.value(expression.body if condition else expression.orelse)
        found = []
        for holds, branch in ((True, expression.body), (False, expression.orelse)):
            self.frame.path.append((condition, holds))
            found.append(self.value(branch))
            self.frame.path.pop()
        return self.graph.choice(condition, *found)

    def _of_boolop(self, expression: ast.BoolOp) -> Any:
        stops = isinstance(expression.op, ast.Or)
        first, *rest = expression.values
        value = self.value(first)
        for one in rest:
            known = self.truth(value)
            if isinstance(known, bool):
                if known is stops:
                    return value
                value = self.value(one)
                continue
            self.frame.path.append((known, not stops))
            other = self.value(one)
            self.frame.path.pop()
            value = self.graph.choice(known, *((value, other) if stops else (other, value)))
        return value

    def _of_unaryop(self, expression: ast.UnaryOp) -> Any:
        name, value = UNARY[type(expression.op)], self.value(expression.operand)
        if name == "not":
            known = self.truth(value)
            return not known if isinstance(known, bool) else self.graph.node("not", known)
        return value if name == "+" else self.operator(name, value)

    def _of_binop(self, expression: ast.BinOp) -> Any:
        return self.operator(BINARY[type(expression.op)], self.value(expression.left), self.value(expression.right))

    def _of_compare(self, expression: ast.Compare) -> Any:
        left, found = self.value(expression.left), None
        for kind, one in zip(expression.ops, expression.comparators, strict=True):
            right = self.value(one)
            held = self._compared(COMPARED[type(kind)], left, right)
            found = held if found is None else self.graph.choice(found, held, False) if found is not True else held
            if found is False:
                return False
            left = right
        return found

    def _compared(self, name: str, left: Any, right: Any) -> Any:
        opposite = {"is not": "is", "not in": "in", "!=": "=="}.get(name)
        if opposite and (name != "!=" or is_constant(right)):
            held = self._compared(opposite, left, right)
            return not held if isinstance(held, bool) else self.graph.node("not", held)
        if name == "is" and right is None and not self._may_be_none(left):
            return left is None
        if name == "is" and right is None and left.operation == CHOICE:
            return self._branchwise(left, lambda one: self._compared(name, one, None))
        if name == "in" and isinstance(right, dict) and is_constant(left):
            return left in right or ((rest := rest_of(right)) is not None and self.operator("in", left, rest))
        if name == "in" and isinstance(right, list | tuple) and all(map(is_constant, right)) and isinstance(left, Node):
            found: Any = False
            for one in reversed(right):
                found = self.graph.choice(self.graph.node("==", left, one), True, found)
            return found
        return self.operator(name, left, right)

    def _may_be_none(self, value: Any) -> bool:
        if isinstance(value, Node) and value.operation == "item":  # what an operation makes has no None in it
            return self._may_be_none(value.arguments[0])
        return isinstance(value, Node) and value.operation in (INPUT, CHOICE, "attribute", "call", "method")

    def operator(self, name: str, *arguments: Any) -> Any:
        """Return what an operator of Python makes of values."""
        given = tuple(map(fixed, arguments))
        if name == "+" and all(isinstance(one, list | tuple) for one in arguments):
            return arguments[0] + arguments[1]
        if (known := constant_of(name, given)) is not NotImplemented:
            return known
        if name == "-" and given[0] == 1 and isinstance(given[1], Node) and given[1].operation in CONDITIONS:
            return self.made("not", given[1])  # casts of truths to numbers are none here
        return self.made(name, *given)

    def made(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Return the node of an operation, detached where gradients are switched off."""
        node = self.graph.node(operation, *arguments, **named)
        self._locate(node)
        self.graph.written.setdefault(node, set()).add(self._place)
        return self.graph.node("detach", node) if self.detached and operation not in WITHOUT_GRADIENT else node

    def _of_slice(self, expression: ast.Slice) -> Any:
        ends = (expression.lower, expression.upper, expression.step)
        return slice(*(None if one is None else self.value(one) for one in ends))

    def _of_subscript(self, expression: ast.Subscript) -> Any:
        return self.item(self.value(expression.value), self.value(expression.slice))

    def _of_attribute(self, expression: ast.Attribute) -> Any:
        return self.attribute(self.value(expression.value), expression.attr)

    def _of_call(self, expression: ast.Call) -> Any:
        positional = self._entries(expression.args)
        named: dict[str, Any] = {}
        for one in expression.keywords:
            value = self.value(one.value)
            if one.arg is not None:
                named[one.arg] = value
            elif isinstance(value, dict):
                named |= {name: entry for name, entry in value.items() if isinstance(name, str)}
        callee = expression.func
        if isinstance(callee, ast.Attribute):
            return self.method(callee, self.value(callee.value), positional, named)
        return self.call(self.value(callee), positional, named)

    def _of_await(self, expression: ast.Await) -> Any:
        return self.value(expression.value)

    def _of_listcomp(self, expression: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Any:
        return self._comprehended(expression.generators, lambda: self.value(expression.elt))

    _of_generatorexp = _of_setcomp = _of_listcomp

    def _of_dictcomp(self, expression: ast.DictComp) -> Any:
        pairs = self._comprehended(
            expression.generators, lambda: (self.value(expression.key), self.value(expression.value))
        )
        if isinstance(pairs, list) and all(is_constant(one[0]) for one in pairs):
            return dict(pairs)
        return self.graph.node("unread", "dictionary", expression.lineno, expression.col_offset)

    def _comprehended(self, generators: Sequence[ast.comprehension], made: Callable[[], Any]) -> Any:
        """Return the list of a comprehension: entry by entry if its items are known, else one node."""
        scope = Scope(self.frame.scope.file, {}, self.frame.scope)
        with self._inside(Frame(scope, self.frame.function, list(self.frame.path))):
            return self._comprehended_inside(list(generators), made)

    def _comprehended_inside(self, generators: list[ast.comprehension], made: Callable[[], Any]) -> Any:
        if not generators:
            return [made()]
        first, *rest = generators
        items = self._items(first.iter)
        if isinstance(items, Node):
            index = self.graph.node(INPUT, "item", first.target.lineno, first.target.col_offset, len(self.frames))
            counted, element = self._counted(items, index)
            self.assign(first.target, element)
            kept = tuple(self.value(test) for test in first.ifs)
            inner = self._comprehended_inside(rest, made)
            value = inner[0] if isinstance(inner, list) and len(inner) == 1 else inner
            return self.graph.node("mapped", counted, index, value, kept)
        found: list[Any] = []
        for item in items:
            self.assign(first.target, item)
            tests = [self.truth(self.value(test)) for test in first.ifs]
            if False in tests:
                continue
            inner = self._comprehended_inside(rest, made)
            found.extend(inner if isinstance(inner, list) else [self.graph.node("starred", inner)])
        return found


def _does(statement: ast.stmt) -> bool:
    """Return True for a statement of a module that defines nothing: a call of a function, the run of a script."""
    if isinstance(statement, ast.Expr):
        call = statement.value
        return not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute))
    if isinstance(statement, ast.If):
        return any(isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(statement.test))
    return isinstance(statement, ast.For | ast.While | ast.With | ast.Assert)


@lru_cache(maxsize=100_000)
def _yields(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a generator."""
    stack: list[ast.AST] = list(definition.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))
    return False


def _owned(member: Any, kind: Kind, around: Scope) -> Any:
    """Return an entry of a class: its functions see the names around the class, and know whose they are."""
    if isinstance(member, Builtin):
        inner = _owned(member.function(), kind, around)
        return Builtin(member.name, lambda: inner) if member.name in DECORATORS else member
    return Function(member.definition, around, kind) if isinstance(member, Function) else member


State = dict[int, tuple[Any, Any]]


def _reach(container: Any, found: State) -> None:
    """Add a container and those inside it, each with a copy of its content; a module's objects are shared."""
    stack = [container]
    while stack:
        one = stack.pop()
        if isinstance(one, Thing):
            one = one.attributes
        if isinstance(one, list | dict) and id(one) not in found:
            found[id(one)] = one, one.copy()
            stack.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, tuple):
            stack.extend(one)


def _places_in(value: Any) -> Sequence[int | None]:
    """Return the places of a tuple's entries; None, once, for any other value."""
    return range(len(value)) if isinstance(value, tuple) and value else (None,)


def _gathered(places: Sequence[tuple[str, int | None]], values: Sequence[Any]) -> dict[str, Any]:
    """Return values by their names, those at places of one name as a tuple."""
    found: dict[str, Any] = {}
    for (name, at), value in zip(places, values, strict=True):
        found[name] = value if at is None else (*found.get(name, ()), value)
    return found


def _replace(container: Any, content: Any) -> None:
    container.clear()
    container.update(content) if isinstance(container, dict) else container.extend(content)


def _changed_in(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names of variables that statements assign or append to, in order."""
    found: dict[str, None] = {}
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            if node.func.attr in ("append", "extend", "update", "register_hook") or node.func.attr.endswith("_"):
                found[node.func.value.id] = None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found[node.value.id] = None
    return list(found)


def _last_name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Call):
        return _last_name(expression.func)
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        return str(expression.slice.value)
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


def _loaded(target: ast.expr) -> ast.expr:
    return ast.copy_location(type(target)(**{**dict(ast.iter_fields(target)), "ctx": ast.Load()}), target)


def _as_conditions(statement: ast.Match) -> ast.If:
    """Return a match as a chain of conditions."""
    subject, chain = statement.subject, list[ast.stmt]()
    for case in reversed(statement.cases):
        captured = case.pattern.name if isinstance(case.pattern, ast.MatchAs) else None
        bound = [ast.Assign([ast.Name(captured, ast.Store())], subject)] if captured else []
        tests = [one for one in (_tested(case.pattern, subject), case.guard) if one is not None]
        test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)
        chain = [*bound, *([ast.If(test, case.body, chain)] if tests else case.body)]
    whole = chain[0] if len(chain) == 1 and isinstance(chain[0], ast.If) else ast.If(ast.Constant(True), chain, [])
    return ast.fix_missing_locations(ast.copy_location(whole, statement))


def _tested(pattern: ast.pattern, subject: ast.expr) -> ast.expr | None:
    """Return the condition under which a pattern matches; None for one that always does."""
    match pattern:
        case ast.MatchAs(pattern=inner):
            return None if inner is None else _tested(inner, subject)
        case ast.MatchOr(patterns=several) if not all(isinstance(one, ast.MatchValue) for one in several):
            tests = [one for each in several if (one := _tested(each, subject)) is not None]
            return ast.BoolOp(ast.Or(), tests) if len(tests) == len(several) else None
        case ast.MatchOr() | ast.MatchValue():
            values = [one.value for one in ast.walk(pattern) if isinstance(one, ast.MatchValue)]
            return ast.Compare(subject, [ast.In()], [ast.Tuple(values, ast.Load())])
        case ast.MatchSingleton(value=value):
            return ast.Compare(subject, [ast.Is()], [ast.Constant(value)])
        case ast.MatchClass(cls=kind, patterns=[], kwd_patterns=[]):
            return ast.Call(ast.Name("isinstance", ast.Load()), [subject, kind], [])
    return ast.Call(ast.Name("matches", ast.Load()), [subject, ast.Constant(ast.unparse(pattern))], [])
