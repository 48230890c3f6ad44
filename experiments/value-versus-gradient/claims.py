"""Claims, a table and numbers: values against formulas and samples, changes of order, and gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, exactly, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Missing, Row, frame, known, need, records, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .gaussians import Gaussians, gradient_terms, moments, value_terms
from .settings import ESTIMATORS, PLACEMENTS

EXACT = 1e-9
EXACT_WHY = "of the standard deviation or size: float64, integrated over a line where w² grows to 1e100"
SCHULMAN = "Schulman 2020, tables"
TANG = "Tang & Munos 2025, Fig. 1"
# Schulman's tables: KL → estimator → (bias/KL, std/KL), as printed.
PRINTED = {
    0.005: {"k1-loss": (0.0, 20.0), "k2-loss": (0.002, 1.42), "k3-loss": (0.0, 1.42)},
    0.5: {"k1-loss": (0.0, 2.0), "k2-loss": (0.25, 1.73), "k3-loss": (0.0, 1.7)},
}
# What each follows, as {named gradient: coefficient}.
FOLLOWS: dict[tuple[str, str], dict[str, float]] = {
    ("k1-loss", "loss"): {},
    ("k2-loss", "loss"): {"R": 1.0},
    ("k3-loss", "loss"): {"F": 1.0},
    ("k1-loss", "reward"): {"R": 1.0},
    ("k2-loss", "reward"): {"Q": 1.0, "R": -1.0},
    ("k3-loss", "reward"): {"R": 1.0, "F": -1.0},
    ("k1-loss", "both"): {"R": 1.0},
    ("k2-loss", "both"): {"Q": 1.0},
    ("k3-loss", "both"): {"R": 1.0},
}
WORDS = {"R": "∇KL(π‖ref)", "F": "∇KL(ref‖π)", "Q": "∇E[u²/2]"}
ORDERED = ["direction", "one", "other", "quantity"]

claims = Claims("value-versus-gradient")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Values, their errors and gradients, then orders; columns are the same in all of them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    kinds = ("value", "error", "gradient", "order")

    def order(row: Row) -> tuple[Any, ...]:
        place = PLACEMENTS.index(row["placement"]) if row["kind"] == "gradient" else 0
        where = () if row["kind"] == "order" else (row["width"], row["kl"], row["samples"], row["seed"])
        return kinds.index(row["kind"]), where, row.get("estimator", row.get("direction")), place, row.get("size", 0)

    return frame([{column: row.get(column) for column in columns} for row in sorted(rows, key=order)])


# --- values ----------------------------------------------------------------------------------------------------------
def _values(rows: pd.DataFrame, kl: float | None = None) -> pd.DataFrame:
    """The first values of each estimator and level of KL, at a width of 1; of one level, of all estimators."""
    found = need(rows, kind="value", width=1.0).drop_duplicates(["kl", "estimator"]).set_index(["kl", "estimator"])
    found = found[["mean", "variance", "truth"]].astype(float)
    if kl is None:
        return found
    require({(kl, name) for name in ESTIMATORS} <= set(found.index))
    return found.loc[kl].loc[list(ESTIMATORS)]


def _schulman_variances(m: float) -> dict[str, float]:
    return {"k1-loss": m, "k2-loss": m**2 / 2 + m**3 / 4, "k3-loss": math.exp(m) - 1 - m}


for _kl in PRINTED:

    @claims.measure(
        SCHULMAN,
        "rounding of the printed table; float64 for the formulas",
        kl=_kl,
        claim="bias and standard deviation of k1, k2, k3 at KL {kl:g}, over KL, are as printed, and the roots of `m`, "
        "`m²/2 + m³/4` and `e^m − 1 − m`, m = `2 KL`",
        bias_off_printed=near(0, 6e-4),
        std_off_printed=near(0, 6e-3),
        bias_off=near(0, EXACT),
        std_over_formula=near(1, EXACT),
    )
    def _printed(rows: pd.DataFrame, kl: float) -> Measured:
        found, exact = _values(rows, kl), pd.Series(_schulman_variances(2 * kl))
        bias, std = found["mean"] / kl - 1, found["variance"] ** 0.5 / kl
        printed = pd.DataFrame(PRINTED[kl], index=["bias", "std"]).T
        expected = pd.Series({name: kl / 2 if name == "k2-loss" else 0.0 for name in ESTIMATORS})
        return {
            "bias_off_printed": bias - printed["bias"],
            "std_off_printed": (std - printed["std"]) / printed["std"].clip(lower=1),
            "bias_off": (bias - expected) / std.clip(lower=1),
            "std_over_formula": std / (exact**0.5 / kl),
            "found": [f"{_short(name)} {bias[name]:.4f}, {std[name]:.4f}" for name in ESTIMATORS],
        }


@claims.measure(
    f"Aribandi 2026 for values at one width; {OWN}",
    EXACT_WHY,
    mean_off=near(0, EXACT),
    variance_over_formula=near(1, EXACT),
)
def _formulas(rows: pd.DataFrame) -> Measured:
    """the registered functions, integrated, have the moments of the closed form"""
    off, ratio = [], []
    for row in records(need(rows, kind=("value", "gradient"))):
        pair = Gaussians.at(row["kl"], row["width"])
        value = row["kind"] == "value"
        of = (row["estimator"],) if value else (row["estimator"], row["placement"], row["part"])
        mean, variance = moments((value_terms if value else gradient_terms)(*of, pair), pair)
        off.append((row["mean"] - mean) / math.sqrt(variance))
        ratio.append(row["variance"] / variance)
    return {"mean_off": off, "variance_over_formula": ratio}


# Of a few hundred means of a quarter of a million samples none should be five exact standard errors off; those of w
# have heavy tails, for which five is not too many.
FIVE = "a few hundred means of a quarter of a million samples; heavy tails"


@claims.measure(OWN, FIVE, standard_errors_off=near(0, 5.0))
def _sampled_means(rows: pd.DataFrame) -> Measured:
    """sampled values and gradients average to the exact expectations, within {standard_errors_off:±} exact standard
    errors"""
    found = need(rows, kind=("value", "gradient")).dropna(subset=["sampled_mean"])
    error = (found["variance"] / found["samples"]) ** 0.5
    return {"standard_errors_off": (found["sampled_mean"] - found["mean"]) / error}


@claims.measure(
    TANG,
    f"{FIVE}: elsewhere a quarter of a million samples cannot tell",
    standard_errors_off=near(0, 5.0),
    kl=at_most(0.5),
    width=at_least(1),
)
def _sampled_errors(rows: pd.DataFrame, kl: Bound, width: Bound) -> Measured:
    """the squared error of averages of n samples is `variance/n + bias²`, within {standard_errors_off:±} standard
    errors, up to a KL of {kl} and for a width of {width} or more"""
    found = need(rows, kind="error", kl=kl, width=width)
    return {"standard_errors_off": (found["sampled"] - found["error"]) / found["standard_error"]}


def _lambert() -> float:
    """KL at which e^m = 1 + 2m: m = −½ − W₋₁(−e^(−½)/2)."""
    from scipy.special import lambertw

    return float(-0.5 - lambertw(-math.exp(-0.5) / 2, -1).real) / 2


def _cubic() -> float:
    """KL at which m³/64 + m²/4 + m/2 = 1: by Vieta's trigonometry or Cardano, here as numpy finds roots."""
    return float(max(root.real for root in np.roots([1 / 64, 1 / 4, 1 / 2, -1]) if abs(root.imag) < 1e-12)) / 2


def _narrow() -> float:
    """KL at which narrowing makes Var k3 = Var k1, from the closed form."""
    from scipy.optimize import brentq

    def gap(width: float) -> float:
        pair = Gaussians(0.0, width)
        one, three = (moments(value_terms(name, pair), pair)[1] for name in ("k1-loss", "k3-loss"))
        return math.log(three / one)

    return Gaussians(0.0, brentq(gap, 0.75, 0.9, xtol=1e-15)).kl


for _claim, _source, _which, _expected in (
    (
        "with one sample k2 errs less than k1 up to the KL at which `m³/64 + m²/4 + m/2 = 1`, m = `2 KL`",
        f"{TANG}; {OWN}",
        ("shifted", "k2-loss", "k1-loss", "error"),
        _cubic,
    ),
    (
        "k3 errs less than k1 up to the KL at which `e^m = 1 + 2m`, by Lambert's W",
        f"{TANG}; {OWN}",
        ("shifted", "k3-loss", "k1-loss", "error"),
        _lambert,
    ),
    (
        "k2 is less noisy than k1 up to the golden ratio less one",
        OWN,
        ("shifted", "k2-loss", "k1-loss", "variance"),
        lambda: (math.sqrt(5) - 1) / 2,
    ),
    (
        "narrowing the policy makes k3 noisier than k1 at the KL of the closed form",
        OWN,
        ("narrower", "k3-loss", "k1-loss", "error"),
        _narrow,
    ),
):

    @claims.measure(
        _source,
        "roots in float64",
        claim=_claim,
        kl_over_expected=near(1, 1e-9),
        better_below=EVERY,
        which=_which,
        expected=_expected,
    )
    def _order(rows: pd.DataFrame, which: tuple[str, ...], expected: Callable[[], float]) -> Measured:
        row = records(need(rows, kind="order", **dict(zip(ORDERED, which, strict=True))))[-1]
        kl = math.nan if row["kl"] is None else row["kl"]
        return {"kl_over_expected": kl / expected(), "better_below": bool(row["better_at_first"]), "kl": kl}


def crossing(one: Row, other: Row) -> float | None:
    """The sample size at which the mean squared errors variance/n + bias² of two values are equal."""
    gap = (one["mean"] - one["truth"]) ** 2 - (other["mean"] - other["truth"]) ** 2
    size = (other["variance"] - one["variance"]) / gap if gap else math.inf
    return size if 0 < size < math.inf else None


def _crossing_formula(kl: float) -> float:
    return 64 * (1 - kl - kl**2) / (2 * kl) ** 3


for _kl in PRINTED:

    @claims.measure(
        TANG,
        "a difference of variances, and a bias, lose digits near the reference",
        kl=_kl,
        claim="at KL {kl:g} k2 is a better value than k1 up to `64 (1 − m/2 − m²/4)/m³` samples, m = `2 KL`, and the "
        "worst of the three at {far} times as many",
        samples_over_formula=near(1, 1e-7),
        worst_far_beyond=EVERY,
        far=10,
    )
    def _crossing(rows: pd.DataFrame, kl: float, far: int) -> Measured:
        values, expected = _values(rows, kl), _crossing_formula(kl)
        found = crossing(values.loc["k2-loss"], values.loc["k1-loss"]) or math.nan
        errors = values["variance"] / (far * expected) + (values["mean"] - kl) ** 2
        return {
            "samples_over_formula": found / expected,
            "worst_far_beyond": errors.idxmax() == "k2-loss",
            "samples": found,
        }


@claims.measure(OWN, "an order at each level of KL", beaten=EVERY)
def _never_best(rows: pd.DataFrame) -> Measured:
    """where means differ and widths do not, k2 is the best value at no sample size: k1 or k3 errs less with one sample
    and with infinitely many"""
    values = _values(rows)
    bias = (values["mean"] - values.index.get_level_values("kl")).unstack("estimator").dropna()
    error = (values["variance"].unstack("estimator") + bias**2).dropna()
    require(not bias.empty and set(bias) == set(ESTIMATORS))
    # variance/n + bias² is linear in 1/n: who is better with one sample and with infinitely many always is.
    two, others = "k2-loss", ["k1-loss", "k3-loss"]
    beaten = error[others].lt(error[two], axis=0) & bias[others].abs().lt(bias[two].abs(), axis=0)
    return {"beaten": beaten.any(axis=1)}


# --- gradients -------------------------------------------------------------------------------------------------------
def named(symbol: str, pair: Gaussians) -> dict[str, float]:
    """The gradients of the three functions of mean and width, in closed form.

    E[u²/2] = ½(d²s² + ½(s² − 1)² + KL²);  KL(ref‖π) = log s + (1 + d²)/(2s²) − ½.
    """
    d, s, kl = pair.shift, pair.width, pair.kl
    return {
        "R": {"mean": d, "width": s**2 - 1},
        "F": {"mean": d / s**2, "width": 1 - (1 + d**2) / s**2},
        "Q": {"mean": d * s**2 + kl * d, "width": d**2 * s**2 + (s**2 - 1) * s**2 + kl * (s**2 - 1)},
    }[symbol]


for _which, _combination in FOLLOWS.items():

    @claims.measure(
        "Tang & Munos 2025; Liu et al. 2025; Shah et al. 2025",
        EXACT_WHY,
        off=near(0, EXACT),
        claim=f"{_which[0][:2]} in {_which[1]} follows "
        f"{' − '.join(f'`{WORDS[symbol]}`' for symbol in _combination) or 'nothing'} on Gaussians",
        which=_which,
    )
    def _follows(rows: pd.DataFrame, which: tuple[str, str]) -> Measured:
        found = need(rows, kind="gradient", estimator=which[0], placement=which[1])

        def gap(row: Row) -> float:
            pair = Gaussians.at(row["kl"], row["width"])
            expected = sum(factor * named(symbol, pair)[row["part"]] for symbol, factor in FOLLOWS[which].items())
            return (row["mean"] - expected) / math.sqrt(row["variance"])

        return {"off": list(map(gap, records(found)))}


# Variances with respect to the mean at a width of 1, written out, m = 2 KL.
NOISE: dict[tuple[str, str], Callable[[float], float]] = {
    ("k1-loss", "loss"): lambda m: 1.0,
    ("k2-loss", "loss"): lambda m: 2 * m + m**2 / 4,
    ("k3-loss", "loss"): lambda m: math.exp(m) * (1 + 4 * m) - 1 - 3 * m,
    ("k1-loss", "both"): lambda m: 3 * m + (1 + m / 2) ** 2 - m,
}


@claims.measure(OWN, EXACT_WHY, variance_over_formula=near(1, EXACT))
def _noise(rows: pd.DataFrame) -> Measured:
    """the noise of the gradient with respect to the mean, m = `2 KL`: in the loss k1 one, k2 `2m + m²/4`, k3
    `e^m (1 + 4m) − 1 − 3m`; k1 in both `3m + (1 + m/2)² − m`"""
    return {
        "variance_over_formula": [
            row["variance"] / NOISE[row["estimator"], row["placement"]](2 * row["kl"])
            for row in records(need(rows, kind="gradient", width=1.0, part="mean"))
            if (row["estimator"], row["placement"]) in NOISE
        ]
    }


def _wholes(rows: pd.DataFrame) -> pd.DataFrame:
    """Both parameters together at a width of 1: bias and standard deviation over the length of the truth."""
    which = ["estimator", "placement", "kl"]
    found = need(rows, kind="gradient", width=1.0).drop_duplicates([*which, "part"], keep="last")
    squares = found.assign(size=found["truth"] ** 2, bias=(found["mean"] - found["truth"]) ** 2)
    total = squares.groupby(which)[["size", "bias", "variance"]].sum()
    return pd.DataFrame({"bias": total["bias"], "std": total["variance"]}).div(total["size"], axis=0) ** 0.5


@claims.measure(
    "Tang & Munos 2025; Liu et al. 2025",
    "float64 for no bias; a bias is called one above a thousandth of the value, a twentieth of the gradient",
    value_bias_k3=near(0, 1e-9),
    value_bias_k2=above(1e-3),
    value_variance_k3_over_k2=below(1),
    gradient_bias_k2=near(0, 1e-9),
    gradient_bias_k1=above(0.05),
    gradient_bias_k3=above(0.05),
    gradient_std_k2_over_k3=below(1),
)
def _reversed(rows: pd.DataFrame) -> Measured:
    """the best value is not the best gradient: as a value k3 is unbiased and quieter, k2 biased; of the losses only k2
    is unbiased, and quieter than k3"""
    wholes, found = _wholes(rows), []
    for kl in PRINTED:
        require({(name, "loss", kl) for name in ESTIMATORS} <= set(wholes.index))
        values = _values(rows, kl)
        bias, variance = values["mean"] / values["truth"] - 1, values["variance"]
        one, two, three = (wholes.loc[(name, "loss", kl)] for name in ESTIMATORS)
        found.append(
            {
                "value_bias_k3": bias["k3-loss"],
                "value_bias_k2": bias["k2-loss"],
                "value_variance_k3_over_k2": variance["k3-loss"] / variance["k2-loss"],
                "gradient_bias_k2": two["bias"],
                "gradient_bias_k1": one["bias"],
                "gradient_bias_k3": three["bias"],
                "gradient_std_k2_over_k3": two["std"] / three["std"],
            }
        )
    return dict(pd.DataFrame(found))


@claims.measure(OWN, EXACT_WHY, off=near(0, EXACT), truth=above(0.05))
def _k3_in_reward(rows: pd.DataFrame) -> Measured:
    """between equally wide Gaussians k3 in the reward does not pull on the mean at all, at any distance, where the
    truth is `√(2 KL)`"""
    found = need(rows, kind="gradient", width=1.0, estimator="k3-loss", placement="reward", part="mean")
    found = found.drop_duplicates("kl", keep="last")
    return {"off": found["mean"] / found["variance"] ** 0.5, "truth": found["truth"], "kl": found["kl"]}


@claims.measure(
    "Liu et al. 2025; Wang & Zhang 2025; Aribandi 2026",
    "w − 1 + u + 1 − w is u up to rounding, and w is large at times",
    apart=below(1e-9),
)
def _same_noise(rows: pd.DataFrame) -> Measured:
    """k2 in loss, k1 in reward and k3 in both are the same sample by sample: their sampled means agree"""
    found = need(rows, kind="gradient")
    which = list(zip(found["estimator"], found["placement"], strict=True))
    # u·g each.
    three = found[[one in (("k2-loss", "loss"), ("k1-loss", "reward"), ("k3-loss", "both")) for one in which]]
    by = three.groupby(["kl", "width", "part", "seed", "samples"])["sampled_mean"].agg(["min", "max", "size"])
    by = known(by[by["size"] == 3])
    return {"apart": by["max"] - by["min"]}


# --- widths ----------------------------------------------------------------------------------------------------------
# E_π[w²] = ∫ref²/π; towards s² = ½ its variance grows beyond every bound, and k1's does not.
EDGE = math.sqrt(0.5) * (1 - 1e-12)


def _variance(width: float, estimator: str) -> float:
    pair = Gaussians(0.0, width)
    return moments(value_terms(estimator, pair), pair)[1]


@claims.measure(
    OWN,
    "the closed form; E[w²] is finite where 2s² > 1",
    variance_at_the_edge=exactly(math.inf),
    growth_100_times_nearer=near(10, 0.1),
    times_k1_at_width_08=above(20),
)
def _infinite(rows: pd.DataFrame) -> Measured:
    """a policy at most `√½` times as wide as its reference gives k3 an infinite variance (towards it like the root of
    what is left), while k1's is finite; at a width of `s = 0.8` k3 is over
    {times_k1_at_width_08} times the variance of k1"""
    finite = need(rows, kind="value", kl=0.5, width=0.8).groupby("estimator")["variance"].first()
    require({"k1-loss", "k3-loss"} <= set(finite.index))
    # E[w²] = s²/√(2s² − 1) where means agree: 100 times nearer the edge, 10 times larger.
    nearer, nearest = (_variance(EDGE * (1 + by), "k3-loss") for by in (1e-6, 1e-8))
    return {
        "variance_at_the_edge": _variance(EDGE, "k3-loss"),
        "growth_100_times_nearer": nearest / nearer,
        "times_k1_at_width_08": finite["k3-loss"] / finite["k1-loss"],
        "edge_kl": Gaussians(0.0, EDGE).kl,
        "variance_of_k1_there": _variance(EDGE, "k1-loss"),
    }


@claims.measure(OWN, "the widths tried", crossings=exactly(0), less_noisy_at_first=EVERY)
def _wider(rows: pd.DataFrame) -> Measured:
    """widening the policy never makes k3 noisier than k1, over the widths tried"""
    which = dict(zip(ORDERED, ("wider", "k3-loss", "k1-loss", "error"), strict=True))
    row = records(need(rows, kind="order", **which))[-1]
    crossings, at_first = int(row.get("kl") is not None), bool(row["better_at_first"])
    return {"crossings": crossings, "less_noisy_at_first": at_first, "up_to_kl": row["to_kl"]}


# --- tables and numbers ----------------------------------------------------------------------------------------------
def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """Schulman's two levels: each way to write the penalty, as a value and as a gradient."""
    try:
        return {"table": [row for kl in PRINTED for row in _table(rows, kl)]}
    except Missing:
        return {"table": []}


def _table(rows: pd.DataFrame, kl: float) -> Cited:
    values = select(_values(rows).reset_index(), kl=kl).set_index("estimator")
    found, wholes, size = select(rows, kind="gradient", width=1.0, kl=kl), _wholes(rows), math.sqrt(2 * kl)
    bias = ((found["mean"] - found["truth"]) / size).groupby([found["estimator"], found["placement"], found["part"]])
    bias = bias.last()
    for placement in PLACEMENTS:
        for name in ESTIMATORS:
            if name not in values.index or (name, placement, kl) not in wholes.index:
                continue
            yield {
                "KL": f"{kl:g}",
                "estimator": _short(name),
                "placed in": placement,
                "value bias": _number(values["mean"][name] / kl - 1),
                "value std": _number(math.sqrt(values["variance"][name]) / kl),
                "bias, mean": _number(bias[name, placement, "mean"]),
                "bias, width": _number(bias[name, placement, "width"]),
                "gradient std": _number(wholes.loc[(name, placement, kl), "std"]),
            }


@numbers.add
def _of_values(rows: pd.DataFrame) -> Cited:
    yield number("KL where k3 becomes infinite", Gaussians(0.0, math.sqrt(0.5)).kl)
    yield number("samples", need(rows, kind=("value", "error", "gradient"))["samples"].max())
    found = _values(rows).reset_index()
    found = found.assign(std=found["variance"] ** 0.5 / found["kl"])
    yield from melted(found, {"std": "value std"}, ["estimator", "kl"])
    for kl in found["kl"].unique():
        values = _values(rows, kl)
        yield number("crossing of k2-loss and k1-loss", crossing(values.loc["k2-loss"], values.loc["k1-loss"]), kl=kl)


@numbers.add
def _of_gradients(rows: pd.DataFrame) -> Cited:
    wholes = _wholes(rows).reset_index()
    yield from melted(wholes, {"bias": "gradient bias", "std": "gradient std"}, ["estimator", "placement", "kl"])


@numbers.add
def _of_orders(rows: pd.DataFrame) -> Cited:
    orders = need(rows, kind="order").rename(columns={"quantity": "of"})
    yield from melted(orders, {"kl": "order"}, [*ORDERED[:3], "of"])


def _number(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3g}".replace("-", "−")


def _short(estimator: str) -> str:
    return estimator.removesuffix("-loss")


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(other)
