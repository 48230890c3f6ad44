"""Claims, a table and numbers: the worked examples, how bias and size go with distance, and whose signs turn."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Missing, Row, frame, known, need, records, require, select
from kltest.reproduce.numbers import Numbers

from .settings import EXAMPLES

EXACT = 1e-10
ROUNDED = 1e-6  # rows keep eight figures, of levels that are solved for to as many
NEAR = 1e-3
ENOUGH = 50  # pairs that a frequency is judged by
TANG = "Tang & Munos 2025"
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


@claims.add(f"{TANG}; theory", ", ".join(f"{value:.5f}" for value in BINARY.values()), "1e-10")
def _binary(rows: pd.DataFrame) -> Answer:
    """P = (0.8, 0.2), Q = (0.5, 0.5): d/dp of k1, k2, k3 in loss, of k1, k3 in reward; the truth is log 4"""
    found = _example(rows, "binary", *BINARY)
    derivatives = [row["derivative"] for row in found]
    right = abs(found[0]["truth"][0] / (P * (1 - P)) - math.log(4)) < EXACT
    return ", ".join(f"{one:.5f}" for one in derivatives), right and _near(derivatives, list(BINARY.values()))


@claims.add("theory", f"{KL:.4f}, {HALF_SQUARE:.4f}, {KL:.4f}", "1e-10")
def _four_values(rows: pd.DataFrame) -> Answer:
    """π = (.4, .3, .2, .1), ref = (.1, .2, .3, .4): the values that k1, k2 and k3 average to"""
    logged = [row["logged"] for row in _example(rows, "four actions", "k1-loss", "k2-loss", "k3-loss")]
    return ", ".join(f"{one:.4f}" for one in logged), _near(logged, [KL, HALF_SQUARE, KL])


def _vector(values: Iterable[float]) -> str:
    return f"({', '.join(_shown(value, 4) for value in values)})"


def _shown(value: float, digits: int) -> str:
    """Without a sign or decimals where it is zero."""
    return "0" if abs(value) < EXACT else f"{value:.{digits}f}".replace("-", "−")


@claims.add("theory", _vector(TRUTH), "1e-10")
def _four_truth(rows: pd.DataFrame) -> Answer:
    """the same policies: the gradient of KL(π‖ref), and of k2 in loss"""
    (row,) = _example(rows, "four actions", "k2-loss")
    return _vector(row["gradient"]), _near(row["truth"], TRUTH) and _near(row["gradient"], TRUTH)


@claims.add("theory", f"{_vector(POLICY - REFERENCE)}, one sign turned", "1e-10")
def _four_k3(rows: pd.DataFrame) -> Answer:
    """the same policies: k3 in loss has another sign at the second action"""
    (row,) = _example(rows, "four actions", "k3-loss")
    turned = row["flipped"] == 1 and row["gradient"][1] > 0 > row["truth"][1]
    return f"{_vector(row['gradient'])}, {row['flipped']} turned", turned and _near(row["gradient"], POLICY - REFERENCE)


def _described(rows: pd.DataFrame) -> tuple[set[str], int]:
    """The estimators that are said to follow ∇KL(π‖ref), and how many there are."""
    four = records(select(rows, "examples", example="four actions"))
    return {row["estimator"] for row in four if row["named"] == {"reverse_kl": 1.0}}, len(four)


@claims.add("the descriptions of the estimators",
    lambda rows: "{} of {}".format(*(len(one) if isinstance(one, set) else one for one in _described(rows))),
    "1e-10")  # fmt: skip
def _unbiased(rows: pd.DataFrame) -> Answer:
    """of all registered estimators of one step these are unbiased"""
    four = need(rows, "examples", example="four actions")
    found, (expected, _) = set(four[four["relative_error"] < EXACT]["estimator"]), _described(rows)
    others = f", not those: {', '.join(sorted(found ^ expected))}" if found ^ expected else ""
    return f"{len(found)} of {len(four)}{others}", found == expected and len(four) > len(found)


# --- distance --------------------------------------------------------------------------------------------------------
claims.between("k2 in loss is right at every distance", f"{TANG}; Liu et al. 2025", "no bias",
    "1e-9: near the reference gradients are a thousandth of what they are sums of",
    "{count} distances, paths and vocabularies, the worst relative error {high:.0e}", "relative_error_high", "distance",
    estimator="k2-loss", below=1e-9)  # fmt: skip

claims.between("k1 in loss has no gradient at any distance", TANG, "0", "1e-9 of the truth",
    "{count} distances and vocabularies, the largest {high:.0e}", "size_high", "distance", estimator="k1-loss",
    below=1e-9)  # fmt: skip


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


def _as_steep(slopes: dict[int, float], expected: float) -> Answer:
    said = ", ".join(f"{slope:.3f} (V = {size})" for size, slope in slopes.items())
    return said, all(abs(slope - expected) < 0.05 for slope in slopes.values())


@claims.add("theory", "slope 1 against √KL", "0.05: medians of KL up to 0.001, where the second order tells already")
def _linear(rows: pd.DataFrame) -> Answer:
    """k3 in loss: the relative error falls linearly with the distance from the reference"""
    return _as_steep(_slopes(rows, "k3-loss", "relative_error"), 1)


# 1 − w = u − u²/2 + …: what k3 adds to the truth is −E[g u²/2], which is also what k2 in the reward follows.
claims.between("k3 in loss: near the reference the error is that of the next order, E[g u²/2]", OWN, "the same size",
    "1 % up to KL 1e-5: the third order is √KL of the second", "{count} distances, the worst off by {high:.1%}",
    lambda found: (found["relative_error"] / found["second_order"] - 1).abs(), "distance", estimator="k3-loss",
    path="random", kl=lambda x: x <= 1e-5, below=0.01)  # fmt: skip


@claims.add(f"{TANG}; Shah et al. 2025; theory", "size equal to the error of k3 in loss, slope 1 against √KL",
    "1e-6: rows keep eight figures; 0.05 for slopes")  # fmt: skip
def _same_rate(rows: pd.DataFrame) -> Answer:
    """k3 in reward: the gradient vanishes at the same rate, and is that error"""
    reward, loss = (need(rows, "distance", estimator=name) for name in ("k3-reward", "k3-loss"))
    both = known(reward.merge(loss, on=PLACE, suffixes=("", "_loss")))
    gap = (both["size"] / both["relative_error_loss"] - 1).abs()
    said, steep = _as_steep(_slopes(rows, "k3-reward", "size"), 1)
    return f"{len(gap)} distances, the worst off by {gap.max():.0e}; {said}", gap.max() < ROUNDED and steep


# --- signs and sizes -------------------------------------------------------------------------------------------------
@claims.add(OWN, "no action otherwise", "actions whose pull is below 1e-6 of the gradient are not counted")
def _turned(rows: pd.DataFrame) -> Answer:
    """k3 in loss pulls an action the wrong way exactly where 0 < u < KL"""
    # The truth is π(u − KL), k3 in the loss π(1 − w), whose sign is that of u.
    found = need(rows, "distance", estimator="k3-loss", path=("random", "sharpened"))
    found = found[found["vocabulary"] > 2]
    off, turned = int(found["flips_off"].sum()), found["flipped"] > 0
    # Few policies of few actions may have no such action at all.
    require(turned.any() or off)
    said = f"{off} otherwise; some turned at {turned.sum()} of {len(found)} distances, paths and vocabularies"
    return said, off == 0


claims.between("with two actions k3 in loss never pulls the wrong way: KL is an average of two u of opposite sign",
    OWN, "never", "", "{high:.0%} of pairs at worst, {count} distances and paths", "any_flipped", "distance",
    estimator="k3-loss", vocabulary=2, below=1e-300)  # fmt: skip


@claims.add(OWN, "0.28 √KL", "a fifth: some hundred actions, log-ratios of unequal spread")
def _how_often(rows: pd.DataFrame) -> Answer:
    """k3 in loss pulls a share of about √(KL/4π) of all actions the wrong way, for random log-ratios"""
    # u of N(·, 2 KL): the density at 0 is 1/√(4π KL), the window KL.
    enough = {"vocabulary": lambda x: x >= 100, "pairs": lambda x: x >= ENOUGH}
    found = need(rows, "distance", estimator="k3-loss", path="random", kl=(0.001, 0.00316, 0.01), **enough)
    ratio = found["flipped"] / (found["kl"] / (4 * math.pi)) ** 0.5
    said = ", ".join(f"{row['flipped']:.4f} at KL {row['kl']:g}" for row in records(found))
    return said, (ratio - 1).abs().max() < 0.2


@claims.add(OWN, "half of the actions, cosine about 0", "0.05 and 0.2: medians and means of a hundred pairs")
def _coin(rows: pd.DataFrame) -> Answer:
    """k3 in reward pulls half of the actions the wrong way near the reference: its direction is that of a coin"""
    # An even function of u against an odd one.
    found = need(rows, "distance", estimator="k3-reward", path="random")
    found = known(found[(found["vocabulary"] >= 32) & (found["kl"] <= NEAR) & (found["pairs"] >= ENOUGH)])
    said = ", ".join(
        f"{row['flipped']:.3f} and {row['cosine']:.2f} (V = {row['vocabulary']})"
        for row in records(select(found, kl=1e-4))
    )
    return said, (found["flipped"] - 0.5).abs().max() < 0.05 and found["cosine"].abs().max() < 0.2


def _one_action(rows: pd.DataFrame, path: str, strongest: str) -> tuple[str, pd.DataFrame]:
    """All other actions keep their proportions, so that one direction is left; an action goes from r to b ≤ ½.

    ‖π − ref‖/‖π(u − KL)‖ = (b − r)/(b(1 − b)(logit b − logit r)) = x(1 − x)/(b(1 − b)) for some x between.
    """
    near = {"vocabulary": lambda x: x >= 32, "kl": lambda x: x <= 1}
    found = need(rows, "distance", estimator="k3-loss", path=path, **near)
    row = found.loc[getattr(found["size"], strongest)()]
    cosine = 1 - found["cosine_low"].min()
    return f"cosine 1 to {cosine:.0e}; size {row['size']:.2f} at KL {row['kl']:g}, V = {row['vocabulary']}", found


@claims.add(OWN, "cosine 1, size below 1", "1e-6 for the cosine; nine of ten pairs for the size")
def _taken_up(rows: pd.DataFrame) -> Answer:
    """one unlikely action taken up: k3 in loss pulls back in the right direction, too weakly"""
    said, found = _one_action(rows, "taken up", "idxmin")
    return said, found["cosine_low"].min() > 1 - ROUNDED and found["size_high"].max() < 1


@claims.add(OWN, "cosine 1, size above 1", "1e-6 for the cosine; nine of ten pairs for the size")
def _dropped(rows: pd.DataFrame) -> Answer:
    """one likely action dropped: k3 in loss pulls back in the right direction, too strongly"""
    said, found = _one_action(rows, "dropped", "idxmax")
    return said, found["cosine_low"].min() > 1 - ROUNDED and found["size_low"].min() > 1


# k3 in the reward is the truth less k3 in the loss, and there is one direction: 1 − size of it is left.
claims.between("one likely action dropped: k3 in reward pushes straight away from the reference, at every distance",
    OWN, "cosine −1", "1e-6", "{high:.6f} at most, {count} distances and vocabularies", "cosine_high", "distance",
    estimator="k3-reward", path="dropped", vocabulary=lambda x: x >= 32, below=-1 + ROUNDED)  # fmt: skip


@claims.add(OWN, "log(p/(1 − p)) − (p − ½)/(p(1 − p)), of the other sign than the truth", "rows keep eight figures")
def _repels_binary(rows: pd.DataFrame) -> Answer:
    """two actions, ref = (½, ½): k3 in reward pushes away from the reference wherever the policy is"""
    found = need(rows, "binary", estimator="k3-reward", probability=lambda x: x != 0.5)
    p, derivative = found["probability"], found["derivative"]
    width = p * (1 - p)
    away = (derivative * found["true_derivative"] < 0).sum()
    exact = (derivative - np.log(p / (1 - p)) + (p - 0.5) / width).abs() < 1e-7 * (1 + 1 / width)
    return f"of the other sign at {away} of {len(found)} probabilities", away == len(found) and exact.all()


@claims.add(OWN, "slope −1 against √KL", "0.05, as above")
def _abs(rows: pd.DataFrame) -> Answer:
    """the absolute value pulls as strongly however near the reference: relative to the truth 1/√KL"""
    return _as_steep(_slopes(rows, "abs-loss", "size"), -1)


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
numbers.melt("distance", ["relative_error", "cosine", "size", "flipped", "any_flipped"],
    ["estimator", "path", "vocabulary", "kl"], seed=0)  # fmt: skip


def _near(found: Sequence[float], expected: Sequence[float] | np.ndarray) -> bool:
    return bool(np.abs(np.array(found) - np.array(expected)).max() < EXACT)
