"""`kltest list`: the estimators, named gradients, environments and checks."""

from __future__ import annotations

import json as encoder
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.render.tables import table
from kltest.truth import ATLAS, plain, render

SAMPLERS = ("current", "stale")


def command(json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False) -> int:
    from kltest.cli.destinations import say

    say((as_json() if json else as_text()).encode("utf-8"))
    return 0


def as_text() -> str:
    """Return a table of each kind, for people."""
    return "\n".join(
        [
            *_table("Estimators", ("name", "placement", "formula → expected gradient"), _estimators()),
            *_table("Named gradients", ("name", "formula", "meaning"), _gradients()),
            *_table("Environments", ("name", "tokens", "length", "rollouts"), _environments()),
            *_table("Checks", ("code", "name", "title"), _checks()),
            "`kltest explain NAME` describes each in full; `kltest grade NAME` grades an estimator.",
            "",
        ]
    )


def as_json() -> str:
    """Return the same as JSON, with the gradient of each estimator by sampler and environment."""
    from kltest.checks import CHECKS

    listed = {
        "estimators": [_described(estimator.spec) for estimator in registry().values()],
        "gradients": [{"name": row.name, "formula": row.formula, "meaning": row.meaning} for row in ATLAS.values()],
        "environments": [
            {"name": name, "tokens": tokens, "length": length, "rollouts": rollouts}
            for name, tokens, length, rollouts in _instances()
        ],
        "checks": [{"code": check.code, "name": check.name, "title": check.title} for check in CHECKS.values()],
    }
    return encoder.dumps(listed, indent=2, ensure_ascii=False) + "\n"


def placement(spec: Spec) -> str:
    """Return the placement of an estimator, in a reward with its credit."""
    return spec.placement if spec.placement == "loss" else f"{spec.placement}, {spec.credit}"


def follows(spec: Spec, environment: str, sampler: str = "current") -> str:
    """Return an estimator's expected gradient as a formula, or "unnamed"."""
    combination = spec.expectation(environment, sampler)
    return "unnamed" if combination is None else render(combination)


def environments(identified: Mapping[str, Any]) -> list[str]:
    """Return the environments that a SPEC distinguishes, bandits first."""
    return sorted(identified, key=lambda environment: (environment != "bandit", environment))


def _described(spec: Spec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "placement": spec.placement,
        "credit": None if spec.placement == "loss" else spec.credit,
        "formula": spec.formula,
        "claims": spec.claims,
        "known_false": spec.known_false,
        "source": spec.source,
        "follows": {
            sampler: {
                environment: None if row is None else plain(row)
                for environment, row in spec.identified[sampler].items()
            }
            for sampler in SAMPLERS
            if sampler in spec.identified
        },
    }


def _estimators() -> Iterable[Sequence[str]]:
    for name, estimator in registry().items():
        spec = estimator.spec
        sampler = "stale" if spec.off_policy_only else "current"
        bandit, sequence = (follows(spec, environment, sampler) for environment in ("bandit", "sequence"))
        found = bandit if bandit == sequence else f"{bandit} on a bandit, {sequence} on sequences"
        yield name, placement(spec), f"{spec.formula}\n→ {found}{' (stale sampler)' * spec.off_policy_only}"


def _gradients() -> Iterable[Sequence[str]]:
    return ((row.name, row.formula, row.meaning) for row in ATLAS.values())


def _environments() -> Iterable[Sequence[str]]:
    return ((name, str(tokens), length, str(rollouts)) for name, tokens, length, rollouts in _instances())


def _instances() -> Iterable[tuple[str, int, str, int]]:
    """Name, number of tokens, lengths and number of rollouts of each environment."""
    from kltest.identify.instances import ENVIRONMENTS

    for name, build in ENVIRONMENTS.items():
        environment = build(0)
        lengths = environment.enumerate().mask.sum(axis=1)
        span = str(lengths[0]) if (lengths == lengths[0]).all() else f"{lengths.min()} to {lengths.max()}"
        yield name, environment.vocabulary, span, len(lengths)


def _checks() -> Iterable[Sequence[str]]:
    from kltest.checks import CHECKS

    return ((check.code, check.name, check.title) for check in CHECKS.values())


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """The lines of a table whose last column is wrapped."""
    return title, table(heads, rows, whole=heads[:-1], indent=2), ""
