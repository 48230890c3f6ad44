"""What the rows say: a claim an estimator, one table, and the numbers that the paper cites."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kltest.estimators import registry
from kltest.reproduce import Claim
from kltest.truth import render

from .settings import COEFFICIENT_TOLERANCE, SAMPLERS, UNBIASED, WORLDS

Row = dict[str, Any]
COLUMNS = (
    "estimator",
    "placement",
    "couples",
    "environment",
    "sampler",
    "seed",
    "batch",
    "identified",
    "relative_bias",
    "cosine",
    "residual",
    "relative_variance",
    "expected",
    "agrees",
    "method",
    "instances",
    "rollouts",
)
UNNAMED = "no named gradient"


def tidy(rows: Sequence[Row]) -> list[Row]:
    """One row an estimator, world, sampler and seed; `agrees` compares it with what SPEC says."""
    judged = [{**row, "agrees": same(row["identified"], row["expected"])} for row in rows]
    return [{column: row[column] for column in COLUMNS} for row in sorted(judged, key=_order)]


def same(found: dict[str, float] | None, expected: dict[str, float] | None) -> bool:
    """The same names with the same coefficients, or both nothing that has a name."""
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(
        abs(found[name] - expected[name]) <= COEFFICIENT_TOLERANCE for name in expected
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Every estimator follows the gradient that its SPEC states, in every world, under both samplers."""
    found = []
    for name, estimator in registry().items():
        spec = estimator.spec
        mine = [row for row in rows if row["estimator"] == name]
        places = [(world, sampler) for sampler in SAMPLERS for world in WORLDS]
        wrong = [row for row in mine if not row["agrees"]]
        complete = {(row["environment"], row["sampler"]) for row in mine} == set(places)
        found.append(
            Claim(
                experiment="atlas",
                claim=f"which gradient {name} follows",
                source=spec.source,
                expected=_words([(*place, spec.expectation(*place)) for place in places]),
                found=_words([(row["environment"], row["sampler"], row["identified"]) for row in (wrong or mine)])
                if mine
                else "not graded",
                agrees=None if not mine else not wrong and complete,
                tolerance=f"coefficients to {COEFFICIENT_TOLERANCE:g}",
            )
        )
    return found


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """One row an estimator: what it follows on one step and on sequences, how biased and how noisy."""
    return {"table": [_table_row(name, rows) for name in dict.fromkeys(row["estimator"] for row in rows)]}


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """By name; "bias of NAME, WORLD, SAMPLER" is the largest relative bias over the seeds."""
    names = {row["estimator"] for row in rows}
    result: dict[str, float | int | str | None] = {
        "estimators": len(names),
        "worlds": len({row["environment"] for row in rows}),
        "cells": len(rows),
        "cells named": sum(row["identified"] is not None for row in rows),
        "cells as stated": sum(row["agrees"] for row in rows),
        "largest residual of a named cell": max(
            (row["residual"] for row in rows if row["identified"] is not None), default=None
        ),
    }
    for sampler in SAMPLERS:
        right = {world: _all(unbiased, rows, world, sampler) for world in WORLDS}
        everywhere = sorted(set.intersection(*right.values()))
        result |= {f"unbiased, {world}, {sampler}": len(found) for world, found in right.items()}
        result[f"local, sequence, {sampler}"] = len(_all(_is_local, rows, "sequence", sampler))
        result[f"unbiased everywhere, {sampler}"] = len(everywhere)
        result[f"names unbiased everywhere, {sampler}"] = " and ".join([", ".join(everywhere[:-1]), *everywhere[-1:]])
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["estimator"], row["environment"], row["sampler"]), []).append(row)
    for cell, same_cell in cells.items():
        for quantity in ("bias", "variance"):
            known = [row[f"relative_{quantity}"] for row in same_cell if row[f"relative_{quantity}"] is not None]
            result[f"{quantity} of {', '.join(cell)}"] = max(known, default=None)
    return result


def _all(holds: Callable[[Row], bool], rows: Sequence[Row], world: str, sampler: str) -> set[str]:
    """The estimators for which it holds in a world, under a sampler, for every seed."""
    here = [row for row in rows if (row["environment"], row["sampler"]) == (world, sampler)]
    return {row["estimator"] for row in here} - {row["estimator"] for row in here if not holds(row)}


def _is_local(row: Row) -> bool:
    return same(row["identified"], {"local_reverse_kl": 1.0})


def unbiased(row: Row) -> bool:
    """Whether the expected gradient is ∇KL(π‖ref)."""
    return row["relative_bias"] is not None and row["relative_bias"] < UNBIASED


def _table_row(name: str, rows: Sequence[Row]) -> Row:
    def cell(world: str, sampler: str) -> Row | None:
        return next(
            (r for r in rows if (r["estimator"], r["environment"], r["sampler"]) == (name, world, sampler)), None
        )

    shown = {"one step": ("bandit", "current"), "sequences": ("sequence", "current"), "stale": ("sequence", "stale")}
    found = {title: cell(*place) for title, place in shown.items()}
    sequence = found["sequences"]
    return {
        "estimator": name,
        "placement": next(row["placement"] for row in rows if row["estimator"] == name),
        **{title: "" if row is None else _rendered(row["identified"]) for title, row in found.items()},
        "bias": "" if sequence is None else _short(sequence["relative_bias"]),
        "variance": "" if sequence is None else _short(sequence["relative_variance"]),
    }


def _short(value: float | None) -> str:
    return "–" if value is None else "0" if value < UNBIASED else f"{value:.3g}"


def _words(cells: Sequence[tuple[str, str, dict[str, float] | None]]) -> str:
    """The worlds of one sampler that have the same gradient are named together: `A (bandit), B (sequence, mdp)`."""
    parts = []
    for sampler in SAMPLERS:
        worlds: dict[str, list[str]] = {}
        for world, who, combination in cells:
            if who == sampler and world not in worlds.setdefault(_rendered(combination), []):
                worlds[_rendered(combination)].append(world)
        if worlds:
            parts.append(f"{sampler}: " + ", ".join(f"{text}{_where(where)}" for text, where in worlds.items()))
    return "; ".join(parts)


def _where(worlds: Sequence[str]) -> str:
    if len(worlds) == len(WORLDS):
        return ""
    return " (tokens)" if set(worlds) == set(WORLDS[1:]) else f" ({', '.join(worlds)})"


def _rendered(combination: dict[str, float] | None) -> str:
    return UNNAMED if combination is None else render(combination)


def _order(row: Row) -> tuple:
    return (
        row["estimator"],
        SAMPLERS.index(row["sampler"]),
        WORLDS.index(row["environment"]),
        row["seed"],
        row["batch"],
        json.dumps(row["identified"]),
    )
