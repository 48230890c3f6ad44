"""Grades one registered estimator in every environment, with a current and with a stale sampler."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kltest
from kltest.errors import TargetError
from kltest.estimators import find, registry
from kltest.identify.case import relative_bias, size
from kltest.identify.instances import instances
from kltest.reproduce.frames import Row
from kltest.sweeps.settings import Settings
from kltest.truth import combine, gradient

from ..arrays import code_of

# Each seed draws other policies and rewards: an identity that holds on one set of environments holds on all.
SETTINGS = Settings(
    title="The atlas of estimators", tags=("exact", "gradient"), values={}, seeds={"quick": 1, "full": 5}
)

ENVIRONMENTS = ("bandit", "sequence", "ragged", "mdp")
# Sequences whose policies are a small transformer: its contexts share weights, and gradients are those at the weights.
SHARED = "transformer"
SAMPLERS = ("current", "stale")

# Coefficients are identified to a residual of 1e-9; ten times that leaves room for the environments' conditioning.
COEFFICIENT_TOLERANCE = 1e-8

# Below this the expected gradient is the target: float64 gives about 1e-14, every bias here is above 1e-3.
UNBIASED = 1e-9


# --- definitions ---
# The definition of every registered estimator: where its term stands, its formula, and the code that computes it.
def definitions() -> list[Row]:
    """Return one row an estimator, in alphabetical order."""
    return [
        {
            "estimator": name,
            "place": entry.spec.placement,
            "formula": entry.spec.formula,
            "file, line: code": "{}, {}: {}".format(*_code(entry.function)),
        }
        for name, entry in registry().items()
    ]


def _code(function: Callable[..., Any]) -> tuple[str, int, str]:
    """Return the file, the line and the expression that a function returns; of a pair, the first."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    returned = [node for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None][-1]
    value = returned.value.elts[0] if isinstance(returned.value, ast.Tuple) else returned.value
    assert value is not None
    return Path(inspect.getfile(function)).name, first + returned.lineno - 1, ast.unparse(value)


ROOMS = ("language_models",)
LIBRARIES = ("transformers",)


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every registered estimator with each seed: on tables, and at the weights of a transformer if there can be one."""
    seeds = [configuration["seed"] for configuration in configurations]
    for name, estimator in registry().items():
        yield from ({"estimator": name, "seed": seed, "_code": code_of(estimator)} for seed in seeds)
    # Seed by seed, since what estimators share at a seed is kept for a few.
    for seed in seeds if find_spec("transformers") else ():
        for name, estimator in registry().items():
            yield {"estimator": name, "seed": seed, "environment": SHARED, "_code": code_of(estimator)}


def compute(configuration: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row an environment and sampler: what was found, beside what the estimator's SPEC says is to be found."""
    spec = find(configuration["estimator"]).spec
    # No checks: they judge what the rows already say.
    report = kltest.grade(
        spec.name,
        environment=configuration.get("environment", ENVIRONMENTS),
        sampler="both",
        seed=configuration["seed"],
        select=("KL101",),
    ).to_dict()
    if report["verdict"] == "error":
        raise TargetError(report["error"])
    about = {"estimator": spec.name, "placement": spec.placement, "couples": spec.couples, "seed": report["seed"]}
    return [
        {**about, **row, **_on_tables(row, report["seed"]), "expected": _expected(spec, row)}
        for row in report["gradients"]
    ]


def _on_tables(row: Mapping[str, Any], seed: int) -> dict[str, float]:
    """The bias of what a row names at the logits of the same transformers, as if these were tables."""
    if row["environment"] != SHARED or row["identified"] is None or row["batch"] > 1:
        return {}
    there = instances(SHARED, seed)
    biases = (relative_bias(combine(row["identified"], one), gradient("reverse_kl", one), size(one)) for one in there)
    return {"bias_at_logits": max(biases)}


def _expected(spec: Any, row: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the gradient that SPEC states for a row: names are those of sequences whatever the policy's parameters."""
    expected = spec.expectation("sequence" if row["environment"] == SHARED else row["environment"], row["sampler"])
    return None if expected is None else dict(expected)
