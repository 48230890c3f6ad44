"""What one would file upstream on a setting: neutral words, the smallest numbers, and a program that prints them.

All of it is made from the recorded row. Nothing is sent anywhere.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np

from kltest.adapters import Adapter, Setting
from kltest.adapters.standalone import FOLDER, shortened
from kltest.counterexample.environment import SmallEnvironment, kind
from kltest.environments import Instance
from kltest.errors import UsageError
from kltest.scoreboard import recorded
from kltest.scoreboard.classes import CLASSES, WHOLE, class_of
from kltest.scoreboard.rows import Row
from kltest.scoreboard.table import family, following, frame
from kltest.scoreboard.templating import template
from kltest.truth import combine

# The tables of the programs that adapters write: the probability of token 0 in each context, breadth first.
TABLES: Mapping[str, Sequence[float]] = {
    "policy": (0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55),
    "reference": (0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3),
    "sampler": (0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65),
}
# Tokens of the rollouts of which coefficients are recorded.
RECORDED = 3
# A difference that counts, relative to ∇KL(π‖ref).
DIFFERS = 1e-3


def upstream(library: Adapter, setting: Setting) -> str:
    """Return the text.

    Raises:
        UsageError: nothing is recorded of the setting, it follows ∇KL(π‖ref) in batches of the fewest rollouts, or its
            adapter writes no programs.
    """
    target = f"{library.name}:{setting.name}"
    mine = [row for row in recorded.read() if row["library"] == library.name]
    row = next((row for row in mine if row["setting"] == setting.name), None)
    if row is None or not row["gradients"]:
        raise UsageError(f"nothing is recorded of {target}; `kltest libraries {library.name}` measures it")
    smallest = None if setting.recipe else _smallest(row)
    if smallest is None:
        raise UsageError(f"there is nothing to report: {target} is ours, or alone each rollout follows ∇KL(π‖ref)")
    code = library.standalone(setting) if library.standalone else ""
    if not code:
        raise UsageError(f"the adapter of {library.name} writes no programs, without which nothing is reported")
    others = [each for each in mine if each["version"] == row["version"] and class_of(each) in ("whole", "on-policy")]
    table = frame([row, *(each for each in others if each is not row)], programs=False)
    line: Any = table.iloc[0].to_dict()
    right = following(table, off_policy=line["kind"] == "on-policy").to_dict("records")
    recipe = next((each for each in right if each["mark"] == "recipe"), None)
    recipes = FOLDER / library.name.replace("-", "_") / "recipes.py"
    length, stale, followed = smallest
    text = template("upstream.md.j2").render(
        **{**line, "unset": line["unset"] * (line["unset"] != "–")},
        distribution=library.distribution,
        versions={name: found for name, found in row["versions"].items() if name != "kltest"},
        arguments=setting.arguments,
        note=row["note"],
        source=row["source"],
        sentence=CLASSES[line["kind"]].sentence,
        length=length,
        drawn_by_another=stale,
        contexts=_contexts(length, stale, followed),
        backend="JAX" if "\nimport jax" in code else "torch",
        code=shortened(code, length, stale=stale).strip(),
        own=[each for each in right if not each["mark"] and family(each["setting"]) == line["family"]],
        recipe=recipe and recipe["row"],
        recipe_code=recipes.read_text(encoding="utf-8").strip() if recipe else "",
    )
    return text.strip() + "\n"


def instance(length: int) -> Instance:
    """Return the environment of the programs, with rollouts of so many tokens."""
    return _environment(length).instance()


def _environment(length: int) -> SmallEnvironment:
    tables = {name: [[p, 1 - p] for p in chances[: 2**length - 1]] for name, chances in TABLES.items()}
    return SmallEnvironment(tables["policy"], tables["reference"], tables["sampler"], length)


def _smallest(row: Row) -> tuple[int, bool, dict[str, float] | None] | None:
    """The fewest tokens, and whose rollouts, with which the gradient differs, and that gradient, None for unnamed.

    Rollouts of the policy itself are tried first. None if nothing differs.
    """
    for sampler, length in product(("current", "stale"), (1, 2, RECORDED)):
        where = kind(length, ends=False), sampler
        there = [each for each in row["gradients"] if (each["environment"], each["sampler"]) == where]
        for identified in (each["identified"] for each in sorted(there, key=itemgetter("batch"))[:1]):
            followed = identified and _at(identified, row, length)
            # A gradient without a name, or without a law, is not known at other lengths than those recorded.
            if followed is None and (identified is not None or length == 2):
                continue
            if followed is None or _differs(followed, length):
                return length, sampler == "stale", followed
    return None


def _at(identified: Mapping[str, float], row: Row, length: int) -> dict[str, float] | None:
    """The gradient with rollouts of another length, by the laws of its coefficients; None if one has no law."""
    found = {}
    for name, coefficient in identified.items():
        law = row["laws"].get(name, "")
        if length in (1, RECORDED) or abs(coefficient - 1) < DIFFERS or name == "zero" or "completion" in law:
            found[name] = coefficient
        elif law.endswith(("/T", "/padded width")):
            found[name] = coefficient * RECORDED / length
        else:
            return None
    return found


def _differs(followed: Mapping[str, float], length: int) -> bool:
    there = instance(length)
    truth = combine({WHOLE: 1.0}, there)
    return bool(np.linalg.norm(combine(followed, there) - truth) > DIFFERS * np.linalg.norm(truth))


def _contexts(length: int, stale: bool, followed: Mapping[str, float] | None) -> list[dict[str, Any]]:
    environment, there = _environment(length), instance(length)
    truth = combine({WHOLE: 1.0}, there)
    found = None if followed is None else combine(followed, there)
    rows = []
    for context in range(there.environment.n_contexts):
        prefix = environment.prefix(context).removeprefix("after ").replace("root", "nothing")
        numbers = {name: f"{values[context]:g}" for name, values in TABLES.items()}
        shown = "unnamed: see the program" if found is None else f"{found[context, 0]:.6f}"
        rows.append({"prefix": prefix, **numbers, "true": f"{truth[context, 0]:.6f}", "followed": shown})
    return rows
