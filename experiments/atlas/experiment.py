"""Grades one registered estimator in every environment, with a current and with a stale sampler."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kltest
from kltest.errors import TargetError
from kltest.estimators import find, registry

from .settings import ENVIRONMENTS


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every registered estimator with each seed.

    An estimator may come from another package; its code is part of the configuration, so that editing it counts.
    """
    seeds = [configuration["seed"] for configuration in configurations]
    for name, estimator in registry().items():
        source = Path(inspect.getfile(inspect.unwrap(estimator.function)))
        code = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
        for seed in seeds:
            yield {"estimator": name, "seed": seed, "_code": code}


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
