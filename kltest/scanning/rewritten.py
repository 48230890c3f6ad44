"""One way to write a thing: files are read with aliases of modules, match statements, named lambdas and partials
written out, so that nothing after has to know them."""

import ast
import re
from collections.abc import Iterable, Iterator

from kltest.scanning.arithmetic import MODULES
from kltest.scanning.sources import Source
from kltest.scanning.syntax import Named, chain, copied
from kltest.scanning.unpacked import MADE, unpack

_SHORT = {module: name for name, module in reversed(MODULES.items())}
_FOREIGN = re.compile(r"^(torch|jax|numpy|math)(\.|$)")
_MARKS = re.compile(
    r"^\s*(from|import) (torch|jax|numpy|math)\b.* (import|as) |^\s*match |lambda|partial\(|rel_entr|xlogy|optax"
    r"|\bfor \w+ in [(\[]|\bmap\(",
    re.M,
)
_WRITTEN_OUT = frozenset({"rel_entr", "xlogy"})
_CALLED = {"partial", "kl_divergence", *_WRITTEN_OUT}
_SIDES = re.compile(r"log_?p|logit|softmax|prob|kl", re.I)


def rewrite(source: Source) -> None:
    """Write a file's aliases, match statements, lambdas and partials out, if it speaks of probabilities at all."""
    if not _SIDES.search(source.text) or not (_MARKS.search(source.text) or MADE.search(source.text)):
        return
    nodes = list(ast.walk(source.tree))
    unpack(nodes, source.text, _SIDES)
    names = dict(_aliases(nodes))
    assigned = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    assigned |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    functions = {n.name: n for n in nodes if isinstance(n, ast.FunctionDef)}
    names = {name: meant for name, meant in names.items() if name not in assigned and name not in functions}
    if any(
        (isinstance(n, ast.Name) and n.id in names)
        or isinstance(n, ast.Match | ast.GeneratorExp | ast.ListComp)
        or (isinstance(n, ast.Assign) and isinstance(n.value, ast.Lambda | ast.Dict))
        or (isinstance(n, ast.Call) and getattr(n.func, "attr", getattr(n.func, "id", "")) in _CALLED)
        for n in nodes
    ):
        _Rewrite(names, functions, dict(_kept_partials(nodes))).visit(source.tree)
        ast.fix_missing_locations(source.tree)


def _aliases(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the names that a file gives to modules of arithmetic, and to what is in them, as lifted code writes it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            given = [(each.asname, each.name) for each in node.names if each.asname]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            given = [(each.asname or each.name, f"{node.module}.{each.name}") for each in node.names]
        else:
            continue
        for name, full in given:
            if _FOREIGN.match(full):
                module, _, last = full.rpartition(".")
                meant = _SHORT.get(full) or (f"{_SHORT.get(module, module)}.{last}" if module else full)
                if meant != name:
                    yield name, meant


def _kept_partials(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    """Yield what is kept in self and is a partial."""
    for node in nodes:
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self"), name)], ast.Call(called, [_, *_]) as call):
                if chain(called).rsplit(".", 1)[-1] == "partial":
                    yield name, call


class _Rewrite(ast.NodeTransformer):
    def __init__(self, names: dict[str, str], functions: dict[str, ast.FunctionDef], kept: dict[str, ast.Call]) -> None:
        self.names, self.functions, self.kept = names, functions, kept

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(ast.Name("self"), name) if name in self.kept:
                first, *given = copied(self.kept[name].args)
                named = {each.arg for each in node.keywords}
                kept = [copied(each) for each in self.kept[name].keywords if each.arg not in named]
                return ast.copy_location(ast.Call(first, [*given, *node.args], [*node.keywords, *kept]), node)
        module, _, called = chain(node.func).rpartition(".")
        if called == "kl_divergence" and module in ("optax", "optax.losses") and len(node.args) == 2:
            text = ast.unparse(node.args[1])
            made = f"({text} * (jnp.log({text}) - {ast.unparse(node.args[0])})).sum(-1)"
            return _placed(ast.parse(made, mode="eval").body, node)
        if called not in _WRITTEN_OUT or len(node.args) != 2 or called in self.functions:
            return node
        p, q = node.args  # rel_entr(p, q) is p · (log p − log q), and xlogy(p, q) is p · log q
        logs = [ast.Call(ast.Attribute(copied(each), "log", ast.Load()), [], []) for each in (p, q)]
        other = ast.BinOp(logs[0], ast.Sub(), logs[1]) if called == "rel_entr" else logs[1]
        return _placed(ast.BinOp(p, ast.Mult(), other), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        meant = self.names.get(node.id)
        return node if meant is None else ast.copy_location(_placed(ast.parse(meant, mode="eval").body, node), node)

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        chosen: list[ast.stmt] = []
        for case in reversed(node.cases):
            test = _test(node.subject, case.pattern)
            if test is None:
                return node
            if case.guard is not None:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            plain = isinstance(test, ast.Constant)
            chosen = case.body if plain else [ast.copy_location(ast.If(test, case.body, chosen), case.body[0])]
        return chosen[0] if len(chosen) == 1 else ast.copy_location(ast.If(ast.Constant(True), chosen, []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        made: list[ast.AST] = []
        if isinstance(node.value, ast.Dict):
            for number, value in enumerate(node.value.values):
                if isinstance(value, ast.Lambda):
                    made.append(_function(f"lambda_{value.lineno}_{value.col_offset}", value.args, value.body, node))
                    node.value.values[number] = ast.copy_location(ast.Name(made[-1].name, ast.Load()), value)  # type: ignore[attr-defined]
        elif isinstance(node.targets[0], ast.Tuple) and (each := _each(node.value)):
            node.value = ast.copy_location(ast.Tuple(each, ast.Load()), node.value)
        elif len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if isinstance(node.value, ast.Lambda):
                return _function(name, node.value.args, node.value.body, node)
            if isinstance(node.value, ast.Call) and chain(node.value.func).rsplit(".", 1)[-1] == "partial":
                return self._partial(name, node.value, node)
        return [*made, node]

    def _partial(self, name: str, call: ast.Call, node: ast.Assign) -> ast.AST:
        """Return `def name(…)` for a partial of a function of the same file that takes its arguments by name."""
        function = self.functions.get(getattr(call.args[0], "id", "") if call.args else "")
        if function is None or function.args.vararg or function.args.kwonlyargs or function.name == name:
            return node
        given = {each.arg for each in call.keywords}
        free = [each for each in function.args.args[len(call.args) - 1 :] if each.arg not in given]
        parameters = copied(function.args)
        parameters.args, parameters.defaults = [ast.arg(each.arg) for each in free], []
        values = [*call.args[1:], *(ast.Name(each.arg, ast.Load()) for each in free)]
        if [each.arg for each in function.args.args[: len(values)]][len(call.args) - 1 :] != [e.arg for e in free]:
            return node
        body = ast.Call(ast.Name(function.name, ast.Load()), values, call.keywords)
        return _function(name, parameters, body, node)


def _each(value: ast.expr) -> list[ast.expr]:
    """Return what `tuple(f(x) for x in (a, b))` and `map(f, (a, b))` give, one by one."""
    match value:
        case ast.Call(ast.Name("tuple" | "list"), [inner]):
            return _each(inner)
        case ast.Call(ast.Name("map"), [called, ast.Tuple(given) | ast.List(given)]):
            return [_placed(ast.Call(copied(called), [each], []), each) for each in given]
        case ast.GeneratorExp(
            made, [ast.comprehension(ast.Name(name), ast.Tuple(given) | ast.List(given), [])]
        ) | ast.ListComp(made, [ast.comprehension(ast.Name(name), ast.Tuple(given) | ast.List(given), [])]):
            return [Named({name: each}).visit(copied(made)) for each in given]
    return []


def _test(subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        return ast.Constant(True)
    cases = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    values = [case.value for case in cases if isinstance(case, ast.MatchValue)]
    if len(values) < len(cases):
        return None
    if len(values) == 1:
        return ast.Compare(subject, [ast.Eq()], values)
    return ast.Compare(subject, [ast.In()], [ast.Tuple(values, ast.Load())])


def _placed(made: ast.expr, node: ast.expr) -> ast.expr:
    for inner in ast.walk(made):
        if isinstance(inner, ast.expr):
            ast.copy_location(inner, node)
    return made


def _function(name: str, parameters: ast.arguments, body: ast.expr, node: ast.stmt) -> ast.FunctionDef:
    returned = ast.copy_location(ast.Return(body), body if hasattr(body, "lineno") else node)
    return ast.copy_location(ast.FunctionDef(name, parameters, [returned], []), node)
