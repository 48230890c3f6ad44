"""Programs that show a setting's gradient with the library and torch, or JAX, alone.

They are those of counter-examples, in an environment of three tokens with two actions each, or two more than a support
has; what a setting calls is taken over with its lines, or imported from the library.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kltest.adapters import Setting
from kltest.files import template
from kltest.names import SUPPORT_SIZES

if TYPE_CHECKING:
    from kltest.counterexample.environment import SmallEnvironment

Backend = Literal["torch", "jax"]
FOLDER = Path(__file__).parent
LENGTH, ACTIONS = 3, 2
# The probability of one token in each context, breadth first; where there are more contexts, these once more.
CHANCES = {
    "policy": (0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55),
    "reference": (0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3),
    "sampler": (0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65),
}
IMPORTS: dict[Backend, tuple[str, ...]] = {
    "torch": (),
    "jax": ("import jax", "import jax.numpy as jnp", "import numpy as np"),
}
OURS = re.compile(r"^ *from kltest.* import (\w+).*\n", re.MULTILINE)
# Lines of whole modules that a program leaves out, and what it has for names that they take from kltest.
INSTEAD = {"UsageError": "UsageError = ValueError\n", "preserved": "preserved = nullcontext\n"}
RECIPE = re.compile(r'part\("kltest\.adapters\.(\w+)\.recipes", "(\w+)"\)')


def environment(*, stale: bool, actions: int = ACTIONS) -> "SmallEnvironment":
    """Return the environment of the programs, with rollouts of another policy if `stale`.

    Every choice of token 0 is worth 1.
    """
    from kltest.counterexample.environment import SmallEnvironment

    contexts = sum(actions**depth for depth in range(LENGTH))
    tables = {
        name: tuple(
            _row(chance, actions, shift) for shift, chance in enumerate(islice(cycle(chances), contexts), start)
        )
        for start, (name, chances) in enumerate(CHANCES.items())
    }
    reward = ((1.0, *[0.0] * (actions - 1)),) * contexts
    kept = tables if stale else {**tables, "sampler": None}
    return SmallEnvironment(**kept, length=LENGTH, reward=reward)  # type: ignore[arg-type]


def _row(chance: float, actions: int, shift: int) -> tuple[float, ...]:
    """A token with this chance and others with shares of the rest, all different; of more than two any is likeliest."""
    shares = [3**place for place in range(actions - 1, 0, -1)]
    row = [chance, *(round((1 - chance) * one / sum(shares), 4) for one in shares[:-1])]
    row.append(round(1 - sum(row), 4))
    turned = shift % actions if actions > ACTIONS else 0
    return (*row[turned:], *row[:turned])


def program(
    setting: Setting,
    parameters: Sequence[str] = (),
    *,
    backend: Backend = "torch",
    find: Callable[[str, str], Any] | None = None,
    modules: Sequence[str] = (),
    stale: bool | None = None,
    batch: int = 1,
) -> str:
    """Return the program of a setting, which prints ∇KL(π‖ref) and the expected gradient, a row a context.

    Args:
        setting: its target is a function of a `calls` module or one of the library's own.
        parameters: those of a function of the library's own that fields of the rollout fill.
        backend: what the library computes with.
        find: function of a `calls` module that loads a name of a module, if a plain import cannot.
        modules: files below this folder that the program holds whole, in place of the function's lines.
        stale: True for rollouts of another policy; None: such rollouts if it is a recipe that is graded with them.
        batch: rollouts in a batch, 2 for a loss that compares those of a batch.
    """
    # Torch is not imported where settings are only listed.
    from kltest.counterexample.program import Program
    from kltest.counterexample.sources import Definition, source_of
    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call

    module, _, name = setting.target.partition(":")
    called = name
    if module.startswith("kltest."):
        function: Any = getattr(import_module(module), name)
        lines = _texts(modules) if modules else _spaced(source_of(function, "", frozenset()).lines)
    else:
        function = _with_parameters([*parameters, *setting.arguments])
        lines = [f"from {module} import {name}"]
        if find is not None:
            lines, called = _spaced(source_of(find, "", frozenset()).lines), f'{find.__name__}("{module}", "{name}")'
    imports, definitions = _parts(lines, setting.recipe)
    wrapper = template(FOLDER / "templates" / f"{backend}.py.j2").render(called=called)
    options = setting.options
    support = max((size for key, size in setting.arguments.items() if key in SUPPORT_SIZES), default=0)
    actions = support + 2 if support else ACTIONS
    call = Call(options.get("placement"), options.get("credit"), None, setting.arguments)
    graded_stale = setting.recipe and options.get("sampler") != "current"
    lines = [*sorted({*imports, *IMPORTS[backend]}), *definitions, "", "", *wrapper.splitlines()]
    written = Program(
        loss=bind(function, call, setting.name),
        declared={"reverse_kl": 1.0},
        environment=environment(stale=graded_stale if stale is None else stale, actions=actions),
        source=Definition(tuple(lines), "graded"),
        batch=batch,
        named=True,
    )
    return re.sub(r"\n{4,}", "\n\n\n", written.text(start="0 * logits.sum() + ")) + "\n"


def _with_parameters(names: Sequence[str]) -> Callable[..., Any]:
    """Return what stands for a function of a library that need not be installed: only its parameters are known."""

    def function(**given: Any) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in names])  # type: ignore[attr-defined]
    return function


def _texts(modules: Sequence[str]) -> list[str]:
    """Lines of whole files, without what they take from kltest."""
    text = "\n".join((FOLDER / each).read_text(encoding="utf-8") for each in modules)
    return OURS.sub(lambda found: INSTEAD.get(found[1], ""), text).splitlines()


def _spaced(lines: Sequence[str]) -> list[str]:
    return [f"\n\n{line}" if line.startswith("def ") else line for line in lines if line]


def _parts(lines: Sequence[str], recipe: bool) -> tuple[list[str], list[str]]:
    """Import lines and definitions; a recipe's file replaces the import of its names."""
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    own = "\n".join(line for line in lines if line not in imports)
    recipes = sorted({found[1] for found in RECIPE.finditer(own)}) if recipe else []
    texts = [(FOLDER / library / "recipes.py").read_text(encoding="utf-8") for library in recipes]
    text = "\n\n".join([*texts, RECIPE.sub(r"\2", own)]).replace('"kltest.adapters.trl.recipes"', "__name__")
    return imports, text.strip().splitlines()
