"""The atlas: its claim, one table, and the numbers that the paper cites."""

import json
from collections.abc import Sequence
from itertools import product

import pandas as pd

from kltest.estimators import registry
from kltest.reproduce.bounds import EVERY, exactly, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, Rows, frame, need, select
from kltest.reproduce.numbers import Cited, Numbers, number
from kltest.truth import render

from .experiment import COEFFICIENT_TOLERANCE, ENVIRONMENTS, SAMPLERS, SHARED, UNBIASED, definitions

COLUMNS = (
    *("estimator", "placement", "couples", "environment", "sampler", "seed", "batch"),
    *("identified", "relative_bias", "cosine", "residual", "relative_variance", "expected", "agrees"),
    *("method", "instances", "rollouts", "bias_at_logits"),
)
CELL = ["estimator", "environment", "sampler"]
UNNAMED = "no named gradient"

claims = Claims("atlas")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """One row an estimator, environment, sampler and seed; `agrees` compares it with what SPEC says."""
    judged = [{**row, "agrees": same(row["identified"], row["expected"])} for row in rows]
    return frame([{one: row[one] for one in COLUMNS if one in row} for row in sorted(judged, key=_order)])


def same(found: dict[str, float] | None, expected: dict[str, float] | None) -> bool:
    """The same names with the same coefficients, or both unnamed."""
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(
        abs(found[name] - expected[name]) <= COEFFICIENT_TOLERANCE for name in expected
    )


STATED = "each estimator's: `kltest explain NAME`"
ROUNDED = f"coefficients to {COEFFICIENT_TOLERANCE:g}"


@claims.measure(STATED, ROUNDED, as_stated=EVERY, cells_missing=exactly(0), environments=ENVIRONMENTS)
def _as_stated(rows: pd.DataFrame, environments: tuple[str, ...]) -> Measured:
    """every registered estimator follows the gradient that its SPEC states, in every environment, on- and off-policy"""
    found = _whole(need(rows, environment=environments))
    agrees = found["agrees"].astype(bool)
    there = set(found[CELL].itertuples(index=False, name=None))
    cells = {(name, *place) for name in registry() for place in product(environments, SAMPLERS)}
    wrong = [f"{row[CELL].str.cat(sep=', ')}: {_rendered(row['identified'])}" for _, row in found[~agrees].iterrows()]
    return {"as_stated": agrees, "cells_missing": len(cells - there), "otherwise": "; ".join(wrong) or "none"}


@claims.measure(STATED, ROUNDED, as_stated=EVERY, cells_missing=exactly(0), environments=(SHARED,))
def _as_stated_on_shared_weights(rows: pd.DataFrame, environments: tuple[str, ...]) -> Measured:
    """where contexts share the weights of a small transformer, every one keeps the name of its gradient"""
    return _as_stated(rows, environments)


@claims.measure(OWN, "a factor of three", bias_over_that_at_the_logits=within(1 / 3, 3))
def _shared(rows: pd.DataFrame) -> Measured:
    """sharing weights removes no bias: at the weights each is {bias_over_that_at_the_logits:.2g} times what it is
    at the logits of the same policies"""
    return {"bias_over_that_at_the_logits": _over_logits(rows)["times"]}


def _whole(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of whole batches: what is said of an estimator that couples rollouts is not said of one rollout."""
    return rows[rows["batch"] == rows.groupby(CELL)["batch"].transform("max")] if len(rows) else rows


def _over_logits(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of biased named gradients at the weights, with their bias over that at the logits of the same policies."""
    found = need(rows, environment=SHARED, bias_at_logits=lambda bias: bias > UNBIASED)
    return found.assign(times=found["relative_bias"] / found["bias_at_logits"])


def tables(rows: Rows) -> dict[str, list[Row]]:
    """Tables of what each estimator is, what it follows on one step and on sequences, how biased and noisy it is."""
    found = _whole(select(rows, environment=ENVIRONMENTS))
    lines = [_line(mine) for _, mine in found.groupby("estimator", sort=False)] if len(found) else []
    return {"table": lines, "definitions": definitions()}


@numbers.add
def _of_cells(rows: pd.DataFrame) -> Cited:
    found = need(rows, environment=ENVIRONMENTS)
    yield number("largest residual of a named cell", found[found["identified"].notna()]["residual"].max())


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
        "noise": "".join(map(_short, first["relative_variance"].astype(float) ** 0.5)),
    }


def _short(value: float | None) -> str:
    return "–" if pd.isna(value) else "0" if value < UNBIASED else f"{value:.3g}"


def _rendered(combination: dict[str, float] | None) -> str:
    return UNNAMED if combination is None else render(combination)


def _order(row: Row) -> tuple:
    return (
        row["estimator"],
        SAMPLERS.index(row["sampler"]),
        (*ENVIRONMENTS, SHARED).index(row["environment"]),
        row["seed"],
        row["batch"],
        json.dumps(row["identified"]),
    )
