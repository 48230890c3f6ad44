"""Effects of masks, baselines and normalisation on the penalty: claims and the numbers that the paper cites."""

import math
from collections.abc import Sequence

import pandas as pd

from kltest.reproduce.bounds import Bound, above, at_least, below, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, frame, known, mean, need
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

ORDER = ("part", "estimator", "group_size", "success", "push", "batch_size", "beta", "seed")
MASKS = "TRL #5588 and #5640"
EXACT = 1e-11  # a few thousand terms of size one, by two routes in float64
# Exact training has settled where its gradient is shorter than 1e-9; what it reached is then known to REACHED.
REACHED = 1e-7
SETTLED = {"batch_size": 0, "gradient_norm": below(1e-9)}

claims = Claims("groups")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows in a fixed order; if exact training has a fixed point in closed form, `predicted` is P(right) there."""
    found = [{**row, "predicted": predicted(row)} if row["part"] == "training" else dict(row) for row in rows]
    return frame(sorted(found, key=lambda row: [(row.get(name) is not None, str(row.get(name))) for name in ORDER]))


def predicted(row: Row, size: int = 4) -> float | None:
    """P(right) at the fixed point, where R − β·c_R·log π/ref is the same for all answers; None for another loss.

    c_R is 1 − 1/n for the mean with self, 1 − P(the others of the group earn R) for masked ties, and 1 without either.
    """
    weights = {
        "k2-loss-sequence": lambda right: (1.0, 1.0),
        "leave-one-out": lambda right: (1.0, 1.0),
        "group-mean": lambda right: (1 - 1 / size, 1 - 1 / size),
        "tied-groups-masked": lambda right: (1 - right ** (size - 1), 1 - (1 - right) ** (size - 1)),
    }.get(row["estimator"])
    if weights is None:
        return None
    low, high = row["success"], 1 - 1e-15
    for _ in range(200):
        right = (low + high) / 2
        hit, miss = weights(right)
        pull = hit * math.log(right / row["success"]) - miss * math.log((1 - right) / (1 - row["success"]))
        low, high = (right, high) if row["beta"] * pull < 1 else (low, right)
    return (low + high) / 2


for _sentence, _column, _bound, _where in (
    (
        "masking tied groups loses `E[1{{tied}}·KL term]` of the gradient, in every group size and difficulty",
        "closed_form_error",
        near(0, EXACT),
        {},
    ),
    (
        "in evaluation groups of {group_size} sample the whole KL term is masked",
        "lost",
        near(1, EXACT),
        {"group_size": 1},
    ),
):
    claims.column(_sentence, MASKS, "sums over all groups in float64", _column, _bound, "masking", **_where)

claims.column(
    "every fixed point is the predicted one (π*, `π* at (1 − 1/n)β`, and that of the mask)",
    OWN,
    "P(right) where the gradient has settled",
    "right - predicted",
    near(0, REACHED),
    "training",
    **SETTLED,
)


def _times_the_kl(rows: pd.DataFrame) -> pd.Series:
    """KL of settled runs with masked ties over that of those without a mask of the same reference and β."""
    masked, right = (
        need(rows, "training", **SETTLED, estimator=name) for name in ("tied-groups-masked", "k2-loss-sequence")
    )
    pairs = known(masked.merge(right, on=["success", "beta"], suffixes=("", "_right")))
    return pairs["kl"] / pairs["kl_right"]


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
    large = _push(rows, "normalised")[lambda size: push(size.index)]
    known(large[1:])
    return {"smallest_over_largest": large.min() / large.max()}


@claims.measure(OWN, "float64", spread_of_the_push_over_β=near(0, 1e-9))
def _proportional(rows: pd.DataFrame) -> Measured:
    """without normalisation the push is proportional to β"""
    ratio = _push(rows, "plain").pipe(lambda plain: plain / plain.index)
    return {"spread_of_the_push_over_β": ratio.max() / ratio.min() - 1}


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


def _gap(rows: pd.DataFrame, name: str) -> float:
    """Mean gap of sampled runs, at coefficients at which all of them have the time to settle."""
    drawn = need(rows, "training", batch_size=lambda x: x > 0, beta=at_least(0.5), estimator=name)
    return mean(drawn["gap"].clip(lower=0.0))


@claims.measure(OWN, "β at which all runs have the time to settle", share_of_the_loss=below(1e-3))
def _noise(rows: pd.DataFrame) -> Measured:
    """sampled, k1 in the reward with a leave-one-out baseline has no noise left at π*, since R − β·u is the same for
    all rollouts there: it loses less than {share_of_the_loss} of what k2 in the loss loses to its noise"""
    without, noisy = (_gap(rows, name) for name in ("leave-one-out", "k2-loss-sequence"))
    return {"share_of_the_loss": without / noisy, "lost": without, "lost_to_noise": noisy}


numbers.melt("masking", {"lost": "lost", "ties": "tied"}, ["group_size", "success"], means=True)
numbers.add(lambda rows: extremes("KL ratio of masked", _times_the_kl(rows)))


@numbers.add
def _of_pushes_and_samples(rows: pd.DataFrame) -> Cited:
    for kind in ("normalised", "plain"):
        for push, size in _push(rows, kind).items():
            yield number("push", size, kind=kind, beta=push)
    for name in ("k2-loss-sequence", "leave-one-out"):
        yield number("sampled gap", _gap(rows, name), estimator=name)
