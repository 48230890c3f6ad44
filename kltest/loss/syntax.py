"""Reading a module's statements without running them: which names each one binds, changes and reads."""

import __future__

import ast
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from kltest.loss.frames import failure

_FLAGS = __future__.annotations.compiler_flag
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; FailedError if it is no Python."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, OSError) as error:
        raise failure(f"reading {path.name}", error, str(path)) from error


def compiled(statement: ast.stmt, path: Path) -> CodeType:
    """Return one statement as code of the file that it came from, its annotations left as text."""
    tree = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
    return compile(tree, str(path), "exec", flags=_FLAGS, dont_inherit=True)


def names_read(statement: ast.stmt, path: Path) -> list[str]:
    """Return the module-level names that a statement reads when it runs or, for a function, when it is called."""
    found: dict[str, None] = {}
    codes = [compiled(statement, path)]
    while codes:
        code = codes.pop()
        for instruction in dis.get_instructions(code):
            if instruction.opname in _READS:
                found[instruction.argval] = None
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return list(found)


def names_bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the module-level names that a statement binds, or changes in place."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        yield statement.name
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names if alias.name != "*")
        return
    if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return
    if isinstance(statement, ast.Expr):
        # `TABLE.update(…)` changes TABLE.
        call = statement.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            yield from _root(call.func)
        return
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield from names_bound(node)
        elif isinstance(node, ast.ExceptHandler):
            for handled in node.body:
                yield from names_bound(handled)
        elif isinstance(node, ast.expr | ast.withitem):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name | ast.Subscript | ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield from _root(inner)


def _root(node: ast.AST) -> Iterator[str]:
    """Yield `TABLE` of `TABLE[key].attribute`; nothing for any other expression."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def is_plain(node: ast.stmt) -> bool:
    """Return True for the parts of a class's body that run alone: methods and constants."""
    constant = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, _FUNCTIONS)
