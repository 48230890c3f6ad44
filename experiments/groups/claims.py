"""Effects of masks, baselines and normalisation on the penalty: claims."""

import math
from collections.abc import Callable, Sequence

import pandas as pd
from scipy.optimize import brentq

from kltest.reproduce.bounds import Bound, above, at_least, below, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, known, mean, need, ordered

from .experiment import PARTS

MASKS = "TRL #5588 and #5640"
EXACT = 1e-11  # a few thousand terms of size one, by two routes in float64
# Exact training has settled where its gradient is shorter than 1e-9; what it reached is then known to REACHED.
REACHED = 1e-7
SETTLED = {"batch_size": 0, "gradient_norm": below(1e-9)}

# Without noise at π*, and with it.
NOISE = ("leave-one-out", "k2-loss-sequence")

claims = Claims("groups")


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows part by part; if exact training has a fixed point in closed form, `predicted` is P(right) there."""
    return ordered(PARTS)([row | {"predicted": predicted(row)} if row["part"] == "training" else row for row in rows])


def predicted(row: Row, size: int = 4) -> float | None:
    """P(right) at the fixed point, where R − β·c_R·log π/ref is the same for all answers; None for another loss.

    c_R is 1 − 1/n for the mean with self, 1 − P(the others of the group earn R) for masked ties, and 1 without either.
    """
    weights: dict[str, Callable[[float], tuple[float, float]]] = {
        **dict.fromkeys(("k2-loss-sequence", "leave-one-out"), lambda right: (1.0, 1.0)),
        "group-mean": lambda right: (1 - 1 / size, 1 - 1 / size),
        "tied-groups-masked": lambda right: (1 - right ** (size - 1), 1 - (1 - right) ** (size - 1)),
    }
    if row["estimator"] not in weights:
        return None

    def pull(right: float) -> float:
        hit, miss = weights[row["estimator"]](right)
        apart = hit * math.log(right / row["success"]) - miss * math.log((1 - right) / (1 - row["success"]))
        return row["beta"] * apart - 1

    return float(brentq(pull, row["success"], 1 - 1e-15, xtol=1e-16))


@claims.measure(OWN, "P(right) where the gradient has settled", off=near(0, REACHED))
def _fixed_points(rows: pd.DataFrame) -> Measured:
    """every fixed point is the predicted one (π*, `π* at (1 − 1/n)β`, and that of the mask)"""
    found = need(rows, "training", **SETTLED).dropna(subset=["predicted"])
    return {"off": found["right"] - found["predicted"].astype(float)}


def _times_the_kl(rows: pd.DataFrame) -> pd.Series:
    """KL of settled runs with masked ties over that of those without a mask of the same reference and β."""
    kl = need(rows, "training", **SETTLED).set_index(["success", "beta", "estimator"])["kl"].unstack()
    return known((kl["tied-groups-masked"] / kl["k2-loss-sequence"]).dropna())


@claims.measure(f"{MASKS}; the numbers: {OWN}", "exact training, groups of four, settled", times_the_kl=above(1))
def _elsewhere(rows: pd.DataFrame) -> Measured:
    """masked, it ends elsewhere, farther from the reference"""
    return {"times_the_kl": _times_the_kl(rows)}


def _push(rows: pd.DataFrame, kind: str) -> pd.Series:
    """The mean length of the expected step in a tied group, by β."""
    return need(rows, "std").groupby("push")[kind].mean()


@claims.measure(
    OWN, "β·std(u) against ε at the smallest of these β", smallest_over_largest=above(0.95), push=at_least(1e-2)
)
def _cancels(rows: pd.DataFrame, push: Bound) -> Measured:
    """in tied groups std-normalisation cancels β: for β from {push} on, well above `ε = 1e-4`, the smallest push is
    more than {smallest_over_largest} of the largest"""
    large = known(_push(rows, "normalised")[lambda size: push(size.index)])
    return {"smallest_over_largest": large.min() / large.max()}


# Below β = 0.3 π* is all but certain, and there is nothing left to blow up.
@claims.measure(OWN, "a million times that of settled runs", gradient=above(1e-3), beta=at_least(0.3))
def _blows_up(rows: pd.DataFrame, beta: Bound) -> Measured:
    """with the KL in a std-normalised reward even exact training at a constant step does not settle for β from {beta}
    on: its gradient stays above {gradient}, since near π* all regularised rewards are equal, and the division blows up
    what is left"""
    return {"gradient": need(rows, "training", batch_size=0, estimator="group-std", beta=beta)["gradient_norm"]}


def _gap(rows: pd.DataFrame, name: str) -> float:
    """Mean gap of sampled runs, at coefficients at which all of them have the time to settle."""
    drawn = need(rows, "training", batch_size=lambda x: x > 0, beta=at_least(0.5), estimator=name)
    return mean(drawn["gap"].clip(lower=0.0))


@claims.measure(OWN, "β at which all runs have the time to settle", share_of_the_loss=below(1e-3))
def _noise(rows: pd.DataFrame) -> Measured:
    """sampled, k1 in the reward with a leave-one-out baseline has no noise left at π*, since R − β·u is the same for
    all rollouts there: it loses less than {share_of_the_loss} of what k2 in the loss loses to its noise"""
    without, noisy = (_gap(rows, name) for name in NOISE)
    return {"share_of_the_loss": without / noisy, "lost": without, "lost_to_noise": noisy}
