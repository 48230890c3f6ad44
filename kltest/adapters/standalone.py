"""Programs that show a setting's gradient with the library and torch, or JAX, alone.

A program holds the lines of the function that a setting calls, an environment of three tokens with two actions each,
and the sum over all rollouts, or over all pairs of rollouts if the loss of a single one has no gradient.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from kltest.adapters import Setting
from kltest.files import template

Backend = Literal["torch", "jax"]
FUTURE = "from __future__ import annotations"
FOLDER = Path(__file__).parent
TORCH = {
    "logp": "logp[rows]",
    "old_logp": "old_logp[rows]",
    "ref_logp": "ref_logp[rows]",
    "logits": "policy[at[rows]]",
    "old_logits": "sampler[at[rows]]",
    "ref_logits": "reference[at[rows]]",
    "tokens": "tokens[rows]",
    "mask": "torch.ones(len(rows), T, dtype=torch.float64)",
    "reward": "reward[rows]",
    "advantage": "reward[rows] - probability @ reward",
    "group": "torch.zeros(len(rows), dtype=torch.int64)",
    "beta": "beta",
}
# Expressions for the fields of a rollout; `rows` are the rollouts of a batch.
FIELDS: dict[Backend, dict[str, str]] = {"torch": TORCH, "jax": {**TORCH, "mask": "jnp.ones((len(rows), T))"}}
IMPORTS: dict[Backend, tuple[str, ...]] = {
    "torch": ("import torch",),
    "jax": ("import jax", "import jax.numpy as jnp"),
}
OURS = re.compile(r"^(?: *from kltest.* import (\w+).*|costly\(.*)\n", re.MULTILINE)
# Lines of whole modules that a program leaves out, and what it has for names that they take from kltest.
INSTEAD = {"UsageError": "UsageError = ValueError\n", "preserved": "preserved = nullcontext\n"}
RECIPE = re.compile(r'part\("kltest\.adapters\.(\w+)\.recipes", "(\w+)"\)')


def program(
    setting: Setting,
    fields: Mapping[str, str] | None = None,
    *,
    backend: Backend = "torch",
    find: Callable[[str, str], Any] | None = None,
    modules: Sequence[str] = (),
    stale: bool | None = None,
) -> str:
    """Return the program of a setting.

    Args:
        setting: its target is a function of a `calls` module or one of the library's own.
        fields: for a function of the library's own, which of its parameters are which fields of the rollout.
        backend: what the library computes with.
        find: function of a `calls` module that loads a name of a module, if a plain import cannot.
        modules: files below this folder that the program holds whole, in place of the function's lines.
        stale: True for rollouts of another policy; None: such rollouts if it is a recipe that is graded with them.
    """
    from kltest.counterexample.sources import source_of

    module, _, name = setting.target.partition(":")
    known = FIELDS[backend]
    if module.startswith("kltest."):
        function = getattr(import_module(module), name)
        own = {each: each for each in inspect.signature(function).parameters if each in known}
        lines, called = _texts(modules) if modules else _spaced(source_of(function, "", frozenset()).lines), name
    elif find is not None:
        own = dict(fields or {})
        lines, called = _spaced(source_of(find, "", frozenset()).lines), f'{find.__name__}("{module}", "{name}")'
    else:
        own, lines, called = dict(fields or {}), [f"from {module} import {name}"], name
    values = {parameter: known[field] for parameter, field in own.items()}
    values |= {parameter: _written(value, known) for parameter, value in setting.arguments.items()}
    imports, definitions = _parts(lines, setting.recipe)
    needed = {*imports, "import itertools", "import json", "import warnings", *IMPORTS[backend]}
    graded_stale = setting.recipe and setting.options.get("sampler") != "current"
    text = template(FOLDER / "templates" / f"{backend}.py.j2").render(
        title=setting.name,
        imports="\n".join(sorted(needed, key=lambda line: (line != FUTURE, line.startswith("from "), line))),
        stale=graded_stale if stale is None else stale,
        definitions=definitions.strip(),
        call=f"{called}({', '.join(f'{parameter}={value}' for parameter, value in values.items())})",
        has_beta="beta" in own,
        in_reward=setting.options.get("placement") == "reward",
    )
    return re.sub(r"\n{4,}", "\n\n\n", text.strip()) + "\n"


def shortened(code: str, length: int, *, stale: bool) -> str:
    """Return a program with rollouts of one to three tokens, and with or without another policy that drew them."""
    code = re.sub(r"^V, T = 2, 3$", f"V, T = 2, {length}", code, flags=re.MULTILINE)
    return re.sub(r"^STALE = \w+", f"STALE = {stale}", code, flags=re.MULTILINE)


def _texts(modules: Sequence[str]) -> list[str]:
    """Lines of whole files, without what they take from kltest."""
    text = "\n".join((FOLDER / each).read_text(encoding="utf-8") for each in modules)
    return OURS.sub(lambda found: INSTEAD.get(found[1], ""), text).splitlines()


def _spaced(lines: Sequence[str]) -> list[str]:
    return [f"\n\n{line}" if line.startswith("def ") else line for line in lines if line]


def _written(value: Any, fields: Mapping[str, str]) -> str:
    """An argument as code; `@field` is a field of the rollout, as on the command line."""
    return fields[value[1:]] if isinstance(value, str) and value.startswith("@") else repr(value)


def _parts(lines: Sequence[str], recipe: bool) -> tuple[list[str], str]:
    """Import lines and definitions; a recipe's file replaces the import of its names."""
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    own = "\n".join(line for line in lines if line not in imports)
    recipes = sorted({found[1] for found in RECIPE.finditer(own)}) if recipe else []
    texts = [(FOLDER / library / "recipes.py").read_text(encoding="utf-8") for library in recipes]
    return imports, "\n\n".join([*texts, RECIPE.sub(r"\2", own)]).replace('"kltest.adapters.trl.recipes"', "__name__")
