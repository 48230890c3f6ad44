"""The part that a token-level loss misses in decision processes: claims, a table and numbers."""

import math

import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import known, need, ordered, require
from kltest.reproduce.numbers import Cited, Numbers, number

from .settings import EXACT, PARTS

TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the partial gradient of a token-level loss"
LOCAL = ("k2-loss", "full-loss", "k1-reward-immediate")
RIGHT = ("k1-reward", "k1-reward-to-go")
# An eigenvalue counts as complex from here on; those of symmetric matrices come out below 1e-7 of their size.
TURNS = 1e-3
# Rounding stays below EXACT; a part that is there may be small, but not as small as this.
VISIBLE = 1e-6
# The reference and β whose ends the paper states, and what training follows.
SHOWN = {"reference": 0.02, "beta": 0.7}
FOLLOWED = {"local_reverse_kl": "token-level", "reverse_kl": "true"}

claims = Claims("tabular-mdp")
numbers = Numbers()
tidy = ordered(PARTS)


@claims.add("theory", "0", f"{EXACT:g}: sums of thousands of rollouts in float64")
def _routes(rows: pd.DataFrame) -> Answer:
    """dynamics cancel in the log-ratio of trajectories, and two routes agree"""
    found = known(need(rows, "environments").dropna(subset=["off_again"]))
    off, dynamics = found["off_again"].max(), found["off_dynamics"].max()
    said = f"{len(found)} environments: gradients off by {off:.0e}; log-ratios with dynamics off by {dynamics:.0e}"
    return said, max(off, dynamics) < EXACT


def _followed(rows: pd.DataFrame, names: tuple[str, ...], column: str) -> Answer:
    found = need(rows, "estimators", estimator=names)
    off, again = found[column].max(), found[["off_again", "off_value"]].max(axis=None)
    said = f"{', '.join(found['estimator'].unique())}: off by {off:.0e}; by enumeration {again:.0e}"
    return said, max(off, again) < EXACT


@claims.add(TANG_MUNOS, "Σ_t E ∇KL_t, states held fixed", f"{EXACT:g}: float64")
def _local(rows: pd.DataFrame) -> Answer:
    """a token-level loss follows the local gradient, under stochastic dynamics too"""
    return _followed(rows, LOCAL, "off_local")


@claims.add(TANG_MUNOS, "∇KL(π‖ref)", f"{EXACT:g}: float64")
def _right(rows: pd.DataFrame) -> Answer:
    """k1 in the reward with credit for later steps follows ∇KL(π‖ref)"""
    return _followed(rows, RIGHT, "bias")


@claims.add(TANG_MUNOS, "0 for one step only", f"zero: {EXACT:g}; not zero: above {VISIBLE:g}")
def _one_step(rows: pd.DataFrame) -> Answer:
    """the part of the state distribution is missed for more than one step"""
    found = need(rows, "environments")
    one = need(found, horizon=1)["missed"].max()
    several = need(found, horizon=lambda x: x > 1, slip=lambda x: x < 1)["missed"]
    said = f"one step {one:.0e}; more {several.min():.2g} to {several.max():.2f}"
    return said, one < EXACT and several.min() > VISIBLE


@claims.add(OWN, "falling means; 0 at slip 1, the Jacobian's asymmetry too",
    f"{EXACT:g} at slip 1; the order of the means")  # fmt: skip
def _slip(rows: pd.DataFrame) -> Answer:
    """what is missed falls as actions slip, and is nothing where they decide nothing"""
    found = need(rows, "environments", horizon=lambda x: x > 1)
    means = found.groupby("slip")["missed"].mean()
    none = need(found, slip=1.0)[["missed", "asymmetry"]].max(axis=None)
    require(len(means) >= 2)
    text = ", ".join(f"{one:.2f}" for one in means)
    said = f"means {text} at slip {', '.join(f'{one:g}' for one in means.index)}; at 1 at most {none:.0e}"
    return said, means.is_monotonic_decreasing and means.is_unique and none < EXACT


@claims.add(OWN, "local 0, ∇KL not, in every cell where π = ref", "1e-14 and 1e-6 of a unit of logit")
def _picture(rows: pd.DataFrame) -> Answer:
    """on a grid the token-level loss acts only where the policy differs from the reference"""
    cells = need(rows, "picture", kl=lambda x: x < EXACT)
    blind, steered = cells["local_size"].max(), (cells["whole_size"] > 1e-6).sum()
    said = f"{len(cells)} cells where π = ref: local at most {blind:.0e}; ∇KL acts in {steered}"
    return said, blind < 1e-14 and steered == len(cells)


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


@claims.add(OWN, "two stable rest points for some β; one for ∇KL",
    f"rest points in closed form; recursion to {EXACT:g}")  # fmt: skip
def _several_ends(rows: pd.DataFrame) -> Answer:
    """where a state recurs, training with a token-level loss may have two ends"""
    local, whole = _many_betas(rows), _ends(rows, "reverse_kl").map(len)
    two = local[local.map(len) == 2]
    apart = max((high - low for low, high in two), default=0.0)
    off = need(rows, "length")["off_formula"].max()
    said = f"two ends for {len(two)} of {len(local)} settings, up to {apart:.2f} apart; ∇KL always one; "
    ends = len(two) > 0 and local.map(len).isin((1, 2)).all() and (whole == 1).all()
    return f"{said}recursion off the closed form by {off:.0e}", ends and off < EXACT


@claims.add(OWN, "two ends for the β between two folds, one for all others and for ∇KL",
    "folds in closed form; as counted at every β tried")  # fmt: skip
def _hysteresis(rows: pd.DataFrame) -> Answer:
    """lowering β and raising it again does not lead back"""
    counts, bands = _many_betas(rows).map(len), _bands(rows)
    if not bands:
        return "no such band", False
    text = "; ".join(f"ref {reference:g}: β from {low:.3f} to {high:.3f}" for reference, (low, high) in bands.items())
    nowhere = (math.inf, -math.inf)
    inside = [low < beta < high for reference, beta in counts.index for low, high in [bands.get(reference, nowhere)]]
    whole = _ends(rows, "reverse_kl").map(len)
    return text, ((counts == 2) == inside).all() and any(inside) and (whole == 1).all()


def _bands(rows: pd.DataFrame) -> dict[float, tuple[float, float]]:
    """For each reference the smallest and the largest β with two ends, if there are any."""
    found = need(rows, "length")
    require("band_from" in found)
    edges = found.dropna(subset=["band_from"]).groupby("reference")[["band_from", "band_to"]].first()
    return {reference: tuple(edge) for reference, edge in edges.iterrows()}


@claims.add(OWN, "complex eigenvalues in some random processes; never for ∇KL",
    f"complex: above {TURNS:g} of the real part; real: below 1e-7")  # fmt: skip
def _spirals(rows: pd.DataFrame) -> Answer:
    """where states recur, training with a token-level loss may spiral into its rest point"""
    found = need(rows, "rotation")
    turn = found.groupby("followed")["turn"]
    local, whole = turn.get_group("local_reverse_kl"), turn.get_group("reverse_kl").max()
    require(len(local) >= 30)
    turning, rest = (local > TURNS).sum(), found["off_rest"].max()
    said = f"{turning} of {len(local)} spiral, imaginary/real up to {local.max():.2f}; ∇KL: {whole:.0e}"
    return f"{said}; at rest to {rest:.0e}", turning > 0 and whole < 1e-7 and rest < EXACT


numbers.melt("environments", ["missed"], ["environment", "horizon", "slip"], means=True)
numbers.single("environments", {"routes apart": ("off_again", "max")})

numbers.single("picture", {"cells": ("kl", len), "cells where π = ref": ("kl", lambda kl: (kl < EXACT).sum())})


@numbers.add
def _of_ends(rows: pd.DataFrame) -> Cited:
    for reference, (low, high) in _bands(rows).items():
        yield number("band from", low, reference=reference)
        yield number("band to", high, reference=reference)
    for followed, name in FOLLOWED.items():
        for ends in _ends(rows, followed)[lambda each: each.index == tuple(SHOWN.values())]:
            if ends:
                yield number("lower end", ends[0], gradient=name)
                yield number("upper end", ends[-1], gradient=name)
    tipping = need(rows, "length", followed="local_reverse_kl", stable=False, **SHOWN)
    yield number("tipping point", tipping["chance"].iloc[0])


numbers.single("rotation", {"processes": ("turn", len), "processes that spiral": ("turn", lambda x: (x > TURNS).sum()),
    "largest turn": ("turn", "max")}, followed="local_reverse_kl")  # fmt: skip
