"""Items of a function's own dictionaries, and of objects made of named values, under names of their own."""

import ast
import re
from collections import Counter
from collections.abc import Iterable

from kltest.scanning.syntax import FUNCTIONS, FunctionNode, chain

MADE = re.compile(r"\w = (\{|dict\(|([\w.]+\.)?[A-Z]\w*\()")
"""The beginning of an assignment that may make such a dictionary or object."""


def unpack(nodes: Iterable[ast.AST], text: str, about: re.Pattern[str]) -> None:
    """Write `parts["kl"] = x` and `parts = Parts(kl=x)` as `parts_kl = x` besides, and read them back as `parts_kl`, in
    each function that binds `parts` once and whose text is about something."""
    lines = text.splitlines()
    for node in nodes:
        if not isinstance(node, FUNCTIONS):
            continue
        own = "\n".join(lines[node.lineno : node.end_lineno])
        if about.search(own) and MADE.search(own) and (kept := _kept(node)):
            _Unpack(kept).visit(node)
            ast.fix_missing_locations(node)


def _kept(function: FunctionNode) -> set[tuple[str, str]]:
    """Return the names and keys that a function both keeps and reads."""
    inner = list(ast.walk(function))
    bound = Counter(n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    made = {
        n.targets[0].id: items
        for n in inner
        if isinstance(n, ast.Assign)
        and isinstance(n.targets[0], ast.Name)
        and bound[n.targets[0].id] == 1
        and (items := _items(n.value)) is not None
    }
    if not made:
        return set()
    places = [n for n in inner if isinstance(n, ast.Subscript | ast.Attribute)]
    spots = [(key, n) for n in places if (key := _key(n)) and key[0] in made]
    kept = {(name, key) for name, items in made.items() for key in items}
    kept |= {key for key, node in spots if isinstance(node.ctx, ast.Store)}
    read = {key: node.lineno for key, node in spots if isinstance(node.ctx, ast.Load)}
    # Whoever is handed all of it may change it.
    handed = {
        (each.id, n.lineno) for n in inner if isinstance(n, ast.Call) for each in n.args if isinstance(each, ast.Name)
    }
    return {key for key in kept & read.keys() if not any(n == key[0] and line < read[key] for n, line in handed)}


def _items(value: ast.expr) -> dict[str, ast.expr] | None:
    """Return the values of a dictionary, or of an object made of named values, by their names."""
    if isinstance(value, ast.Dict):
        keys = [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, value.values, strict=True)) if len(keys) == len(value.keys) else None
    if isinstance(value, ast.Call) and not value.args and all(each.arg for each in value.keywords):
        called = chain(value.func).rsplit(".", 1)[-1]
        return {str(e.arg): e.value for e in value.keywords} if called == "dict" or called[:1].isupper() else None
    return None


def _key(node: ast.AST) -> tuple[str, str] | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id, node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
        return (node.value.id, node.slice.value) if isinstance(node.slice.value, str) else None
    return None


class _Unpack(ast.NodeTransformer):
    def __init__(self, kept: set[tuple[str, str]]) -> None:
        self.kept = kept

    def _name(self, key: tuple[str, str], context: ast.expr_context) -> ast.Name:
        return ast.Name(re.sub(r"\W", "_", "_".join(key)), context)

    def _read(self, node: ast.Subscript | ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        key = _key(node)
        known = key in self.kept and isinstance(node.ctx, ast.Load)
        return ast.copy_location(self._name(key, ast.Load()), node) if key and known else node

    visit_Subscript = visit_Attribute = _read

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        target, before = node.targets[0], []
        if (key := _key(target)) in self.kept and key:
            before = [ast.copy_location(ast.Assign([self._name(key, ast.Store())], node.value), node)]
            node.value = ast.copy_location(self._name(key, ast.Load()), node.value)
        for name, value in (_items(node.value) or {}).items():
            if (key := (getattr(target, "id", ""), name)) in self.kept:
                before.append(ast.copy_location(ast.Assign([self._name(key, ast.Store())], value), value))
        return [*before, node]

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if (key := _key(node.target)) in self.kept and key:
            node.target = ast.copy_location(self._name(key, ast.Store()), node.target)
        return node
