"""Reading a module's statements without running them: which names each one binds, changes and reads."""

import __future__

import ast
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from kltest.loss.frames import failure

_FLAGS = __future__.annotations.compiler_flag
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
_BINDS = ("STORE_NAME", "STORE_GLOBAL")
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; FailedError if it is no Python."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
        compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:
        raise failure(f"reading {path.name}", error, str(path)) from error
    return tree


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


def names_bound(statement: ast.stmt, path: Path) -> Iterator[str]:
    """Yield the module-level names that a statement binds, or changes in place."""
    if isinstance(statement, DEFINITIONS):
        yield statement.name
        return
    for instruction in dis.get_instructions(compiled(statement, path)):
        if instruction.opname in _BINDS:
            yield instruction.argval
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _root(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # `TABLE.update(…)` changes TABLE; `print(…)` changes nothing.
            yield from _root(getattr(node.value.func, "value", None))


def _root(node: ast.AST | None) -> Iterator[str]:
    """Yield `TABLE` of `TABLE[key].attribute`; nothing for any other expression."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
