"""`kltest list`: the estimators, named gradients, environments, fields of a rollout and checks."""

import json as encoder
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from kltest.cli.destinations import print_bytes
from kltest.errors import UsageError, did_you_mean
from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.names import FIELDS
from kltest.render.tables import table
from kltest.truth import ATLAS, FURTHER, OF_POLICY, of_group, plain, render
from kltest.truth.atlas import named

Entry = dict[str, Any]
KINDS = {
    "estimators": "Estimators",
    "policies": "Policy losses, and what they ascend (groups of four)",
    "gradients": "Named gradients",
    "environments": "Environments",
    "fields": "Fields of a rollout, and the parameters that they fill",
    "checks": "Checks",
}
"""Kinds of things that are listed, and their titles."""


def command(
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help=f"One of {', '.join(KINDS)}.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> int:
    if kind and kind not in KINDS:
        near = did_you_mean(kind, KINDS)
        raise UsageError(f"{kind!r} is nothing that is listed; give one of {', '.join(KINDS)}{near and f'. {near}'}")
    print_bytes((as_json(kind) if json else as_text(kind)).encode("utf-8"))
    return 0


def as_text(kind: str = "") -> str:
    """Return a table of each kind, or of one, for people; its last column is wrapped."""
    lines: list[str] = []
    for name, title in KINDS.items():
        if kind in ("", name):
            rows = LISTED[name]()
            heads = [*rows[0]]
            lines += [title, table(heads, [[*map(str, row.values())] for row in rows], whole=heads[:-1], indent=2), ""]
    lines.append("`kltest explain NAME` gives the formula of an estimator or a named gradient, and all about a check.")
    return "\n".join([*lines, "`kltest grade NAME` grades an estimator."]) + "\n"


def as_json(kind: str = "") -> str:
    """Return the same as JSON, with the gradient of each estimator by sampler and environment."""
    made = {
        **LISTED,
        "estimators": lambda: [_described(estimator.spec) for estimator in registry().values()],
        "policies": lambda: [_described(estimator.spec) for estimator in registry("policy").values()],
    }
    listed = {name: made[name]() for name in KINDS if kind in ("", name)}
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


def _described(spec: Spec) -> Entry:
    names = ("name", "aliases", "placement", "credit", "formula", "claims", "known_false", "source")
    follows = {
        sampler: {environment: None if row is None else plain(row) for environment, row in rows.items()}
        for sampler, rows in spec.identified.items()
    }
    found = {name: getattr(spec, name) for name in names}
    return {**found, "credit": None if spec.placement == "loss" else spec.credit, "follows": follows}


def _policies() -> list[Entry]:
    return [
        {"name": name, "ascends on sequences": _rounded(entry.spec, "current"), "stale": _rounded(entry.spec, "stale")}
        for name, entry in registry("policy").items()
    ]


def _rounded(spec: Spec, sampler: str) -> str:
    combination = spec.expectation("sequence", sampler)
    return "unnamed" if combination is None else plain({each: round(c, 3) for each, c in combination.items()})


def _estimators() -> list[Entry]:
    found = []
    for name, estimator in registry().items():
        spec = estimator.spec
        words = _rounded(spec, "stale" if spec.off_policy_only else "current")
        words += " (stale sampler)" * spec.off_policy_only
        found.append({"name": name, "placement": placement(spec), "follows on sequences": words})
    return found


def _gradients() -> list[Entry]:
    rows = [*ATLAS.values(), *map(named, (*FURTHER, *OF_POLICY, *of_group(4)))]
    return [{"name": row.name, "formula": row.formula, "meaning": row.meaning} for row in rows]


def _environments() -> list[Entry]:
    from kltest.identify.instances import ENVIRONMENTS, NETWORKS, instances

    found = []
    for name, build in ENVIRONMENTS.items():
        environment = build(0)
        # Drawing a network takes seconds, and its rollouts are those of its environment.
        paths = environment.enumerate() if name in NETWORKS else instances(name, 0)[0].paths
        lengths = paths.lengths
        span = str(lengths[0]) if (lengths == lengths[0]).all() else f"{lengths.min()} to {lengths.max()}"
        found.append({"name": name, "tokens": environment.vocabulary, "length": span, "rollouts": len(lengths)})
    return found


def _checks() -> list[Entry]:
    from kltest.checks import CHECKS

    return [{"code": check.code, "name": check.name, "title": check.title} for check in CHECKS.values()]


def _fields() -> list[Entry]:
    found = []
    for name, entry in FIELDS.items():
        filled = f"; fills {', '.join((name, *entry.aliases))}" if entry.aliases else ""
        found.append({"name": name, "shape": entry.shape, "meaning": f"{entry.meaning}{filled}"})
    return found


LISTED: dict[str, Callable[[], list[Entry]]] = {
    "estimators": _estimators,
    "policies": _policies,
    "gradients": _gradients,
    "environments": _environments,
    "fields": _fields,
    "checks": _checks,
}
