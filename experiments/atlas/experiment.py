"""Grades one registered estimator in every environment, with a current and with a stale sampler."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import kltest
from kltest.errors import TargetError
from kltest.estimators import find, registry

from ..arrays import code_of
from .settings import ENVIRONMENTS


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every registered estimator with each seed."""
    seeds = [configuration["seed"] for configuration in configurations]
    for name, estimator in registry().items():
        yield from ({"estimator": name, "seed": seed, "_code": code_of(estimator)} for seed in seeds)


def compute(configuration: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row an environment and sampler: what was found, beside what the estimator's SPEC says is to be found."""
    spec = find(configuration["estimator"]).spec
    # No checks: they judge what the rows already say.
    report = kltest.grade(
        spec.name, environment=ENVIRONMENTS, sampler="both", seed=configuration["seed"], select=("KL101",)
    ).to_dict()
    if report["verdict"] == "error":
        raise TargetError(report["error"])
    about = {"estimator": spec.name, "placement": spec.placement, "couples": spec.couples, "seed": report["seed"]}
    return [
        {**about, **row, "expected": _expected(spec, row["environment"], row["sampler"])} for row in report["gradients"]
    ]


def _expected(spec: Any, environment: str, sampler: str) -> dict[str, float] | None:
    expected = spec.expectation(environment, sampler)
    return None if expected is None else dict(expected)
