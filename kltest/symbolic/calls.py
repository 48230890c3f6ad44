"""Calls, attributes and entries: of functions and objects of the source, of containers, and of what is outside."""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from kltest.symbolic.composed import module_of
from kltest.symbolic.operations import (
    COLLECTIVE,
    CONSTANTS,
    CONVERSIONS,
    FUNCTIONS,
    GRADIENTS,
    LEADING,
    MODULES,
    NAMED,
    OPERATORS,
    STORED,
    canonical,
    is_constant,
    is_count_of_processes,
    operation_of,
)
from kltest.symbolic.values import (
    ABSENT,
    CHOICE,
    INPUT,
    Builtin,
    External,
    Frame,
    Function,
    Graph,
    Kind,
    Node,
    Partial,
    Scope,
    Stored,
    Thing,
    TooLargeError,
    fixed,
    mapped,
    nodes_in,
)

LIBRARY_SOURCE = ast.parse(Path(__file__).with_name("library.py").read_text(encoding="utf-8"))
LIBRARY = frozenset(one.name for one in LIBRARY_SOURCE.body if isinstance(one, ast.FunctionDef | ast.ClassDef)) | {
    "tree_util_tree_map"
}
# Packages that have what another has.
PACKAGES = {"numpyro": "torch", "tensorflow_probability": "distrax", "tfp": "distrax"}
# Types of which something may be known to be.
TYPES: Mapping[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "Tensor": ()}
# Calls inside of calls that are followed.
DEPTH = 24
# Built-in functions of Python on values of which some are nodes.
ON_NODES = {"sum": "added up", "len": "len", "range": "range", "zip": "zip", "enumerate": "enumerate"} | {
    **{"reversed": "reversed", "list": "list", "tuple": "tuple", "max": "largest", "min": "smallest"},
    **{"abs": "abs", "int": "int", "float": "same", "bool": "bool", "pow": "**", "round": "round", "sorted": "sorted"},
}
ON_CONSTANTS: Mapping[str, Callable[..., Any]] = {
    **{"len": len, "range": range, "list": list, "tuple": tuple, "max": max, "min": min, "abs": abs, "int": int},
    **{"float": float, "bool": bool, "pow": pow, "round": round, "sorted": sorted, "str": str, "set": list},
}
# Operations of what comes from elsewhere.
ELSEWHERE = frozenset({INPUT, "attribute", "item", "call", "method", "detach"})
# Methods that differentiate what they are called on, or given.
BACKWARD = frozenset({"backward", "manual_backward"})
BACKWARD_OF = "backward()"
# Methods of texts that compute.
TEXT = frozenset({"lower", "upper", "strip", "startswith", "endswith", "replace", "split", "partition", "removeprefix"})


class Calls:
    """What the evaluator makes of calls; `Evaluator` has the statements and expressions."""

    graph: Graph
    find: Callable[[str, str], Scope | None]
    frames: list[Frame]
    within: list[str]

    # Of evaluate.Evaluator
    body: Callable[..., Any]
    module: Callable[..., Scope]
    made: Callable[..., Any]
    store: Callable[..., None]
    left: int
    stores: list[Stored]
    operator: Callable[..., Any]
    truth: Callable[..., Any]
    assign: Callable[..., None]
    reachable: Callable[..., Any]
    restore: Callable[..., None]
    _instance_before: tuple[tuple[Kind, str], Thing, Any, Graph] | None = None

    def call(self, callee: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a call returns."""
        match callee:
            case Partial(function=inner, arguments=first, named=others):
                return self.call(inner, [*first, *arguments], {**others, **named})
            case Builtin():
                return callee.function(*arguments, **named)
            case Function():
                return self._followed(callee, arguments, named)
            case Kind():
                return self._built(callee, arguments, named)
            case Thing():
                for name in ("__call__", "forward"):
                    if (found := callee.kind.lookup(name)) is not None:
                        return self.call(self._bound(found, callee), arguments, named)
            case External(path=path):
                return self._external(path, arguments, named)
            case Node() if _is_of_objects(callee):
                return self._branchwise(callee, lambda one: self.call(one, arguments, named))
        return self.opaque("call", callee, *arguments, **named)

    def _branchwise(self, value: Any, of: Callable[[Any], Any]) -> Any:
        """Return what is made of the branches of nested choices, of each once."""
        known: dict[int, Any] = {}
        stack = [value]
        while stack:
            one = stack[-1]
            nested = isinstance(one, Node) and one.operation == CHOICE
            if id(one) not in known and nested and (open_ := [b for b in one.arguments[1:] if id(b) not in known]):
                stack.extend(open_)
                continue
            stack.pop()
            if id(one) not in known:
                condition, *branches = one.arguments if nested else (None,)
                known[id(one)] = (
                    self.graph.choice(condition, *(known[id(branch)] for branch in branches)) if nested else of(one)
                )
        return known[id(value)]

    def opaque(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Return the node of something that is not followed; within a context of a name it is another."""
        if self.within and what in ("call", "method"):
            named = {**named, "within": tuple(self.within)}
        return self.made(what, *map(self._described, arguments), **{k: self._described(v) for k, v in named.items()})

    def _described(self, value: Any) -> Any:
        if isinstance(value, Thing):
            return value.symbol or self.graph.node("object", value.kind.definition.name)
        if isinstance(value, Function | Kind | Partial | Builtin | External):
            return value.path if isinstance(value, External) else getattr(value, "name", type(value).__name__)
        return value

    def _followed(self, function: Function, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a function of the source returns; an opaque node beyond the depth, or in a recursion."""
        recursive = any(one.function and one.function.definition is function.definition for one in self.frames)
        if len(self.frames) >= DEPTH or recursive:
            return self.opaque("call", function, *arguments, **named)
        if function.receiver is not None:
            arguments = [function.receiver, *arguments]
        variables = self._filled(function, arguments, named)
        return self.body(function, variables)

    def _filled(self, function: Function, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a call by name; one that is not given and has no default is an input."""
        spec = function.definition.args
        names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        found = dict(zip(names, arguments, strict=False))
        if spec.vararg:
            found[spec.vararg.arg] = tuple(arguments[len(names) :])
        keyword_only = [one.arg for one in spec.kwonlyargs]
        known = {name: value for name, value in named.items() if name in (*names, *keyword_only)}
        if spec.kwarg:
            found[spec.kwarg.arg] = {name: value for name, value in named.items() if name not in known}
        found |= known
        defaults = defaults_of(spec)
        for name in (*names, *keyword_only):
            if name not in found:
                default = defaults.get(name)
                found[name] = self.graph.node(INPUT, name) if default is None else self._default(function, default)
        for name, value in found.items():
            if function.scope.file:
                self.graph.named(value, name)
                if isinstance(value, Node):
                    self.graph.given.setdefault((function.definition, name), {})[value] = None
        return found

    def entered(self, function: Function, owner: Kind | None = None) -> Any:
        """Return what a function returns that nothing is known of the call of: its parameters are inputs.

        `self` is an object of `owner`, with what its constructor sets.
        """
        spec = function.definition.args
        first = next((one.arg for one in (*spec.posonlyargs, *spec.args)), None)
        variables = {} if owner is None or first is None else {first: self._instance(owner, first)}
        return self.body(function, {**self._symbols(function), **variables})

    def _instance(self, kind: Kind, name: str) -> Thing:
        """Return an object of a class for one of its methods: the constructor is followed once for methods in a row."""
        if self._instance_before is None or self._instance_before[0] != (kind, name):
            thing = self._object(kind, self.graph.node(INPUT, name))
            self._instance_before = (kind, name), thing, self.reachable(thing), self.graph
        _, thing, content, graph = self._instance_before
        self.graph = graph.copy()
        self.restore(content)
        return thing

    def _symbols(self, function: Function) -> dict[str, Any]:
        """Return an input for each parameter; its default, if that is a constant, is noted in `graph.defaults`."""
        spec = function.definition.args
        defaults, variables = defaults_of(spec), dict[str, Any]()
        for one in filter(None, (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg)):
            node = variables[one.arg] = self.graph.node(INPUT, one.arg)
            if one.arg in defaults:
                value = self._default(function, defaults[one.arg])
                if is_constant(value):
                    self.graph.defaults[node] = value
                else:
                    variables[one.arg] = value
        return variables

    def _object(self, kind: Kind, symbol: Any) -> Thing:
        """Return an object of a class with what its constructor sets, whatever it is given."""
        thing = Thing(kind, {}, symbol)
        constructor = kind.lookup("__init__")
        if isinstance(constructor, Function):
            budget, self.left, stores = self.left, self.left // 4, len(self.stores)
            with suppress(TooLargeError):
                self.body(
                    constructor, {**self._symbols(constructor), next(iter(self._symbols(constructor)), ""): thing}
                )
            self.left = budget
            del self.stores[stores:]
        for name, value in list(thing.attributes.items()):
            # What a constructor is given, or gets from elsewhere, is told by the name that it keeps it under.
            if any(isinstance(one, Node) and one.operation in ELSEWHERE for one in branches_of(value)):
                del thing.attributes[name]
                default = _default_of(value, self.graph)
                if default is not None:
                    self.graph.defaults[self.attribute(thing, name)] = default
        return thing

    def _default(self, function: Function, default: ast.expr) -> Any:
        with self._inside(Frame(function.scope)):  # type: ignore[attr-defined]
            return self.value(default)  # type: ignore[attr-defined]

    # Objects

    def _built(self, kind: Kind, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        thing = Thing(kind)
        constructor = kind.lookup("__init__")
        if constructor is not None:
            self.call(self._bound(constructor, thing), arguments, named)
        else:
            fields = [
                one.target.id
                for one in kind.definition.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
            thing.attributes |= {**dict(zip(fields, arguments, strict=False)), **named}
        return thing

    def _bound(self, member: Any, thing: Any) -> Any:
        if isinstance(member, Function):
            return Function(member.definition, member.scope, member.owner, thing)
        if isinstance(member, Builtin) and member.name == "classmethod":
            return self._bound(member.function(), getattr(thing, "kind", thing))
        return member.function() if isinstance(member, Builtin) and member.name == "staticmethod" else member

    def attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute of a value."""
        match owner:
            case Thing():
                if name in owner.attributes:
                    return owner.attributes[name]
                member = owner.kind.lookup(name)
                if isinstance(member, Builtin) and member.name in ("property", "cached_property"):
                    return self.call(self._bound(member.function(), owner), (), {})
                if member is not None:
                    return self._bound(member, owner)
                return self.graph.node("attribute", owner.symbol or self._described(owner), name)
            case Kind():
                member = owner.lookup(name)
                return self.opaque("attribute", owner, name) if member is None else self._bound(member, owner)
            case Scope():
                return owner.variables.get(name, External(f"{owner.file}:{name}"))
            case External(path=path):
                return CONSTANTS[name] if path in MODULES and name in CONSTANTS else External(f"{path}.{name}")
            case dict() if name in owner:  # a dictionary that is read as an object, as some configurations are
                return owner[name]
            case Node() if _is_of_objects(owner):
                return self._branchwise(owner, lambda one: self.attribute(one, name))
        return 1 if is_count_of_processes(name) else self.graph.node("attribute", self._described(owner), name)

    def item(self, owner: Any, key: Any) -> Any:
        """Return an entry of a value."""
        if isinstance(owner, dict) and is_constant(key) and key in owner:
            return owner[key]
        if isinstance(owner, dict) and is_constant(key) and (rest := rest_of(owner)) is not None:
            return self.item(rest, key)
        if isinstance(owner, list | tuple | str | range):
            whole = isinstance(key, slice) and all(one is None or isinstance(one, int) for one in _ends(key))
            if whole or (isinstance(key, int) and not isinstance(key, bool)):
                with suppress(IndexError):
                    return owner[key]
        if isinstance(owner, Node) and owner.operation == "tuple" and isinstance(key, int):
            return self.item(owner.arguments[0], key)
        if isinstance(owner, Node) and owner.operation == "mapped" and not isinstance(key, slice):
            counted, index, value, kept = owner.arguments
            if not kept and isinstance(counted, Node) and counted.operation == "range" and len(counted.arguments) == 1:
                return self.graph.rewritten(value, lambda one: key if one is index else one)
        if isinstance(owner, dict) and isinstance(key, Node) and _is_table(owner):
            found: Any = self.graph.node("raises")
            for name, one in reversed(owner.items()):
                found = self.graph.choice(self.graph.node("==", key, name), one, found)
            return found
        if (one := _repeated(owner)) is not owner and not isinstance(key, slice):
            return one
        if _is_of_objects(owner):
            return self._branchwise(owner, lambda one: self.item(one, key))
        if isinstance(owner, Thing) and (getter := owner.kind.lookup("__getitem__")) is not None:
            return self.call(self._bound(getter, owner), (key,), {})
        return self.made("item", self._described(owner), key)

    # Methods

    def method(self, expression: ast.Attribute, owner: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a method returns; one that changes its owner changes the variable that holds it."""
        name = expression.attr
        if isinstance(owner, External):
            if owner.path == "super()":
                return self._of_base(name, arguments, named)
            return self._external(f"{owner.path}.{name}", arguments, named)
        if isinstance(owner, list) and name in ("append", "extend", "copy", "pop", "insert"):
            found = list(arguments[0]) if name == "extend" and isinstance(arguments[0], list | tuple) else arguments
            if name in ("append", "extend"):
                owner.extend(found)
                return None
            with suppress(IndexError, TypeError, ValueError):
                return getattr(owner, name)(*arguments) if all(map(is_constant, arguments)) else None
            return self.opaque("method", owner, name, *arguments)
        if isinstance(owner, dict):
            return self._of_dictionary(owner, name, arguments, named)
        if isinstance(owner, str) and name in TEXT and all(map(is_constant, arguments)):
            return getattr(owner, name)(*arguments)
        if not isinstance(owner, Node):
            return self.call(self.attribute(owner, name), arguments, named)
        if _is_of_objects(owner):
            copies: dict[int, Any] = {}

            def of(one: Any) -> Any:
                copies[id(one)] = fixed(one)
                return self.method(expression, copies[id(one)], arguments, named)

            found = self._branchwise(owner, of)
            if any(isinstance(one, list | dict) for one in copies.values()):  # which the method may have changed
                self.assign(stored(expression.value), self._branchwise(owner, lambda one: copies[id(one)]))
            return found
        return self._of_tensor(expression, owner, arguments, named)

    def _of_tensor(
        self, expression: ast.Attribute, owner: Node, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        name = expression.attr
        if name in BACKWARD:
            self.store(BACKWARD_OF, [owner, *arguments], expression.lineno)
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        operation = canonical(name.removesuffix("_")) or canonical(name)
        if name == "append":
            self.assign(stored(expression.value), self.graph.node("appended", owner, *map(fixed, arguments)))
            return None
        if name == "register_hook":  # its gradient is no longer what the formula says
            self.assign(stored(expression.value), self.opaque("method", owner, name, *arguments))
            return None
        if name == "get" and arguments:
            return self._entry_or(owner, *arguments)
        if owner.operation == "item" and name in ("set", "add") and _is_at(owner.arguments[0]):
            (holder, _), key = owner.arguments[0].arguments, owner.arguments[1]
            value = arguments[0] if name == "set" else self.operator("+", self.item(holder, key), arguments[0])
            return self.made("written", holder, key, value)
        gathers = "index" in named or any(isinstance(one, Node) for one in arguments[1:])
        if not gathers and (given := _given_back(name, arguments or [owner])) is not None:
            return given
        if operation is None:
            return self.opaque("method", owner, name, *arguments, **named)
        first = (arguments[0], owner, *arguments[1:]) if operation == "where" and arguments else (owner, *arguments)
        if name == "new_tensor":
            first = tuple(arguments)
        result = self.operation(operation, first, named)
        if in_place:
            self.assign(stored(expression.value), result)
        return result

    def _entry_or(self, owner: Node, key: Any, default: Any = None) -> Any:
        """Return an entry of a mapping that is not known; the default if that is something and the entry is missing."""
        found = self.item(owner, key)
        return found if default is None else self.graph.choice(self.operator("in", key, owner), found, default)

    def operation(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the node of an operation, under torch's names of its arguments."""
        if name == "same":
            return arguments[0]
        if name in ("max", "min") and "axis" in named:  # NumPy's, without the places
            name = f"a{name}"
        if name in ("maximum", "minimum") and len(arguments) == 2 and any(map(_is_number, arguments)):
            first, limit = sorted(arguments, key=_is_number)
            return self.made("clamp", first, **{"min" if name == "maximum" else "max": limit})
        if name in ("clamp_min", "clamp_max"):
            side = name.removeprefix("clamp_")
            limit = arguments[1] if len(arguments) > 1 else named.get(side)
            return self.made("clamp", arguments[0], **{side: limit})
        if _is_of_truths(named.get("dtype")):
            made = self.operation(name, arguments, {key: value for key, value in named.items() if key != "dtype"})
            return self.made("!=", made, 0)
        named = {NAMED.get(key, key): value for key, value in named.items() if key not in STORED}
        leading = [named.pop(key) for key in LEADING if key in named]
        return self.made(name, *arguments, *leading, **named)

    def _of_dictionary(self, owner: dict, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        match name:
            case "get" | "pop" | "setdefault":
                key = arguments[0]
                if not is_constant(key):
                    return self.opaque("method", owner, name, *arguments)
                default = arguments[1] if len(arguments) > 1 else None
                if key not in owner and (rest := rest_of(owner)) is not None:
                    return self.item(rest, key)
                return owner.setdefault(key, default) if name == "setdefault" else owner.get(key, default)
            case "update":
                for given in (*arguments, named):
                    merge(owner, given, self.graph)
                return None
            case "items" | "keys" | "values" if rest_of(owner) is not None:
                return self.opaque("method", owner, name)
            case "items":
                return list(owner.items())
            case "keys":
                return list(owner)
            case "values":
                return list(owner.values())
            case "copy":
                return owner.copy()
        return self.opaque("method", owner, name, *arguments, **named)

    def _of_base(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a method of the base of the present method's class returns."""
        method = next((one.function for one in reversed(self.frames) if one.function and one.function.owner), None)
        member = method.owner.of_bases(name) if method is not None and method.owner is not None else None
        if member is None:
            return self.opaque("call", f"super().{name}", *arguments, **named)
        return self.call(self._bound(member, method.receiver), arguments, named)  # type: ignore[union-attr]

    # Outside

    def _external(self, path: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if path in ("functools.partial", "partial") and arguments:
            return Partial(arguments[0], tuple(arguments[1:]), dict(named))
        if (known := self._of_library(path)) is not None:
            return self.call(known, arguments, named)
        package, _, name = path.rpartition(".")
        if (given := _given_back(name, arguments)) is not None and operation_of(path) is None:
            return given
        if name in GRADIENTS and package and arguments and isinstance(arguments[0], Function | Partial):
            self._differentiated(arguments[0])
            return Builtin(name, lambda *given, **others: self.opaque("call", path, *given, **others))
        operation = operation_of(path)
        if operation is not None and (arguments or any(NAMED.get(key, key) in LEADING for key in named)):
            return self.operation(operation, arguments, named)
        made = module_of(path, arguments, named)
        return self.opaque("call", path, *arguments, **named) if made is None else made

    def _differentiated(self, function: Any) -> None:
        """Remember what a function returns that is differentiated, with nothing known of its call."""
        given: Mapping[str, Any] = {}
        inner = function
        while isinstance(inner, Partial):
            given, inner = {**inner.named, **given}, inner.function
        if not isinstance(inner, Function) or isinstance(inner.definition, ast.Lambda):
            return
        variables = {name: one for name, one in self._symbols(inner).items() if name not in given}
        if inner.receiver is not None:
            variables.pop(next(iter(variables), ""), None)
        found = self.call(inner, (), {**variables, **given})
        self.store(BACKWARD_OF, found[0] if isinstance(found, tuple) and found else found, inner.definition.lineno)

    def _of_library(self, path: str) -> Any:
        """Return what the library says of a function or class of another package; None if it says nothing."""
        names = path.split(".")
        first, last = names[0], names[-1]
        found = (f"{names[-2]}_{last}" if len(names) > 1 else "", f"{PACKAGES.get(first, first)}_{last}")
        known = [name for name in found if name in LIBRARY]
        return self.library.variables[known[0]] if known else None

    @cached_property
    def library(self) -> Scope:
        """The variables of the library."""
        before, self.frames = self.frames, []
        scope = self.module("", LIBRARY_SOURCE)
        self.frames = before
        scope.variables["leaf_by_leaf"] = Builtin(
            "leaf_by_leaf", lambda function, values: mapped(values, lambda node: self.call(function, (node,), {}))
        )
        scope.variables["passes"] = Builtin("passes", self._passes)
        return scope

    def _passes(self, values: Any, length: Any) -> Any:
        first = next(nodes_in(values), None)
        return length if first is None else self.graph.node("len", first)

    def imported(self, file: str, path: str) -> Any:
        """Return a module by its dotted name, as a file imports it."""
        scope = self.find(file, path) if file else None
        return External(path) if scope is None else scope

    def imported_name(self, file: str, module: str, name: str) -> Any:
        """Return what a file imports from a module."""
        scope = self.find(file, module)
        if scope is not None and name in scope.variables:
            return scope.variables[name]
        inner = self.find(file, f"{module.rstrip('.')}.{name}" if module.rstrip(".") else f"{module}{name}")
        return inner if inner is not None else External(f"{module}.{name}")

    def builtin(self, name: str) -> Any:
        """Return a built-in of Python; a name of which nothing is known is an input."""
        if name == "super":
            return Builtin("super", lambda *_: External("super()"))
        if name in ON_NODES or name in ON_CONSTANTS:
            return Builtin(name, lambda *arguments, **named: self._on_values(name, arguments, named))
        if name in ("getattr", "isinstance", "hasattr", "print"):
            return Builtin(name, lambda *arguments, **named: self._about(name, arguments))
        return self.graph.node(INPUT, name) if not name[:1].isupper() else External(name)

    def _on_values(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        first = arguments[0] if arguments else ()
        known = isinstance(first, list | tuple | dict | range)
        if name == "sum" and known and not isinstance(first, dict):
            total: Any = arguments[1] if len(arguments) > 1 else 0
            if any(isinstance(one, Node) and _may_be_absent(one) for one in first):
                return self.made("added up", list(first), total)
            for one in first:
                total = self.operator("+", total, one)
            return total
        if name == "zip" and all(isinstance(one, list | tuple | range) for one in arguments):
            return [tuple(one) for one in zip(*arguments, strict=False)]
        if name == "enumerate" and known:
            return [tuple(one) for one in enumerate(first, *arguments[1:], **named)]
        if name == "reversed" and known:
            return list(first)[::-1]
        if name in ("len", "list", "tuple") and known:
            return ON_CONSTANTS[name](first)
        if name in ON_CONSTANTS and all(map(is_constant, arguments)):
            with suppress(TypeError, ValueError):
                return ON_CONSTANTS[name](*arguments)
        return self.made(ON_NODES.get(name, name), *arguments, **named)

    def _about(self, name: str, arguments: Sequence[Any]) -> Any:
        if name == "getattr":
            owner, attribute, *default = arguments
            if not isinstance(attribute, str):
                return self.opaque("call", "getattr", *arguments)
            found = self.attribute(owner, attribute)
            has = self._about("hasattr", (owner, attribute)) if default else True
            return found if has is True else self.graph.choice(has, found, default[0])
        if name == "hasattr" and isinstance(arguments[0], Thing) and isinstance(arguments[1], str):
            thing, attribute = arguments
            if attribute in thing.attributes or thing.kind.lookup(attribute) is not None:
                return True
        if name == "isinstance":
            return self._is_instance(*arguments)
        return self.opaque("call", name, *arguments) if name != "print" else None

    def _is_instance(self, value: Any, kind: Any) -> Any:
        """Return whether a value is of a type; a condition, where nothing says it."""
        name = (kind.path if isinstance(kind, External) else getattr(kind, "name", "")).rpartition(".")[2]
        if isinstance(value, Node) and value.operation == CHOICE:
            return self._branchwise(value, lambda one: self._is_instance(one, kind))
        if name == "Tensor" and _is_tensor(value):
            return True
        if is_constant(value) and name in TYPES:
            return isinstance(value, TYPES[name])
        return self.opaque("call", "isinstance", value, kind)


def _is_of_truths(dtype: Any) -> bool:
    """Return True for the type of truths, of Python or a library."""
    name = dtype.path if isinstance(dtype, External) else getattr(dtype, "name", "")
    return name.rpartition(".")[2] in ("bool", "bool_")


def _is_tensor(value: Any) -> bool:
    """Return True for what a function of torch returns, and for what is computed with it."""
    if not isinstance(value, Node):
        return False
    return value.operation in FUNCTIONS or (value.operation in OPERATORS and any(map(_is_tensor, value.arguments)))


def _ends(key: slice) -> tuple[Any, Any, Any]:
    return key.start, key.stop, key.step


def branches_of(value: Any) -> list[Any]:
    """Return what a value is in one branch or another, each once."""
    found: dict[int, Any] = {id(value): value}
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, Node) and one.operation == CHOICE:
            stack += [branch for branch in one.arguments[1:] if id(branch) not in found]
            found |= {id(branch): branch for branch in one.arguments[1:]}
    return [one for one in found.values() if not (isinstance(one, Node) and one.operation == CHOICE)]


def merge(owner: dict[Any, Any], given: Any, graph: Graph) -> None:
    """Add the entries of another dictionary; one that is not known stands for whatever else there is."""
    if isinstance(given, dict):
        owner.update(given)
    elif isinstance(given, Node):
        owner[graph.node("rest", given)] = given


def rest_of(owner: dict[Any, Any]) -> Node | None:
    """Return the dictionary whose entries are in another, too, and not known; None if there is none."""
    keys = (one for one in reversed(owner) if isinstance(one, Node) and one.operation == "rest")
    return next((owner[one] for one in keys), None)


def _is_of_objects(value: Any) -> bool:
    """Return True for a choice of which some branches are objects, functions or containers."""
    chosen = isinstance(value, Node) and value.operation == CHOICE
    return chosen and any(_is_object(one) or _repeated(one) is not one for one in branches_of(value))


def _is_object(value: Any) -> bool:
    return not isinstance(value, Node) and not is_constant(value)


def _repeated(value: Any) -> Any:
    """Return the one entry of a list that repeats it an unknown number of times; other values as they are."""
    if isinstance(value, Node) and value.operation == "*":
        for one in value.arguments:
            if isinstance(one, list | tuple) and len(one) == 1:
                return one[0]
    return value


def _given_back(name: str, arguments: Sequence[Any]) -> Any:
    """Return what a function of any package gives by its name, as there is one process; None for others."""
    if is_count_of_processes(name):
        return 1
    first = arguments[0] if arguments else None
    return first if name in CONVERSIONS or (name in COLLECTIVE and isinstance(first, Node)) else None


def _is_table(value: dict[Any, Any]) -> bool:
    """Return True for functions, classes or constants by the words of an option."""
    return bool(value) and all(isinstance(name, str) and not isinstance(one, Node) for name, one in value.items())


def _default_of(value: Any, graph: Graph) -> Any:
    """Return the constant that a value is if nobody says another one: a parameter's, or that of `getattr`."""
    if isinstance(value, Node) and value.operation == CHOICE:
        return next((one for one in value.arguments[1:] if is_constant(one)), None)
    return graph.defaults.get(value)


def _is_at(node: Any) -> bool:
    """Return True for the places of an array of JAX: `x.at`."""
    return isinstance(node, Node) and node.operation == "attribute" and node.arguments[1] == "at"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _may_be_absent(node: Node) -> bool:
    absent = [one for one in node.arguments[1:] if isinstance(one, Node) and one.arguments == (ABSENT,)]
    return node.operation == CHOICE and bool(absent)


def defaults_of(parameters: ast.arguments) -> dict[str, ast.expr]:
    """Return the default of each parameter that has one."""
    names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    found = dict(zip(reversed(names), reversed(parameters.defaults), strict=False))
    pairs = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    return found | {one.arg: default for one, default in pairs if default is not None}


def stored(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
        return ast.copy_location(type(target)(**{**dict(ast.iter_fields(target)), "ctx": ast.Store()}), target)
    return target
