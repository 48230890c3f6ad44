"""Imports of a lifted term that is more than arithmetic from the tree that it comes from."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

from kltest.loss.importing import package_of
from kltest.scanning.arithmetic import MODULES
from kltest.scanning.sources import Source
from kltest.scanning.tree import Tree


def imported(tree: Tree, source: Source, module: ast.Module) -> str:
    """Return statements that make the tree importable and import what lifted functions name of their files.

    Args:
        tree: the tree, in which helpers are looked up.
        source: the file of the term.
        module: the lifted functions.
    """
    lifted = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    folders: dict[str, None] = {str(Path.cwd()): None}
    lines: dict[str, None] = {}
    for function in module.body:
        found = [each.source for each in tree.called(getattr(function, "name", ""), source)]
        home = found[0] if found else source
        folder, name = package_of(home.path.resolve())
        folders[str(folder)] = None
        lines |= dict.fromkeys(_imports(home, name, _free(function) - lifted))
    return "\n".join([f"import sys\nsys.path += {list(folders)!r}", *lines, ""])


def _free(function: ast.AST) -> set[str]:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return {node.id for node in names} - bound - {*MODULES, *dir(builtins)}


def _imports(source: Source, module: str, names: set[str]) -> Iterator[str]:
    """Yield imports of names that a file, called `module`, imports or binds itself."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                if name not in names:
                    continue
                names = names - {name}
                if isinstance(node, ast.Import):
                    yield f"import {alias.name} as {alias.asname}" if alias.asname else f"import {alias.name}"
                else:
                    package = module.split(".")[: -node.level] if node.level else []
                    whole = ".".join([*package, *filter(None, [node.module])])
                    yield f"from {whole} import {alias.name} as {name}"
    for node in source.tree.body:
        bound = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for name in sorted(names & (bound | {getattr(node, "name", "")})):
            yield f"from {module} import {name}"
