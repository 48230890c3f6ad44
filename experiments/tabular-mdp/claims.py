"""The part that a token-level loss misses in decision processes: claims, a table and numbers."""

import math

import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, below, exactly, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import need, ordered, require
from kltest.reproduce.numbers import Cited, Numbers, number

from .experiment import EXACT, PARTS

TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the partial gradient of a token-level loss"
LOCAL = ("k2-loss", "full-loss", "k1-reward-immediate")
RIGHT = ("k1-reward", "k1-reward-to-go")
# Rounding stays below EXACT; a part that is there may be small, but not as small as this.
VISIBLE = 1e-6
# The reference and β whose ends the paper states, and what training follows.
SHOWN = {"reference": 0.02, "beta": 0.7}
FOLLOWED = {"local_reverse_kl": "token-level", "reverse_kl": "true"}

claims = Claims("tabular-mdp")
numbers = Numbers()
tidy = ordered(PARTS)


SUMS = "sums of thousands of rollouts in float64"
EMPTY = "rounding stays far below; a part that is there may be small, but not as small as this"


@claims.measure(TANG_MUNOS, SUMS, off=near(0, EXACT), estimators=LOCAL, column="off_local")
def _local_followed(rows: pd.DataFrame, estimators: tuple[str, ...], column: str) -> Measured:
    """a token-level loss follows the local gradient `Σ_t E ∇KL_t`, states held fixed, under stochastic dynamics too"""
    return {"off": need(rows, "estimators", estimator=estimators)[column]}


@claims.measure(TANG_MUNOS, SUMS, off=near(0, EXACT), estimators=RIGHT, column="bias")
def _truth_followed(rows: pd.DataFrame, estimators: tuple[str, ...], column: str) -> Measured:
    """k1 in the reward with credit for later steps follows ∇KL(π‖ref)"""
    return _local_followed(rows, estimators, column)


@claims.measure(TANG_MUNOS, EMPTY, missed_in_one_step=near(0, EXACT), missed_in_more=above(VISIBLE), slip=below(1))
def _one_step(rows: pd.DataFrame, slip: Bound) -> Measured:
    """the part of the state distribution is missed for more than one step, unless actions decide nothing"""
    found = need(rows, "environments")
    one, several = need(found, horizon=1), need(found, horizon=above(1), slip=slip)
    return {"missed_in_one_step": one["missed"], "missed_in_more": several["missed"]}


@claims.measure(
    OWN, "an order of means; rounding", fall=above(0), missed_at_1=near(0, EXACT), asymmetry_at_1=near(0, EXACT)
)
def _slip(rows: pd.DataFrame) -> Measured:
    """the mean of what is missed falls as actions slip; where they decide nothing (`slip = 1`) nothing is missed, and
    the token-level loss is a gradient"""
    found = need(rows, "environments", horizon=above(1))
    means = found.groupby("slip")["missed"].mean()
    none = need(found, slip=1.0)
    return {
        "fall": -means.diff().dropna(),
        "missed_at_1": none["missed"],
        "asymmetry_at_1": none["asymmetry"],
        "means": [f"{share:.2f} at {slip:g}" for slip, share in means.items()],
    }


@claims.measure(OWN, "rounding, and a millionth of a unit of logit", local=near(0, 1e-14), whole=above(1e-6))
def _picture(rows: pd.DataFrame) -> Measured:
    """on a grid the token-level loss does not act in cells where π = ref, ∇KL(π‖ref) acts in every one of them"""
    cells = need(rows, "picture", kl=below(EXACT))
    return {"local": cells["local_size"], "whole": cells["whole_size"]}


def _ends(rows: pd.DataFrame, followed: str) -> pd.Series:
    """The chances at stable rest points, the smallest first, for each reference and β that was looked at."""
    found = need(rows, "length")
    mine = found[(found["followed"] == followed) & found["stable"]].groupby(["reference", "beta"])["chance"].agg(list)
    every = pd.MultiIndex.from_frame(found[["reference", "beta"]].drop_duplicates())
    return mine.reindex(every).map(lambda ends: ends if isinstance(ends, list) else [])


def _many_betas(rows: pd.DataFrame) -> pd.Series:
    """The local gradient's ends; Missing if there are too few coefficients to see bands of them."""
    local = _ends(rows, "local_reverse_kl")
    require(len(local.index.unique("beta")) >= 10)
    return local


@claims.measure(
    OWN,
    "counted at every β tried",
    settings_with_two_ends=above(0),
    ends_of_the_local=EVERY,
    ends_of_the_whole=exactly(1),
)
def _several_ends(rows: pd.DataFrame) -> Measured:
    """where a state recurs, training with a token-level loss has one stable end or two, by β; ∇KL(π‖ref) always one"""
    local, whole = _many_betas(rows), _ends(rows, "reverse_kl").map(len)
    two = local[local.map(len) == 2]
    return {
        "settings_with_two_ends": len(two),
        "ends_of_the_local": local.map(len).isin((1, 2)),
        "ends_of_the_whole": whole,
        "apart": two.map(lambda ends: ends[1] - ends[0]) if len(two) else 0.0,
    }


@claims.measure(
    OWN,
    "folds in closed form; counted at every β tried",
    two_ends_just_between_the_folds=EVERY,
    β_between_the_folds=above(0),
)
def _hysteresis(rows: pd.DataFrame) -> Measured:
    """lowering β and raising it again does not lead back: a token-level loss has two ends at the β between two folds,
    one at all others"""
    counts, bands = _many_betas(rows).map(len), _bands(rows)
    nowhere = (math.inf, -math.inf)
    inside = [low < beta < high for reference, beta in counts.index for low, high in [bands.get(reference, nowhere)]]
    return {
        "two_ends_just_between_the_folds": (counts == 2) == inside,
        "β_between_the_folds": sum(inside),
        "bands": [f"ref {at:g}: β from {low:.3f} to {high:.3f}" for at, (low, high) in bands.items()] or "none",
    }


def _bands(rows: pd.DataFrame) -> dict[float, tuple[float, float]]:
    """For each reference the smallest and the largest β with two ends, if there are any."""
    found = need(rows, "length")
    require("band_from" in found)
    edges = found.dropna(subset=["band_from"]).groupby("reference")[["band_from", "band_to"]].first()
    return {reference: tuple(edge) for reference, edge in edges.iterrows()}


numbers.single("picture", {"cells": ("kl", len), "cells where π = ref": ("kl", lambda kl: (kl < EXACT).sum())})


@numbers.add
def _of_ends(rows: pd.DataFrame) -> Cited:
    for reference, (low, high) in _bands(rows).items():
        yield number("band from", low, reference=reference)
        yield number("band to", high, reference=reference)
