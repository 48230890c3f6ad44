"""Grades one registered estimator in every environment, with a current and with a stale sampler."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import kltest
from kltest.errors import TargetError
from kltest.estimators import find, registry
from kltest.identify.case import relative_bias, size
from kltest.identify.instances import instances
from kltest.truth import combine, gradient

from ..arrays import code_of
from .settings import ENVIRONMENTS, SHARED
from .settings import SETTINGS as SETTINGS

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
    """What the SPEC says of a row's environment: names are those of sequences whatever the policy's parameters."""
    expected = spec.expectation("sequence" if row["environment"] == SHARED else row["environment"], row["sampler"])
    return None if expected is None else dict(expected)
