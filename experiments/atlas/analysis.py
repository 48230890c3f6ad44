"""The atlas: its claim, one table, and the numbers that the paper cites."""

import json
from collections.abc import Sequence

import pandas as pd

from kltest.estimators import registry
from kltest.reproduce.bounds import EVERY, exactly
from kltest.reproduce.claims import Claims, Measured
from kltest.reproduce.frames import Row, Rows, frame, need, select
from kltest.reproduce.numbers import Cited, Numbers, number
from kltest.truth import render

from .settings import COEFFICIENT_TOLERANCE, ENVIRONMENTS, SAMPLERS, UNBIASED

COLUMNS = (
    *("estimator", "placement", "couples", "environment", "sampler", "seed", "batch"),
    *("identified", "relative_bias", "cosine", "residual", "relative_variance", "expected", "agrees"),
    *("method", "instances", "rollouts"),
)
CELL = ["estimator", "environment", "sampler"]
PLACES = [(environment, sampler) for sampler in SAMPLERS for environment in ENVIRONMENTS]
UNNAMED = "no named gradient"

claims = Claims("atlas")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """One row an estimator, environment, sampler and seed; `agrees` compares it with what SPEC says."""
    judged = [{**row, "agrees": same(row["identified"], row["expected"])} for row in rows]
    return frame([{column: row[column] for column in COLUMNS} for row in sorted(judged, key=_order)])


def same(found: dict[str, float] | None, expected: dict[str, float] | None) -> bool:
    """The same names with the same coefficients, or both unnamed."""
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(
        abs(found[name] - expected[name]) <= COEFFICIENT_TOLERANCE for name in expected
    )


@claims.measure("each estimator's: `kltest explain NAME`", f"coefficients to {COEFFICIENT_TOLERANCE:g}",
    as_stated=EVERY, cells_missing=exactly(0))  # fmt: skip
def _as_stated(rows: pd.DataFrame) -> Measured:
    """every registered estimator follows the gradient that its SPEC states, in every environment, on- and off-policy"""
    found = need(rows)
    # What is said of an estimator that couples rollouts is said of whole batches, and not of one of one rollout.
    found = found[found["batch"] == found.groupby(CELL)["batch"].transform("max")]
    agrees = found["agrees"].astype(bool)
    there = set(found[CELL].itertuples(index=False, name=None))
    wrong = [f"{row[CELL].str.cat(sep=', ')}: {_rendered(row['identified'])}" for _, row in found[~agrees].iterrows()]
    return {
        "as_stated": agrees,
        "cells_missing": len({(name, *place) for name in registry() for place in PLACES} - there),
        "otherwise": "; ".join(wrong) or "none",
    }


def tables(rows: Rows) -> dict[str, list[Row]]:
    """One row an estimator: what it follows on one step and on sequences, how biased and how noisy."""
    found = frame(rows)
    return {"table": [_line(mine) for _, mine in found.groupby("estimator", sort=False)] if len(found) else []}


@numbers.add
def _of_cells(rows: pd.DataFrame) -> Cited:
    found = need(rows)
    named = found["identified"].notna()
    yield number("estimators", found["estimator"].nunique())
    yield number("environments", found["environment"].nunique())
    yield number("cells", len(found))
    yield number("cells named", named.sum())
    yield number("cells as stated", found["agrees"].sum())
    yield number("largest residual of a named cell", found[named]["residual"].max())
    for cell, same_cell in found.groupby(CELL, sort=False):
        most = same_cell["relative_bias"].astype(float).max()
        yield number("bias", most, **dict(zip(CELL, cell, strict=True)))


@numbers.add
def _of_unbiased(rows: pd.DataFrame) -> Cited:
    found = need(rows)
    right = found["relative_bias"].astype(float) < UNBIASED
    local = found["identified"].map(lambda one: same(one, {"local_reverse_kl": 1.0}))
    for sampler in SAMPLERS:
        sets = {environment: _all(found, right, environment, sampler) for environment in ENVIRONMENTS}
        for environment, names in sets.items():
            yield number("unbiased", len(names), environment=environment, sampler=sampler)
        yield number("local", len(_all(found, local, "sequence", sampler)), environment="sequence", sampler=sampler)
        everywhere = sorted(set.intersection(*sets.values()))
        yield number("unbiased everywhere", len(everywhere), sampler=sampler)
        words = " and ".join([", ".join(everywhere[:-1]), *everywhere[-1:]])
        yield number("names unbiased everywhere", words, sampler=sampler)


def _all(rows: pd.DataFrame, holds: pd.Series, environment: str, sampler: str) -> set[str]:
    """The estimators for which it holds in an environment, under a sampler, for every seed."""
    here = (rows["environment"] == environment) & (rows["sampler"] == sampler)
    return set(rows[here]["estimator"]) - set(rows[here & ~holds]["estimator"])


def _line(mine: pd.DataFrame) -> Row:
    shown = {"one step": ("bandit", "current"), "sequences": ("sequence", "current"), "stale": ("sequence", "stale")}
    cells = {
        title: select(mine, environment=environment, sampler=who)[:1] for title, (environment, who) in shown.items()
    }
    first = cells["sequences"]
    return {
        "estimator": mine["estimator"].iloc[0],
        "placement": mine["placement"].iloc[0],
        **{title: "".join(map(_rendered, found["identified"])) for title, found in cells.items()},
        "bias": "".join(map(_short, first["relative_bias"])),
        "variance": "".join(map(_short, first["relative_variance"])),
    }


def _short(value: float | None) -> str:
    return "–" if pd.isna(value) else "0" if value < UNBIASED else f"{value:.3g}"


def _rendered(combination: dict[str, float] | None) -> str:
    return UNNAMED if combination is None else render(combination)


def _order(row: Row) -> tuple:
    return (
        row["estimator"],
        SAMPLERS.index(row["sampler"]),
        ENVIRONMENTS.index(row["environment"]),
        row["seed"],
        row["batch"],
        json.dumps(row["identified"]),
    )
