"""Ends of training with each gradient: claims about all draws, and the numbers that the paper cites."""

from collections.abc import Sequence

import pandas as pd

from kltest.reproduce.bounds import above, at_least, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, Rows, frame, need
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

from .experiment import CORRECT, GRADIENTS, PARTIAL

TANG_MUNOS = "Tang & Munos 2025"
ROUNDING = 1e-9
MEASURED = ("reward", "kl", "objective")
SEVERAL = ("sequence", "mdp")

claims, numbers = Claims("training-curves"), Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Environments in the order of the settings, estimators in that of the figure."""
    order = list(GRADIENTS)
    return frame(sorted(rows, key=lambda r: (r["environment"], order.index(r["estimator"]), r["seed"], r["update"])))


def _curves(rows: pd.DataFrame, estimator: str, **where: object) -> pd.DataFrame:
    """Curves of expected gradients, a column a metric, by draw and update."""
    found = need(rows, estimator=estimator, **where)
    names = {f"{name}_exact": name for name in MEASURED}
    return found.set_index(["environment", "seed", "update"])[list(names)].rename(columns=names)


def _ends(rows: pd.DataFrame, estimator: str, **where: object) -> pd.DataFrame:
    return _curves(rows, estimator, update=rows["update"].max(), **where)


@claims.measure(
    TANG_MUNOS,
    "one decision: the three gradients are one, to rounding along a curve",
    difference=near(0, ROUNDING),
    environment="bandit",
)
def _alike(rows: pd.DataFrame, environment: str) -> Measured:
    """on a bandit the partial and the last token's gradient train as the correct one does"""
    right = _curves(rows, CORRECT, environment=environment)
    others = [_curves(rows, name, environment=environment) - right for name in (PARTIAL, "last-token")]
    return {"difference": pd.concat(others)}


@claims.measure(TANG_MUNOS, "its expected gradient is zero, to rounding along a curve", difference=near(0, ROUNDING))
def _nothing(rows: pd.DataFrame) -> Measured:
    """naive k1, in expectation, trains in every environment as no penalty does"""
    return {"difference": _curves(rows, "k1-loss") - _curves(rows, "none")}


@claims.measure(
    TANG_MUNOS,
    "expected gradients; what is asked for is what the correct gradient ascends",
    draws=at_least(3),
    lost=above(0),
    environment=SEVERAL,
)
def _best(rows: pd.DataFrame, environment: tuple[str, ...]) -> Measured:
    """on sequences and in the MDP every other gradient ends at a lower objective than the correct one, in every draw"""
    right = _ends(rows, CORRECT, environment=environment)["objective"]
    lost = pd.concat(
        [right - _ends(rows, name, environment=environment)["objective"] for name in GRADIENTS if name != CORRECT]
    )
    return {"lost": lost, "draws": right.groupby("environment").size()}


@claims.measure(
    OWN,
    "95 % intervals of the mean over runs, and what a finite step adds",
    apart=above(0),
    environment=SEVERAL,
    estimator=("none", "k1-loss", "last-token"),
)
def _sampled(rows: pd.DataFrame, environment: tuple[str, ...], estimator: tuple[str, ...]) -> Measured:
    """so it is with sampled gradients: without a penalty, with naive k1 and with the last token's gradient the
    objective's interval ends below that of the correct gradient, in every draw"""
    last = need(rows, environment=environment, update=rows["update"].max())
    by = last.set_index(["environment", "seed"])
    right = by[by["estimator"] == CORRECT]
    low = right["objective"] - right["objective_reach"]
    found = []
    for name in estimator:
        other = by[by["estimator"] == name]
        found.append(low - (other["objective"] + other["objective_reach"]))
    return {"apart": pd.concat(found)}


@numbers.add
def _of_the_ends(rows: pd.DataFrame) -> Cited:
    for environment in ("bandit", *SEVERAL):
        right = _ends(rows, CORRECT, environment=environment)
        yield number("draws", len(right), environment=environment)
        for name in GRADIENTS:
            if name != CORRECT:
                other = _ends(rows, name, environment=environment)
                where = {"environment": environment, "estimator": name}
                yield from extremes("times the KL", other["kl"] / right["kl"], **where)


def tables(rows: Rows) -> dict[str, list[Row]]:
    """Ends of training with expected gradients: means over draws, and extremes of the loss against the correct one."""
    found = []
    for environment in rows["environment"].unique():
        right = _ends(rows, CORRECT, environment=environment)
        for name, words in GRADIENTS.items():
            own = _ends(rows, name, environment=environment)
            lost = right["objective"] - own["objective"]
            line = {"environment": environment, "gradient": words, "estimator": name}
            line |= {title: f"{own[column].mean():.2f}" for title, column in (("KL", "kl"), ("reward", "reward"))}
            least, most = (_shown(one) for one in (lost.min(), lost.max()))
            found.append({**line, "objective lost": f"{_shown(lost.mean())} ({least} to {most})"})
    return {"table": found}


def _shown(lost: float) -> str:
    """Three decimals, and no zero for what is none."""
    return "0" if abs(lost) < ROUNDING else "<0.001" if 0 < lost < 0.0005 else f"{lost:.3f}"
