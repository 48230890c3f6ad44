"""`kltest list`: the estimators, named gradients, worlds and checks, from their own tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kltest.checks import CHECKS
from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.truth import ATLAS, plain, render

SAMPLERS = ("current", "stale")


def as_text() -> str:
    """For people: a table each."""
    return "\n".join(
        [
            *_table("Estimators", ("name", "placement", "formula", "on a bandit", "on sequences"), _estimators()),
            *_table("Named gradients", ("name", "formula", "meaning"), _gradients()),
            *_table("Environments", ("name", "tokens", "length", "rollouts"), _environments()),
            *_table("Checks", ("code", "name", "title"), _checks()),
            "`kltest explain NAME` says more of each; `kltest grade NAME` grades an estimator.",
            "",
        ]
    )


def as_json() -> str:
    """For programs: the same, and what each estimator is identified as under either sampler, by world."""
    listed = {
        "estimators": [_described(estimator.spec) for estimator in registry().values()],
        "gradients": [{"name": row.name, "formula": row.formula, "meaning": row.meaning} for row in ATLAS.values()],
        "environments": [
            {"name": name, "tokens": tokens, "length": length, "rollouts": rollouts}
            for name, tokens, length, rollouts in _worlds()
        ],
        "checks": [{"code": check.code, "name": check.name, "title": check.title} for check in CHECKS.values()],
    }
    return json.dumps(listed, indent=2, ensure_ascii=False) + "\n"


def placement(spec: Spec) -> str:
    """Where an estimator stands; in a reward, with its credit."""
    return spec.placement if spec.placement == "loss" else f"{spec.placement}, {spec.credit}"


def follows(spec: Spec, world: str, sampler: str = "current") -> str:
    """What an estimator's expected gradient is, in mathematical words."""
    combination = spec.expectation(world, sampler)
    return "nothing that has a name" if combination is None else render(combination)


def worlds(identified: Mapping[str, Any]) -> list[str]:
    """The worlds that a SPEC tells apart, bandits first."""
    return sorted(identified, key=lambda world: (world != "bandit", world))


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
            sampler: {world: None if row is None else plain(row) for world, row in spec.identified[sampler].items()}
            for sampler in SAMPLERS
            if sampler in spec.identified
        },
    }


def _estimators() -> Iterable[Sequence[str]]:
    for name, estimator in registry().items():
        spec = estimator.spec
        sampler = "stale" if spec.off_policy_only else "current"
        stale = " (stale)" if spec.off_policy_only else ""
        found = [follows(spec, world, sampler) + stale for world in ("bandit", "sequence")]
        yield name, placement(spec), spec.formula, *found


def _gradients() -> Iterable[Sequence[str]]:
    return ((row.name, row.formula, row.meaning) for row in ATLAS.values())


def _environments() -> Iterable[Sequence[str]]:
    return ((name, str(tokens), length, str(rollouts)) for name, tokens, length, rollouts in _worlds())


def _worlds() -> Iterable[tuple[str, int, str, int]]:
    from kltest.identify.instances import ENVIRONMENTS

    for name, build in ENVIRONMENTS.items():
        world = build(0)
        lengths = world.enumerate().mask.sum(axis=1)
        span = str(lengths[0]) if (lengths == lengths[0]).all() else f"{lengths.min()} to {lengths.max()}"
        yield name, world.vocabulary, span, len(lengths)


def _checks() -> Iterable[Sequence[str]]:
    return ((check.code, check.name, check.title) for check in CHECKS.values())


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    cells = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    yield title
    for row in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
