"""Effects of masks, baselines and normalisation on the penalty: claims, tables and the numbers that the paper cites."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import Bound, above, at_least, below, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, frame, known, mean, need
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

from .settings import EXACT

ORDER = ("part", "estimator", "group_size", "success", "push", "batch_size", "beta", "seed")
# Exact training has settled where its gradient is shorter than this; what it reached is then known about as well.
SETTLED, REACHED = 1e-9, 1e-7
MASKS = "TRL #5588 and #5640"

SUMS = "sums over all groups in float64"

claims = Claims("groups")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows in a fixed order; if exact training has a fixed point in closed form, `predicted` is P(right) there."""
    found = [{**row, "predicted": predicted(row)} if row["part"] == "training" else dict(row) for row in rows]
    return frame(sorted(found, key=lambda row: [(row.get(name) is not None, str(row.get(name))) for name in ORDER]))


def predicted(row: Row) -> float | None:
    """P(right) at the fixed point. If both weights c_r of the KL are 1 that is π* ∝ ref·e^{R/β}.

    Stationary: R − β·c_r·log π/ref is the same for all answers, with c_r = 1 − 1/n for the mean with self, and
    c_r = 1 − P(the others of the group earn r)  for masked ties.
    """
    size, reference, beta = row["group_size"], row["success"], row["beta"]
    weights = {
        "k2-loss-sequence": lambda right: (1.0, 1.0),
        "leave-one-out": lambda right: (1.0, 1.0),
        "group-mean": lambda right: (1 - 1 / size, 1 - 1 / size),
        "tied-groups-masked": lambda right: (1 - right ** (size - 1), 1 - (1 - right) ** (size - 1)),
    }.get(row["estimator"])
    if weights is None:
        return None

    def excess(right: float) -> float:
        hit, miss = weights(right)
        return 1 - beta * hit * math.log(right / reference) + beta * miss * math.log((1 - right) / (1 - reference))

    low, high = reference, 1 - 1e-15
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


ENDED = {"batch_size": 0, "gradient_norm": below(SETTLED)}

# Coefficients at which all sampled runs have the time to settle.
SETTLES = at_least(0.5)
DRAWN = {"part": "training", "batch_size": lambda x: x > 0}

claims.column(
    "masking tied groups loses `E[1{{tied}}·KL term]` of the gradient, in every group size and difficulty",
    MASKS,
    SUMS,
    "closed_form_error",
    near(0, EXACT),
    "masking",
)

claims.column(
    "in evaluation groups of {group_size} sample the whole KL term is masked",
    MASKS,
    SUMS,
    "lost",
    near(1, EXACT),
    "masking",
    group_size=1,
)

claims.column(
    "unmasked, the penalty ends at the optimum of the regularised objective: KL(π‖π*) below {bound} where "
    "the gradient is below {gradient_norm}",
    "Korbak et al. 2022; Ahmadian et al. 2024",
    "what is left at such a gradient",
    "kl_to_optimum",
    below(REACHED),
    "training",
    **ENDED,
    estimator=("k2-loss-sequence", "leave-one-out"),
)


def _masked_beside_right(rows: pd.DataFrame) -> pd.DataFrame:
    """Settled runs with masked ties, and in columns `…_right` those without a mask of the same reference and β."""
    masked, right = (
        need(rows, "training", **ENDED, estimator=name) for name in ("tied-groups-masked", "k2-loss-sequence")
    )
    return known(masked.merge(right, on=["success", "beta"], suffixes=("", "_right")))


@claims.measure(
    f"{MASKS}; the numbers: this work",
    "exact training, groups of four, as far as it has settled",
    times_the_kl=above(1),
    more_often_right=above(0),
    lost=above(0),
    kl_off_closed_form=near(0, REACHED),
    lost_off_closed_form=near(0, REACHED),
)
def _elsewhere(rows: pd.DataFrame) -> Measured:
    """masked, it ends elsewhere: right more often than π*, farther from the reference, at a lower objective"""
    pairs = _masked_beside_right(rows)
    kl, gap, ends, best = (pairs[name].astype(float) for name in ("kl", "gap", "predicted", "predicted_right"))
    away, lost = _kl(ends, pairs["success"].astype(float)), pairs["beta"] * _kl(ends, best)
    return {
        "times_the_kl": kl / pairs["kl_right"],
        "more_often_right": ends - best,
        "lost": lost,
        "kl_off_closed_form": kl - away,
        "lost_off_closed_form": gap - lost,
        "references": pairs["success"].nunique(),
    }


def _kl(chance: pd.Series, other: pd.Series) -> pd.Series:
    """KL between two policies that are right so often: answers that earn the same keep their proportions."""
    return chance * np.log(chance / other) + (1 - chance) * np.log((1 - chance) / (1 - other))


claims.column(
    "every fixed point is the predicted one (π*, `π* at (1 − 1/n)β`, and that of the mask)",
    OWN,
    "P(right) where the gradient has settled",
    "right - predicted",
    near(0, REACHED),
    "training",
    **ENDED,
)


for _name, _shortened, _words in (
    ("group-mean", 1, "with the rollout itself shortens the gradient to `(1 − 1/n)·∇KL`"),
    ("leave-one-out", 0, "without the rollout itself gives ∇KL"),
):

    @claims.measure(
        "Wang & Zhang 2025",
        SUMS,
        claim=f"a baseline of the group's mean {_words}",
        factor_off=near(0, EXACT),
        rest=near(0, EXACT),
        estimator=_name,
        shortened=_shortened,
    )
    def _baseline(rows: pd.DataFrame, estimator: str, shortened: int) -> Measured:
        found = need(rows, "baselines", estimator=estimator)
        return {"factor_off": found["factor"] - (1 - shortened / found["group_size"]), "rest": found["rest"]}


def _push(rows: pd.DataFrame, kind: str) -> pd.Series:
    """The mean length of the expected step in a tied group, by β."""
    return need(rows, "std").groupby("push")[kind].mean()


@claims.measure(
    OWN, "β·std(u) against ε at the smallest of these β", smallest_over_largest=above(0.95), push=at_least(1e-2)
)
def _cancels(rows: pd.DataFrame, push: Bound) -> Measured:
    """in tied groups std-normalisation cancels β: for β from {push} on, well above `ε = 1e-4`, the smallest push is
    more than {smallest_over_largest} of the largest"""
    large = _push(rows, "normalised")[lambda size: push(size.index)]
    known(large[1:])
    return {"smallest_over_largest": large.min() / large.max()}


@claims.measure(
    OWN,
    "β·std(u) against ε at the larger of these β",
    growth_over_that_of_β=Bound(0.85, 1, closed=True),
    push=below(1.1e-5),
)
def _fades(rows: pd.DataFrame, push: Bound) -> Measured:
    """and fades like the plain one below ε: for β below {push} it grows {growth_over_that_of_β} times as much as β"""
    small = _push(rows, "normalised")[lambda size: push(size.index)]
    known(small[1:])
    return {"growth_over_that_of_β": small.iloc[1] / small.iloc[0] / (small.index[1] / small.index[0])}


@claims.measure(OWN, "float64", spread_of_the_push_over_β=near(0, 1e-9))
def _proportional(rows: pd.DataFrame) -> Measured:
    """without normalisation the push is proportional to β"""
    plain = _push(rows, "plain")
    ratio = plain / plain.index
    return {"spread_of_the_push_over_β": ratio.max() / ratio.min() - 1}


claims.column(
    "the exact expectation over groups is that of a second, plain enumeration",
    OWN,
    SUMS,
    "by_hand_error",
    near(0, EXACT),
    "std",
)

# Below β = 0.3 π* is all but certain, and there is nothing left to blow up.
claims.column(
    "with the KL in a std-normalised reward even exact training at a constant step does not settle for β from {beta} "
    "on: its gradient stays above {bound}, since near π* all regularised rewards are equal, and the division blows up "
    "what is left",
    OWN,
    "a million times that of settled runs",
    "gradient_norm",
    above(1e-3),
    "training",
    batch_size=0,
    estimator="group-std",
    beta=at_least(0.3),
)


def _gap(rows: pd.DataFrame, name: str, beta: Bound = SETTLES) -> float:
    drawn = need(rows, **DRAWN, estimator=name)
    return mean(drawn.loc[beta(drawn["beta"]), "gap"].clip(lower=0.0))


@claims.measure(OWN, "β at which all runs have the time to settle", share_of_the_loss=below(1e-3), beta=SETTLES)
def _noise(rows: pd.DataFrame, beta: Bound) -> Measured:
    """sampled, for β from {beta} on, k1 in the reward with a leave-one-out baseline has no noise left at π*, since R −
    β·u is the same for all rollouts there: it loses less than {share_of_the_loss} of what k2 in the loss loses to its
    noise
    """
    without, noisy = (_gap(rows, name, beta) for name in ("leave-one-out", "k2-loss-sequence"))
    return {"share_of_the_loss": without / noisy, "lost": without, "lost_to_noise": noisy}


numbers.melt("masking", {"lost": "lost", "ties": "tied"}, ["group_size", "success"], means=True)


@numbers.add
def _of_exact_training(rows: pd.DataFrame) -> Cited:
    pairs = _masked_beside_right(rows)
    yield from extremes("KL ratio of masked", pairs["kl"] / pairs["kl_right"])


numbers.add(
    lambda rows: [
        number("push", size, kind=kind, beta=push)
        for kind in ("normalised", "plain")
        for push, size in _push(rows, kind).items()
    ]
)


@numbers.add
def _of_samples(rows: pd.DataFrame) -> Cited:
    drawn = need(rows, **DRAWN)
    for name in sorted(drawn["estimator"].unique()):
        yield number("sampled gap", _gap(rows, name), estimator=name)
