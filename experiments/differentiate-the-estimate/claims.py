"""Claims, a table and numbers: the worked examples, how bias and size go with distance, and whose signs turn."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, exactly, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Missing, Row, frame, known, need, require, select
from kltest.reproduce.numbers import Numbers

from .settings import EXAMPLES

EXACT = 1e-10
ROUNDED = 1e-6  # rows keep eight figures, of levels that are solved for to as many
NEAR = 1e-3
ENOUGH = 50  # pairs that a frequency is judged by
TANG = "Tang & Munos 2025"
CHEN = "Chen 2026, a post with a script, check_kl.py"
POLGRAD = "polgrad 2026, docs/derivations/kl.md"
PLACE = ["path", "vocabulary", "pairs", "seed", "kl"]

claims = Claims("differentiate-the-estimate")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """The examples, the binary line, the distances."""
    parts = ("examples", "binary", "distance")
    names = ("estimator", "example", "path", "vocabulary", "pairs", "seed", "probability", "kl")

    def order(row: Row) -> tuple[Any, ...]:
        return parts.index(row["part"]), *(row.get(name, "") for name in names)

    return frame(sorted(rows, key=order))


# --- the examples ----------------------------------------------------------------------------------------------------
def _example(rows: pd.DataFrame, example: str, *names: str) -> list[Row]:
    """The rows of these estimators; Missing unless all are there."""
    found = need(rows, "examples", example=example, estimator=names).drop_duplicates("estimator").set_index("estimator")
    require(len(found) >= len(names))
    return [found.loc[name].to_dict() for name in names]


P = EXAMPLES["binary"][0][0]
# d/dp of KL((p, 1 − p)‖(½, ½)) = log(p/(1 − p)); of KL the other way (p − ½)/(p(1 − p)).
LOG_4, FORWARD = math.log(P / (1 - P)), (P - 0.5) / (P * (1 - P))
BINARY = {"k1-loss": 0.0, "k2-loss": LOG_4, "k3-loss": FORWARD, "k1-reward": LOG_4, "k3-reward": LOG_4 - FORWARD}
POLICY, REFERENCE = map(np.array, EXAMPLES["four actions"])
U = np.log(POLICY / REFERENCE)
KL, HALF_SQUARE = float(POLICY @ U), float(POLICY @ U**2) / 2
TRUTH = POLICY * (U - KL)


@claims.measure(f"{TANG}; {CHEN}", "formulas, in float64", off=near(0, EXACT), truth_off=near(0, EXACT))
def _binary(rows: pd.DataFrame) -> Measured:
    """`P = (0.8, 0.2), Q = (0.5, 0.5)`: d/dp of k1 in the loss is zero, of k2 `log 4`, the truth, of k3 `(p − ½)/(p(1
    − p))`; of k1 in the reward `log 4`, of k3 there the difference"""
    found = _example(rows, "binary", *BINARY)
    return {
        "off": np.array([row["derivative"] for row in found]) - list(BINARY.values()),
        "truth_off": found[0]["truth"][0] / (P * (1 - P)) - math.log(4),
        "derivatives": [f"{row['derivative']:.5f}" for row in found],
    }


@claims.measure(POLGRAD, "formulas, in float64", off=near(0, EXACT))
def _four_values(rows: pd.DataFrame) -> Measured:
    """`π = (.4, .3, .2, .1), ref = (.1, .2, .3, .4)`: k1 and k3 average to the KL, k2 to `E[u²]/2`"""
    logged = [row["logged"] for row in _example(rows, "four actions", "k1-loss", "k2-loss", "k3-loss")]
    return {"off": np.array(logged) - [KL, HALF_SQUARE, KL], "values": [f"{one:.4f}" for one in logged]}


def _vector(values: Iterable[float]) -> str:
    return f"({', '.join(_shown(value, 4) for value in values)})"


def _shown(value: float, digits: int) -> str:
    """Without a sign or decimals where it is zero."""
    return "0" if abs(value) < EXACT else f"{value:.{digits}f}".replace("-", "−")


@claims.measure(POLGRAD, "formulas, in float64", truth_off=near(0, EXACT), k2_in_loss_off=near(0, EXACT))
def _four_truth(rows: pd.DataFrame) -> Measured:
    """the same policies: the gradient of KL(π‖ref), and of k2 in loss, is `π(u − KL)`"""
    (row,) = _example(rows, "four actions", "k2-loss")
    off = {name: np.array(row[column]) - TRUTH for name, column in (("truth", "truth"), ("k2_in_loss", "gradient"))}
    return {**{f"{name}_off": each for name, each in off.items()}, "gradient": _vector(row["gradient"])}


@claims.measure(
    POLGRAD,
    "formulas, in float64",
    off=near(0, EXACT),
    turned=exactly(1),
    second_action=above(0),
    second_action_of_the_truth=below(0),
)
def _four_k3(rows: pd.DataFrame) -> Measured:
    """the same policies: k3 in loss follows π − ref, and has another sign at the second action alone"""
    (row,) = _example(rows, "four actions", "k3-loss")
    return {
        "off": np.array(row["gradient"]) - (POLICY - REFERENCE),
        "turned": int(row["flipped"]),
        "second_action": row["gradient"][1],
        "second_action_of_the_truth": row["truth"][1],
        "gradient": _vector(row["gradient"]),
    }


@claims.measure("the descriptions of the estimators", "in float64", unbiased_as_described=EVERY, biased=above(0))
def _unbiased(rows: pd.DataFrame) -> Measured:
    """of all registered estimators of one step those are unbiased that are said to follow ∇KL(π‖ref)"""
    four = need(rows, "examples", example="four actions")
    unbiased = four["relative_error"] < EXACT
    agrees = unbiased == four["named"].map(lambda named: named == {"reverse_kl": 1.0})
    return {
        "unbiased_as_described": agrees,
        "biased": int((~unbiased).sum()),
        "unbiased": int(unbiased.sum()),
        "not_as_described": list(four[~agrees]["estimator"]) or "none",
    }


# --- distance --------------------------------------------------------------------------------------------------------
claims.column(
    "k2 in loss is right at every distance",
    f"{TANG}; Liu et al. 2025",
    "near the reference gradients are a thousandth of what they are sums of",
    "relative_error_high",
    near(0, 1e-9),
    "distance",
    estimator="k2-loss",
)

claims.column(
    "k1 in loss has no gradient at any distance",
    TANG,
    "of the truth, as for k2",
    "size_high",
    near(0, 1e-9),
    "distance",
    estimator="k1-loss",
)


def _slopes(rows: pd.DataFrame, estimator: str, quantity: str) -> dict[int, float]:
    """By vocabulary: how the logarithm of a median grows with that of √KL near the reference, on random paths."""
    found = need(rows, "distance", estimator=estimator, path="random", seed=0)
    near = found[found["kl"] <= NEAR].groupby("vocabulary")
    slopes = {
        size: float(np.polyfit(np.log(mine["kl"]) / 2, np.log(mine[quantity]), 1)[0])
        for size, mine in near
        if len(mine) > 1
    }
    require(slopes)
    return slopes


SECOND_ORDER = "medians of KL up to 0.001, where the second order tells already"


@claims.measure("Liu et al. 2025; Deng 2026", SECOND_ORDER, slope=near(1, 0.05))
def _linear(rows: pd.DataFrame) -> Measured:
    """k3 in loss: near the reference the relative error falls linearly with the distance √KL"""
    slopes = _slopes(rows, "k3-loss", "relative_error")
    return {"slope": list(slopes.values()), "V": list(slopes)}


# 1 − w = u − u²/2 + …: what k3 adds to the truth is −E[g u²/2], which is also what k2 in the reward follows.
claims.column(
    "k3 in loss: up to a KL of {kl} the error is that of the next order, `E[g u²/2]`, within {bound:±.0%}",
    OWN,
    "the third order is √KL of the second",
    "relative_error / second_order",
    near(1, 0.01),
    "distance",
    estimator="k3-loss",
    path="random",
    kl=at_most(1e-5),
)


@claims.measure(
    f"{TANG}; Shah et al. 2025; Deng 2026",
    f"rows keep eight figures; {SECOND_ORDER}",
    size_over_error_of_k3_in_loss=near(1, ROUNDED),
    slope=near(1, 0.05),
)
def _same_rate(rows: pd.DataFrame) -> Measured:
    """k3 in reward: the gradient vanishes as linearly with √KL, and is that error of k3 in loss at every distance"""
    reward, loss = (need(rows, "distance", estimator=name) for name in ("k3-reward", "k3-loss"))
    both = known(reward.merge(loss, on=PLACE, suffixes=("", "_loss")))
    return {
        "size_over_error_of_k3_in_loss": both["size"] / both["relative_error_loss"],
        "slope": list(_slopes(rows, "k3-reward", "size").values()),
    }


# --- signs and sizes -------------------------------------------------------------------------------------------------
@claims.measure(
    OWN,
    "actions whose pull is below 1e-6 of the gradient are not counted",
    otherwise=exactly(0),
    distances_with_some=at_least(1),
)
def _turned(rows: pd.DataFrame) -> Measured:
    """k3 in loss pulls an action the wrong way exactly where `0 < u < KL`"""
    # The truth is π(u − KL), k3 in the loss π(1 − w), whose sign is that of u.
    found = need(rows, "distance", estimator="k3-loss", path=("random", "sharpened"), vocabulary=above(2))
    off, turned = int(found["flips_off"].sum()), int((found["flipped"] > 0).sum())
    # Few policies of few actions may have no such action at all.
    require(turned or off)
    return {"otherwise": off, "distances_with_some": turned, "of": len(found)}


claims.column(
    "with two actions k3 in loss never pulls the wrong way: KL is an average of two u of opposite sign",
    OWN,
    "shares of pairs",
    "any_flipped",
    exactly(0),
    "distance",
    estimator="k3-loss",
    vocabulary=2,
)


@claims.measure(
    OWN,
    "some hundred actions, log-ratios of unequal spread",
    share_over_formula=near(1, 0.2),
    vocabulary=at_least(100),
    kl=(0.001, 0.00316, 0.01),
)
def _how_often(rows: pd.DataFrame, vocabulary: Bound, kl: tuple[float, ...]) -> Measured:
    """for random log-ratios of {vocabulary} actions or more, at a KL of {kl}, k3 in loss pulls a share within
    {share_over_formula:±.0%} of `√(KL/4π)` of all actions the wrong way"""
    # u of N(·, 2 KL): the density at 0 is 1/√(4π KL), the window KL.
    found = need(
        rows, "distance", estimator="k3-loss", path="random", kl=kl, vocabulary=vocabulary, pairs=at_least(ENOUGH)
    )
    return {"share_over_formula": found["flipped"] / (found["kl"] / (4 * math.pi)) ** 0.5, "share": found["flipped"]}


@claims.measure(
    OWN,
    "medians and means of a hundred pairs",
    share=near(0.5, 0.05),
    cosine=near(0, 0.2),
    vocabulary=at_least(32),
    kl=at_most(NEAR),
)
def _coin(rows: pd.DataFrame, vocabulary: Bound, kl: Bound) -> Measured:
    """k3 in reward, with {vocabulary} actions or more and a KL up to {kl}, pulls {share} of the actions the wrong way,
    but for {share:±}, at a cosine within {cosine:±} of zero: its direction is that of a coin"""
    # An even function of u against an odd one.
    found = need(
        rows, "distance", estimator="k3-reward", path="random", vocabulary=vocabulary, kl=kl, pairs=at_least(ENOUGH)
    )
    return {"share": found["flipped"], "cosine": found["cosine"]}


# All other actions keep their proportions, so that one direction is left; an action goes from r to b ≤ ½.
# ‖π − ref‖/‖π(u − KL)‖ = (b − r)/(b(1 − b)(logit b − logit r)) = x(1 − x)/(b(1 − b)) for some x between.
for _path, _words, _strongest, _size in (
    (
        "taken up",
        "unlikely action taken up: k3 in loss pulls back in the right direction, too weakly",
        "size_high",
        below(1),
    ),
    (
        "dropped",
        "likely action dropped: k3 in loss pulls back in the right direction, too strongly",
        "size_low",
        above(1),
    ),
):

    @claims.measure(
        OWN,
        "of the nine of ten pairs in the middle",
        claim=f"one {_words}, {{vocabulary}} actions or more and KL up to {{kl}}",
        cosine=near(1, ROUNDED),
        size=_size,
        path=_path,
        strongest=_strongest,
        vocabulary=at_least(32),
        kl=at_most(1),
    )
    def _one_action(rows: pd.DataFrame, path: str, strongest: str, vocabulary: Bound, kl: Bound) -> Measured:
        found = need(rows, "distance", estimator="k3-loss", path=path, vocabulary=vocabulary, kl=kl)
        return {"cosine": found["cosine_low"], "size": found[strongest]}


# k3 in the reward is the truth less k3 in the loss, and there is one direction: 1 − size of it is left.
claims.column(
    "one likely action dropped: k3 in reward pushes straight away from the reference, at every distance",
    OWN,
    "rows keep eight figures; at most one pair in ten is above",
    "cosine_high",
    near(-1, ROUNDED),
    "distance",
    estimator="k3-reward",
    path="dropped",
    vocabulary=at_least(32),
)


@claims.measure(OWN, "rows keep eight figures", derivative_times_truth=below(0), off_formula=near(0, 1e-7))
def _repels_binary(rows: pd.DataFrame) -> Measured:
    """two actions, `ref = (½, ½)`: k3 in reward pushes away from the reference wherever the policy is, by
    `log(p/(1 − p)) − (p − ½)/(p(1 − p))`"""
    found = need(rows, "binary", estimator="k3-reward", probability=lambda x: x != 0.5)
    p, derivative = found["probability"], found["derivative"]
    width = p * (1 - p)
    return {
        "derivative_times_truth": derivative * found["true_derivative"],
        "off_formula": (derivative - np.log(p / (1 - p)) + (p - 0.5) / width) / (1 + 1 / width),
    }


@claims.measure(OWN, SECOND_ORDER, slope=near(-1, 0.05))
def _abs(rows: pd.DataFrame) -> Measured:
    """the absolute value pulls as strongly however near the reference: relative to the truth like `1/√KL`"""
    return {"slope": list(_slopes(rows, "abs-loss", "size").values())}


# --- tables and numbers ----------------------------------------------------------------------------------------------
def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """Every estimator of one step on the two examples; those that agree in everything share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    examples = select(rows, "examples")
    for name in examples["estimator"].unique() if len(examples) else ():
        try:
            (binary,), (four,) = (_example(examples, example, name) for example in ("binary", "four actions"))
        except Missing:
            continue
        line = (
            _shown(binary["derivative"], 5),
            ", ".join(_shown(value, 3) for value in four["gradient"]),
            _shown(four["relative_error"], 3),
            "–" if pd.isna(four["cosine"]) else _shown(four["cosine"], 3),
            _shown(four["size"], 3),
            _shown(four["std"], 2),
        )
        lines.setdefault(line, []).append(name)
    titles = ("binary, d/dp", "four actions", "bias", "cosine", "size", "std")
    ordered = sorted(lines.items(), key=lambda line: (float(line[0][2]), float(line[0][5]), line[1]))
    return {
        "table": [{"estimators": ", ".join(names), **dict(zip(titles, line, strict=True))} for line, names in ordered]
    }


numbers.single("examples", {"estimators": ("estimator", "nunique")})
numbers.single("examples", {"unbiased": ("relative_error", lambda x: (x < EXACT).sum())}, example="four actions")
numbers.melt("examples", ["derivative"], ["estimator"], derivative=pd.notna)

numbers.single("distance", {"pairs": ("pairs", "max")})
numbers.melt(
    "distance",
    ["relative_error", "cosine", "size", "flipped", "any_flipped"],
    ["estimator", "path", "vocabulary", "kl"],
    seed=0,
)
