"""Claims, tables and numbers: one step near and far, values and gradients of Gaussians, noise by length."""

import math
from contextlib import suppress

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, exactly, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Missing, Row, known, need, ordered, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted

from .experiment import ANCHOR, ESTIMATORS, EXAMPLES, PARTS, PLACEMENTS, PUBLISHED

EXACT = 1e-10
ROUNDED = 1e-6  # rows keep eight figures, of levels that are solved for to as many
NEAR = 1e-3
ENOUGH = 50  # pairs that a frequency is judged by
TANG = "Tang & Munos 2025"
CHEN = "Chen 2026, a post with a script, check_kl.py"
POLGRAD = "polgrad 2026, docs/derivations/kl.md"

claims = Claims("differentiate-the-estimate")
numbers = Numbers()
tidy = ordered(PARTS)


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


def _shown(value: float, digits: int) -> str:
    """Without a sign or decimals where it is zero."""
    return "0" if abs(value) < EXACT else f"{value:.{digits}f}".replace("-", "−")


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
    }


# --- distance --------------------------------------------------------------------------------------------------------


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


@claims.measure(f"{TANG}; Shah et al. 2025; Deng 2026", SECOND_ORDER, slope=near(1, 0.05))
def _same_rate(rows: pd.DataFrame) -> Measured:
    """k3 in reward: the gradient vanishes as linearly with √KL, relative to the truth"""
    return {"slope": list(_slopes(rows, "k3-reward", "size").values())}


# --- signs and sizes -------------------------------------------------------------------------------------------------


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
MIDDLE = "of the nine of ten pairs in the middle"
FAR_TOO = {"vocabulary": at_least(32), "kl": at_most(1)}


@claims.measure(OWN, MIDDLE, cosine=near(1, ROUNDED), size=below(1), path="taken up", strongest="size_high", **FAR_TOO)
def _taken_up(rows: pd.DataFrame, path: str, strongest: str, vocabulary: Bound, kl: Bound) -> Measured:
    """one unlikely action taken up: k3 in loss pulls back in the right direction, too weakly, {vocabulary} actions or
    more and KL up to {kl}"""
    found = need(rows, "distance", estimator="k3-loss", path=path, vocabulary=vocabulary, kl=kl)
    return {"cosine": found["cosine_low"], "size": found[strongest]}


@claims.measure(OWN, MIDDLE, cosine=near(1, ROUNDED), size=above(1), path="dropped", strongest="size_low", **FAR_TOO)
def _dropped(rows: pd.DataFrame, path: str, strongest: str, vocabulary: Bound, kl: Bound) -> Measured:
    """one likely action dropped: k3 in loss pulls back in the right direction, too strongly, {vocabulary} actions or
    more and KL up to {kl}"""
    return _taken_up(rows, path, strongest, vocabulary, kl)


# k3 in the reward is the truth less k3 in the loss, and there is one direction: 1 − size of it is left.


@claims.measure(OWN, "at most one pair in ten is above", cosine=near(-1, ROUNDED), vocabulary=at_least(32))
def _away(rows: pd.DataFrame, vocabulary: Bound) -> Measured:
    """one likely action dropped: k3 in reward pushes straight away from the reference, at every distance"""
    found = need(rows, "distance", estimator="k3-reward", path="dropped", vocabulary=vocabulary)
    return {"cosine": found["cosine_high"]}


@claims.measure(OWN, SECOND_ORDER, slope=near(-1, 0.05))
def _abs(rows: pd.DataFrame) -> Measured:
    """the absolute value pulls as strongly however near the reference: relative to the truth like `1/√KL`"""
    return {"slope": list(_slopes(rows, "abs-loss", "size").values())}


# --- Gaussians -------------------------------------------------------------------------------------------------------
# Schulman's tables: KL → estimator → (bias/KL, std/KL), as printed.
PRINTED = {
    0.005: {"k1-loss": (0.0, 20.0), "k2-loss": (0.002, 1.42), "k3-loss": (0.0, 1.42)},
    0.5: {"k1-loss": (0.0, 2.0), "k2-loss": (0.25, 1.73), "k3-loss": (0.0, 1.7)},
}


def _values(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and variance of the values, by KL and estimator; Missing unless all estimators are there."""
    found = need(rows, "gaussians", kind="value").set_index(["kl", "estimator"])[["mean", "variance", "truth"]]
    require(set(found.index.unique("estimator")) == set(ESTIMATORS))
    return found.astype(float)


for _kl in PRINTED:

    @claims.measure(
        "Schulman 2020, tables",
        "rounding of the printed table",
        kl=_kl,
        claim="bias and standard deviation of k1, k2, k3 at KL {kl:g}, over KL, are as printed",
        bias_off_printed=near(0, 6e-4),
        std_off_printed=near(0, 6e-3),
    )
    def _printed(rows: pd.DataFrame, kl: float) -> Measured:
        found, printed = _values(need(rows, kl=kl)).loc[kl], pd.DataFrame(PRINTED[kl], index=["bias", "std"]).T
        std = found["variance"] ** 0.5 / kl
        return {
            "bias_off_printed": found["mean"] / kl - 1 - printed["bias"],
            "std_off_printed": (std - printed["std"]) / printed["std"].clip(lower=1),
        }


@claims.measure(OWN, "an order at each level of KL", beaten=EVERY)
def _never_best(rows: pd.DataFrame) -> Measured:
    """where means differ and widths do not, k2 is the best value at no sample size: k1 or k3 errs less with one sample
    and with infinitely many"""
    values = _values(rows)
    bias = (values["mean"] - values["truth"]).unstack("estimator")
    error = values["variance"].unstack("estimator") + bias**2
    # variance/n + bias² is linear in 1/n: who is better with one sample and with infinitely many always is.
    two, others = "k2-loss", ["k1-loss", "k3-loss"]
    beaten = error[others].lt(error[two], axis=0) & bias[others].abs().lt(bias[two].abs(), axis=0)
    return {"beaten": beaten.any(axis=1)}


def _wholes(rows: pd.DataFrame) -> pd.DataFrame:
    """Both parameters together: bias and standard deviation over the length of the truth."""
    found = need(rows, "gaussians", kind="gradient")
    squares = found.assign(size=found["truth"] ** 2, bias=(found["mean"] - found["truth"]) ** 2)
    total = squares.groupby(["estimator", "placement", "kl"])[["size", "bias", "variance"]].sum()
    return pd.DataFrame({"bias": total["bias"], "std": total["variance"]}).div(total["size"], axis=0) ** 0.5


@claims.measure(
    "Tang & Munos 2025; Liu et al. 2025",
    "float64 for no bias; a bias is called one above a thousandth of the value, a twentieth of the gradient",
    value_bias_k3=near(0, 1e-9),
    value_bias_k2=above(1e-3),
    value_variance_k3_over_k2=below(1),
    gradient_bias_k2=near(0, 1e-9),
    gradient_bias_of_others=above(0.05),
    gradient_std_k2_over_k3=below(1),
)
def _reversed(rows: pd.DataFrame) -> Measured:
    """the best value is not the best gradient: as a value k3 is unbiased and quieter, k2 biased; of the losses only k2
    is unbiased, and quieter than k3"""
    # At Schulman's two levels.
    gaussians = need(rows, kl=tuple(PRINTED))
    values, gradient = _values(gaussians), _wholes(gaussians).xs("loss", level="placement").unstack("estimator")
    bias = (values["mean"] / values["truth"] - 1).unstack("estimator")
    variance = values["variance"].unstack("estimator")
    return {
        "value_bias_k3": bias["k3-loss"],
        "value_bias_k2": bias["k2-loss"],
        "value_variance_k3_over_k2": variance["k3-loss"] / variance["k2-loss"],
        "gradient_bias_k2": gradient["bias"]["k2-loss"],
        "gradient_bias_of_others": gradient["bias"][["k1-loss", "k3-loss"]],
        "gradient_std_k2_over_k3": gradient["std"]["k2-loss"] / gradient["std"]["k3-loss"],
    }


# --- lengths ---------------------------------------------------------------------------------------------------------
SHAH = "Shah et al. 2025 (arXiv 2512.21852), Fig. 2"
TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the product rule for E[k]"
# Distances near the reference and away from it. The stated pairs are solved for to these, so not to the last bit.
CLOSE, FAR = at_most(0.1), at_least(0.8 - 1e-9)
# The order of one pair is looked for from this length on, to that at which its distance is given.
SHORT = 6
ROUNDING = "relative to the gradient, exact up to rounding"
WHICH = ["estimator", "placement"]
K1_LOSS, K1_REWARD = ("k1-loss", "loss"), ("k1-loss", "reward")
K3_REWARD, K3_BOTH = ("k3-loss", "reward"), ("k3-loss", "both")


def _cells(rows: pd.DataFrame, column: str, **wanted: object) -> pd.DataFrame:
    """A row for each length, distance and way to hold it; across, each estimator and placement."""
    found = need(rows, "length", **wanted)
    return found.pivot_table(column, ["length", "kl", "hold"], WHICH, sort=False)


@claims.measure(SHAH, "a bias below one percent of the gradient would not be called clear", bias_of_k3=above(0.01))
def _biased(rows: pd.DataFrame) -> Measured:
    """for the stated pair k3 in the loss and k3 in the reward are biased at every length: by more than {bias_of_k3:.0%}
    of the gradient"""
    return {"bias_of_k3": _cells(rows, "bias")[[("k3-loss", "loss"), K3_REWARD]]}


@claims.measure(SHAH, "an order", largest_is_k3_in_reward=EVERY)
def _largest(rows: pd.DataFrame) -> Measured:
    """for the stated pair k3 in the reward has the largest bias of the four at every length and distance"""
    return {"largest_is_k3_in_reward": _cells(rows, "bias")[list(PUBLISHED)].idxmax(axis=1) == K3_REWARD}


def _std(rows: pd.DataFrame, kl: Bound, **wanted: object) -> pd.DataFrame:
    """Standard deviations in the cells whose rollouts are this far from the reference."""
    std = _cells(rows, "std", **wanted)
    return known(std[kl(_cells(rows, "rollout_kl", **wanted)[K1_REWARD])])


@claims.measure(SHAH, "an order", noisiest_is_k1_in_loss=EVERY, kl=CLOSE)
def _noisiest(rows: pd.DataFrame, kl: Bound) -> Measured:
    """near the reference (KL up to {kl}), for the stated pair, k1 in the loss is the noisiest of the four at every
    length"""
    std = _std(rows, kl)[list(PUBLISHED)]
    return {
        "noisiest_is_k1_in_loss": std.idxmax(axis=1) == K1_LOSS,
        "times_k1_in_reward": std[K1_LOSS] / std[K1_REWARD],
    }


@claims.measure(OWN, "the root of a difference of exact variances", kl=within(0.1, 0.8))
def _equal(rows: pd.DataFrame) -> Measured:
    """the two are equally noisy at a KL of {kl} nats for whole sequences, at every length, for the stated pair"""
    return {"kl": need(rows, "equal noise")["equal_at"]}


@claims.measure(OWN, "an order", pairs_that_change=at_least(1), shortest=at_most(SHORT), longest=at_least(ANCHOR))
def _one_pair(rows: pd.DataFrame, shortest: Bound, longest: Bound) -> Measured:
    """of one pair the order changes with length alone: k1 in the loss is noisier up to some length, less noisy from
    there on, between {shortest} tokens and {longest}"""
    where = {"hold": "pair", "kl": FAR}
    lengths = need(rows, "length", estimator=K1_LOSS[0], placement=K1_LOSS[1], **where)["length"]
    require(shortest(lengths.min()) and longest(lengths.max()))
    found = _changes(rows)
    return {"pairs_that_change": len(found), "between": [f"T = {short} and {long}" for short, long in found] or "none"}


def _changes(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """Of one pair, the lengths between which k1 in the loss becomes the less noisy, where it is far enough away."""
    found, std = [], _cells(rows, "std", hold="pair")
    for kl, mine in std.groupby("kl"):
        last = mine.groupby("length").last()
        noisier = last[K1_LOSS] > last[K1_REWARD]
        short, long = last.index[noisier], last.index[~noisier]
        if FAR(kl) and len(short) and len(long) and short.max() < long.min():
            found.append((int(short.max()), int(long.min())))
    return found


@claims.measure(OWN, "a ratio of exact variances of two unbiased gradients", times_fewer=above(2), kl=CLOSE)
def _both(rows: pd.DataFrame, kl: Bound) -> Measured:
    """near the reference (KL up to {kl}), for the stated pair, k3 in both places needs more than {times_fewer} times
    fewer rollouts than k1 in the reward, at every length"""
    return {"times_fewer": _gain(rows, kl)}


def _gain(rows: pd.DataFrame, kl: Bound, **wanted: object) -> pd.Series:
    """Ratio of the rollouts that k1 in the reward and k3 in both places need at distances, both unbiased."""
    std = _std(rows, kl, **wanted)
    return (std[K1_REWARD] / std[K3_BOTH]) ** 2


DRAWS = "shares of independent draws"


@claims.measure(OWN, DRAWS, share=within(0.5, 0.95), what="most_biased_is_k3_reward")
def _most_biased(rows: pd.DataFrame, what: str) -> Measured:
    """in {share:.0%} of random pairs, and no more, k3 in the reward has the largest bias of the four: it depends on the
    pair"""
    found = need(rows, "random")
    pairs = found["pairs"].sum()
    require(pairs >= ENOUGH)
    return {"share": found[what].sum() / pairs, "pairs": pairs}


@claims.measure(OWN, DRAWS, share=within(0.5, 1.0), what="k3_both_less_noisy_than_k1_reward")
def _less_noisy(rows: pd.DataFrame, what: str) -> Measured:
    """k3 in both places beats k1 in the reward on most random pairs, {share:.0%} of them, and not on all"""
    return _most_biased(rows, what)


# --- tables and numbers ----------------------------------------------------------------------------------------------
def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """The examples, Schulman's two levels of Gaussians, and the shortest and longest sequences; those with rows."""
    made = {"table": _examples_table, "gaussians": _gaussians_table, "lengths": _lengths_table}
    found = {}
    for name, make in made.items():
        with suppress(Missing):
            found[name] = make(rows)
    return found


def _examples_table(rows: pd.DataFrame) -> list[Row]:
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
    return [{"estimators": ", ".join(names), **dict(zip(titles, line, strict=True))} for line, names in ordered]


def _gaussians_table(rows: pd.DataFrame) -> list[Row]:
    gaussians = need(rows, kl=tuple(PRINTED))
    values, wholes = _values(gaussians), _wholes(gaussians)
    parts = need(gaussians, kind="gradient").set_index(["kl", "estimator", "placement", "parameter"])
    bias = parts["mean"] - parts["truth"]
    return [
        {
            "KL": f"{kl:g}",
            "estimator": _short(name),
            "placed in": placement,
            "value bias": _number(values["mean"][kl, name] / kl - 1),
            "value std": _number(math.sqrt(values["variance"][kl, name]) / kl),
            "bias, mean": _number(bias[kl, name, placement, "mean"] / math.sqrt(2 * kl)),
            "bias, width": _number(bias[kl, name, placement, "width"] / math.sqrt(2 * kl)),
            "gradient std": _number(wholes["std"][name, placement, kl]),
        }
        for kl in gaussians["kl"].unique()
        for placement in PLACEMENTS
        for name in ESTIMATORS
    ]


def _number(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3g}".replace("-", "−")


def _short(estimator: str) -> str:
    return estimator.removesuffix("-loss")


def _lengths_table(rows: pd.DataFrame) -> list[Row]:
    """Bias and standard deviation relative to the gradient, at the shortest and the longest length."""
    found = need(rows, "length", hold="kl")
    ends = dict.fromkeys((found["length"].min(), found["length"].max()))
    cells = found.set_index(["estimator", "placement", "kl", "length"])[["bias", "std"]].to_dict("index")

    def cell(*at: object) -> str:
        return f"{_zero(cells[at]['bias'])} ± {cells[at]['std']:.2f}" if at in cells else ""

    columns = {f"KL {kl:g}, T = {length}": (kl, length) for kl in sorted(found["kl"].unique()) for length in ends}
    return [
        {
            "estimator": _short(estimator),
            "placed in": placement,
            **{title: cell(estimator, placement, *at) for title, at in columns.items()},
        }
        for estimator in ESTIMATORS
        for placement in PLACEMENTS
    ]


def _zero(bias: float) -> str:
    return "0" if bias < EXACT else f"{bias:.2f}"


@numbers.add
def _of_gaussians(rows: pd.DataFrame) -> Cited:
    yield from melted(_wholes(rows), {"bias": "gradient bias"})
