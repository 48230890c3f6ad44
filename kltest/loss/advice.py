"""Propose how to fill parameters that nothing fills, from what the body of a loss reads: arguments, or by a shim."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from kltest.loss.callables import definition_of
from kltest.names import field_named, suggested_field

_PACKED = re.compile(r"(cu|max)_?seq_?lens?\w*")
_MODEL_NAME = re.compile(r"(\w+_)?model")

Chain = tuple[str, ...]


def advice(function: Callable[..., Any], missing: Iterable[str]) -> str:
    """Return sentences that say how to fill `missing`; "" if the body of the function does not tell."""
    tree = definition_of(function)
    if tree is None:
        return ""
    missing, chains = list(missing), _chains(tree)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    packed = any(_PACKED.fullmatch(each) for each in missing)
    if packed or any(each in called or _MODEL_NAME.fullmatch(each) for each in missing):
        return (
            f"It wants {'sequences without padding' if packed else 'a model'}: put a shim into its file, a function of "
            "rollout fields that makes what it wants and calls it, and grade that. The guide Your own loss "
            "(docs/guides/your-own-loss.md) has one to copy."
        )
    arguments = [text for each in missing for text in _arguments(each, chains)]
    return f"Its body reads what these fill: {' '.join(arguments)}." if arguments else ""


def _arguments(parameter: str, chains: set[Chain]) -> Iterator[str]:
    """Yield `--arg` options for all that is read of a parameter; "@rollout" where nothing but fields is read."""
    mine = {chain[1:] for chain in chains if chain[0] == parameter and chain[1:]}
    if all(hasattr(Tensor, chain[-1]) for chain in mine):  # a tensor itself
        return
    leaves = {chain for chain in mine if not any(other != chain and other[: len(chain)] == chain for other in mine)}
    for head in sorted({chain[:-1] for chain in leaves}):
        last = sorted(chain[-1] for chain in leaves if chain[:-1] == head)
        path = ".".join((parameter, *head))
        if all(map(field_named, last)):
            yield f"--arg {path}=@rollout"
            continue
        for each in last:
            field = suggested_field(each)
            yield f"--arg {path}.{each}=" + (f"@{field}" if field else "VALUE")


def _chains(tree: ast.AST) -> set[Chain]:
    """Return what is read, as names and keys from a variable on: `data.batch["mask"].sum()` is (data, batch, mask)."""
    aliases: dict[str, Chain] = {}

    def chain(node: ast.AST) -> Chain | None:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, (node.id,))
        key: Any = None
        if isinstance(node, ast.Subscript):
            inner, key = node.value, getattr(node.slice, "value", None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner = node.func.value
            key = getattr(node.args[0], "value", None) if node.func.attr == "get" and node.args else None
        elif isinstance(node, ast.Attribute):
            inner, key = node.value, node.attr
        else:
            return None
        found = chain(inner)
        if found is None or not isinstance(key, str) or field_named(found[-1]):
            return found
        return (*found, key)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found = chain(node.value)
            if found is not None and len(found) > 1:
                aliases[node.targets[0].id] = found
    methods = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {found for node in ast.walk(tree) if id(node) not in methods and (found := chain(node)) is not None}
