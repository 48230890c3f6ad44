"""Propose how to fill parameters that nothing fills, from what the body of a loss reads: arguments, or a shim."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from kltest.loss.callables import inner_of
from kltest.loss.suggesting import role_of, suggested_field
from kltest.rollout import FIELDS, field_named

_PACKED = re.compile(r"cu_?seq_?lens?\w*")
_LONGEST = re.compile(r"max_?seq_?len\w*")
_MODEL_NAME = re.compile(r"(\w+_)?model")
_IDS = re.compile(r"(input_?)?ids")
_OF_MODELS = {
    "attention_mask": "seen",
    "labels": "ids.where(seen != 0, -100)",
    "prompt_ids": "ids[:, :1]",
    "prompt_mask": "seen[:, :1]",
    "prompt_attention_mask": "seen[:, :1]",
}
_MODEL = """\
from types import SimpleNamespace

import torch


def shim({fields}):
    ids = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], dim=1)  # one prompt token stands in front
    seen = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)

    def model_of(logits):  # calls return the rollout's own next-token logits
        return lambda *args, **kwargs: SimpleNamespace(logits=torch.cat([logits, logits[:, -1:]], dim=1))

    return {call}
"""
_PACK = """\
import torch


def shim({fields}):
    live = mask != 0
    ends = live.sum(-1).cumsum(0)
    return {call}
"""

Chain = tuple[str, ...]


def advice(name: str, function: Callable[..., Any], missing: Iterable[str], parameters: list[inspect.Parameter]) -> str:
    """Return sentences that say how to fill `missing`; "" if the body of the function does not tell."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner_of(function))))
    except (OSError, TypeError, SyntaxError):  # no source, or not all of it
        return ""
    missing, chains = list(missing), _chains(tree)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    models = {each for each in missing if each in called or _MODEL_NAME.fullmatch(each)}
    packed = any(_PACKED.fullmatch(each) for each in missing)
    if packed or models:
        fields, call = _shim_call(name, parameters, models, chains, packed)
        text = (_PACK if packed else _MODEL).format(fields=", ".join(fields), call=call)
        return "Put a shim into its file and grade that, for instance:\n\n" + textwrap.indent(text, "    ")
    arguments = [text for each in missing for text in _arguments(each, chains)]
    found = [f"Its body reads what these fill: {' '.join(arguments)}."] if arguments else []
    for each in missing:
        if words := _compared(each, tree):
            found.append(f"Its body compares {each} with {', '.join(words)}: --arg {each}={words[0]}, for instance.")
    return " ".join(found)


def _compared(parameter: str, tree: ast.AST) -> list[str]:
    """Return the words that a body compares a parameter with, or looks up by it: names of settings."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        beside: list[ast.AST] = []
        if isinstance(node, ast.Compare) and _is(node.left, parameter):
            beside = list(node.comparators)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) and _is(node.comparators[0], parameter):
            beside = [node.left]
        elif isinstance(node, ast.Match) and _is(node.subject, parameter):
            beside = [case.pattern for case in node.cases]
        elif isinstance(node, ast.Subscript) and _is(node.slice, parameter) and isinstance(node.value, ast.Dict):
            beside = [key for key in node.value.keys if key is not None]
        constants = (inner for each in beside for inner in ast.walk(each) if isinstance(inner, ast.Constant))
        found |= dict.fromkeys(each.value for each in constants if isinstance(each.value, str))
    return list(found)


def _is(node: ast.AST, name: str) -> bool:
    """True for a variable, and for a method of it: `kind`, `kind.lower()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return isinstance(node, ast.Name) and node.id == name


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


def _shim_call(
    name: str, parameters: list[inspect.Parameter], models: set[str], chains: set[Chain], packed: bool
) -> tuple[list[str], str]:
    """Return the fields that a shim takes, and the call in it."""
    owner, _, function = name.rpartition(":")[2].rpartition(".")
    function = f"{owner}().{function}" if owner and ":" in name else function
    fields = dict.fromkeys(["mask"] if packed else ["mask", "tokens"])

    def of(field: str) -> str:
        fields[field] = None
        return f"{field}[live]" if packed and FIELDS[field].shape.startswith("(B, T") else field

    def value(parameter: str) -> str | None:
        if parameter in models:
            return f"model_of({of(role_of(parameter) + 'logits')})"
        if packed and (_PACKED.fullmatch(parameter) or _LONGEST.fullmatch(parameter)):
            longest = "int(live.sum(-1).max())"
            return longest if _LONGEST.fullmatch(parameter) else "torch.cat([ends.new_zeros(1), ends])"
        if not packed and _IDS.fullmatch(parameter):
            return "ids"
        if not packed and parameter in _OF_MODELS:
            return _OF_MODELS[parameter]
        field = suggested_field(parameter)
        return None if field is None else of(field)

    def given(parameter: inspect.Parameter) -> str | None:
        keys = sorted({chain[1] for chain in chains if chain[0] == parameter.name and chain[1:]})
        found = value(parameter.name)
        if found is None and any(map(value, keys)):
            return "{" + ", ".join(f'"{key}": {value(key) or "..."}' for key in keys) + "}"
        return found or ("..." if parameter.default is parameter.empty else None)

    values = {each.name: text for each in parameters if (text := given(each)) is not None}
    return list(fields), f"{function}({', '.join(f'{key}={text}' for key, text in values.items())})"
