"""Claims, a table and numbers: values against formulas and samples, changes of order, and gradients."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Missing, Row, frame, known, need, records, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .gaussians import Gaussians, gradient_terms, moments, value_terms
from .settings import ESTIMATORS, PLACEMENTS

EXACT = 1e-9
EXACT_WHY = f"{EXACT:g} of the standard deviation or size: float64, integrated over a line where w² grows to 1e100"
# Of a few hundred means of a quarter of a million samples none should be five exact standard errors off; those of w
# have heavy tails, for which five is not too many.
SIGMAS = 5.0
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


def _printed(rows: pd.DataFrame, kl: float) -> Answer:
    found, m = _values(rows, kl), 2 * kl
    exact = _schulman_variances(m)
    bias, std = found["mean"] / kl - 1, found["variance"] ** 0.5 / kl
    judged = []
    for name, (printed_bias, printed_std) in PRINTED[kl].items():
        expected_bias = m / 4 if name == "k2-loss" else 0.0
        judged += [abs(bias[name] - printed_bias) < 6e-4, abs(std[name] - printed_std) < 6e-3 * max(1, printed_std)]
        judged += [_close(std[name], math.sqrt(exact[name]) / kl)]
        judged += [abs(bias[name] - expected_bias) < 1e-9 * max(1, std[name])]
    return "; ".join(f"{_short(name)} {bias[name]:.4f}, {std[name]:.4f}" for name in ESTIMATORS), all(judged)


def _schulman_variances(m: float) -> dict[str, float]:
    return {"k1-loss": m, "k2-loss": m**2 / 2 + m**3 / 4, "k3-loss": math.exp(m) - 1 - m}


for _kl, _table in PRINTED.items():
    _stds = {name: math.sqrt(variance) / _kl for name, variance in _schulman_variances(2 * _kl).items()}
    claims.add(
        SCHULMAN,
        "; ".join(f"{name[:2]} {bias:g}, {_stds[name]:.4f}" for name, (bias, _) in _table.items()),
        "rounding of the printed table; 1e-9 against the formulas m, m²/2 + m³/4 and e^m − 1 − m, m = 2 KL",
        claim=f"bias and standard deviation of k1, k2, k3 at KL {_kl:g}, over KL",
    )(partial(_printed, kl=_kl))


@claims.add("theory", "the same", EXACT_WHY)
def _formulas(rows: pd.DataFrame) -> Answer:
    """the registered functions, integrated, have the moments of the closed form"""
    judged, worst = need(rows, kind=("value", "gradient")), 0.0
    for row in records(judged):
        pair = Gaussians.at(row["kl"], row["width"])
        value = row["kind"] == "value"
        of = (row["estimator"],) if value else (row["estimator"], row["placement"], row["part"])
        mean, variance = moments((value_terms if value else gradient_terms)(*of, pair), pair)
        worst = max(worst, abs(row["mean"] - mean) / math.sqrt(variance), abs(row["variance"] / variance - 1))
    return f"{len(judged)} means and variances, the worst off by {worst:.0e}", worst < EXACT


claims.between("sampled values and gradients average to the exact expectations", "theory",
    f"within {SIGMAS:g} exact standard errors", f"{SIGMAS:g} standard errors",
    "{count} means, the worst {high:.1f} standard errors off",
    lambda found: (found["sampled_mean"] - found["mean"]).abs() / (found["variance"] / found["samples"]) ** 0.5,
    kind=("value", "gradient"), below=SIGMAS)  # fmt: skip

# Only where a quarter of a million samples can tell: the square of a heavy tail has no useful standard error.
claims.between("the squared error of averages of n samples is variance/n + bias²", TANG,
    f"within {SIGMAS:g} standard errors", f"{SIGMAS:g} standard errors",
    "{count} sizes, levels and estimators, the worst {high:.1f} standard errors off",
    lambda found: (found["sampled"] - found["error"]).abs() / found["standard_error"],
    kind="error", kl=lambda x: x <= 0.5, width=lambda x: x >= 1, below=SIGMAS)  # fmt: skip


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


def _order(rows: pd.DataFrame, expected: Callable[[], float], **which: str) -> Answer:
    row = records(need(rows, kind="order", **which))[-1]
    if row["kl"] is None or row["kl"] != row["kl"]:
        return "no crossing", False
    return f"{row['kl']:.5f}", row["better_at_first"] and _close(row["kl"], expected())


for _claim, _source, _which, _expected, _why in (
    ("with one sample k2 errs less than k1 up to this KL", f"{TANG}; theory",
     ("shifted", "k2-loss", "k1-loss", "error"), _cubic, "the root of m³/64 + m²/4 + m/2 = 1"),
    ("k3 errs less than k1 up to this KL", f"{TANG}; theory",
     ("shifted", "k3-loss", "k1-loss", "error"), _lambert, "the root of e^m = 1 + 2m by Lambert's W"),
    ("k2 is less noisy than k1 up to the golden ratio less one", OWN,
     ("shifted", "k2-loss", "k1-loss", "variance"), lambda: (math.sqrt(5) - 1) / 2, "m²/4 + m/2 = 1"),
    ("narrowing the policy makes k3 noisier than k1 at this KL", OWN,
     ("narrower", "k3-loss", "k1-loss", "error"), _narrow, "the root of the closed form"),
):  # fmt: skip
    claims.add(_source, lambda rows, of=_expected: f"{of():.5f}", f"1e-9, {_why}", claim=_claim)(
        partial(_order, expected=_expected, **dict(zip(ORDERED, _which, strict=True)))
    )


def crossing(one: Row, other: Row) -> float | None:
    """The sample size at which the mean squared errors variance/n + bias² of two values are equal."""
    gap = (one["mean"] - one["truth"]) ** 2 - (other["mean"] - other["truth"]) ** 2
    size = (other["variance"] - one["variance"]) / gap if gap else math.inf
    return size if 0 < size < math.inf else None


def _crossing_formula(kl: float) -> float:
    return 64 * (1 - kl - kl**2) / (2 * kl) ** 3


def _crossing(rows: pd.DataFrame, kl: float) -> Answer:
    """Beyond it the bias of k2 tells, and k2 is the worst of the three."""
    values, expected = _values(rows, kl), _crossing_formula(kl)
    found = crossing(values.loc["k2-loss"], values.loc["k1-loss"])
    if found is None:
        return "no crossing", False
    far = values["variance"] / (10 * expected) + (values["mean"] - kl) ** 2
    # The difference of two variances and a squared bias of (KL/2)²·m² lose digits near the reference.
    return f"{found:.6g}", abs(found / expected - 1) < 1e-7 and far.idxmax() == "k2-loss"


for _kl in PRINTED:
    claims.add(
        TANG,
        f"{_crossing_formula(_kl):.6g}",
        "1e-7; 64 (1 − m/2 − m²/4)/m³",
        claim=f"at KL {_kl:g} k2 is a better value than k1 up to this many samples, and the worst of three far beyond",
    )(partial(_crossing, kl=_kl))


@claims.add(OWN, "k1 or k3 errs less with one sample and with infinitely many")
def _never_best(rows: pd.DataFrame) -> Answer:
    """where means differ and widths do not, k2 is the best value at no sample size"""
    values = _values(rows)
    bias = (values["mean"] - values.index.get_level_values("kl")).unstack("estimator").dropna()
    error = (values["variance"].unstack("estimator") + bias**2).dropna()
    require(not bias.empty and set(bias) == set(ESTIMATORS))
    # variance/n + bias² is linear in 1/n: who is better with one sample and with infinitely many always is.
    two, others = "k2-loss", ["k1-loss", "k3-loss"]
    beaten = error[others].lt(error[two], axis=0) & bias[others].abs().lt(bias[two].abs(), axis=0)
    hits = beaten.any(axis=1).sum()
    return f"so at {hits} of {len(bias)} levels of KL", hits == len(bias)


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


def _follows(rows: pd.DataFrame, which: tuple[str, str]) -> Answer:
    found = need(rows, kind="gradient", estimator=which[0], placement=which[1])

    def gap(row: Row) -> float:
        pair = Gaussians.at(row["kl"], row["width"])
        expected = sum(factor * named(symbol, pair)[row["part"]] for symbol, factor in FOLLOWS[which].items())
        return abs(row["mean"] - expected) / math.sqrt(row["variance"])

    worst = max(map(gap, records(found)))
    said = f"{len(found)} levels, widths and parameters, the worst off by {worst:.0e} standard deviations"
    return said, worst < EXACT


for _which, _combination in FOLLOWS.items():
    _words = " − ".join(WORDS[symbol] for symbol in _combination) or "0"
    claims.add(
        "Tang & Munos 2025; Liu et al. 2025; Shah et al. 2025",
        _words,
        EXACT_WHY,
        claim=f"{_which[0][:2]} in {_which[1]} follows {_words} on Gaussians",
    )(partial(_follows, which=_which))

# Variances with respect to the mean at a width of 1, written out, m = 2 KL.
NOISE: dict[tuple[str, str], Callable[[float], float]] = {
    ("k1-loss", "loss"): lambda m: 1.0,
    ("k2-loss", "loss"): lambda m: 2 * m + m**2 / 4,
    ("k3-loss", "loss"): lambda m: math.exp(m) * (1 + 4 * m) - 1 - 3 * m,
    ("k1-loss", "both"): lambda m: 3 * m + (1 + m / 2) ** 2 - m,
}


@claims.add("theory", "the formulas", EXACT_WHY)
def _noise(rows: pd.DataFrame) -> Answer:
    """the noise of the gradient with respect to the mean: k1 1, k2 2m + m²/4, k3 e^m (1 + 4m) − 1 − 3m"""
    judged = [
        abs(row["variance"] / NOISE[row["estimator"], row["placement"]](2 * row["kl"]) - 1)
        for row in records(need(rows, kind="gradient", width=1.0, part="mean"))
        if (row["estimator"], row["placement"]) in NOISE
    ]
    require(judged)
    return f"{len(judged)} variances, the worst off by {max(judged):.0e}", max(judged) < EXACT


def _wholes(rows: pd.DataFrame) -> pd.DataFrame:
    """Both parameters together at a width of 1: bias and standard deviation over the length of the truth."""
    which = ["estimator", "placement", "kl"]
    found = need(rows, kind="gradient", width=1.0).drop_duplicates([*which, "part"], keep="last")
    squares = found.assign(size=found["truth"] ** 2, bias=(found["mean"] - found["truth"]) ** 2)
    total = squares.groupby(which)[["size", "bias", "variance"]].sum()
    return pd.DataFrame({"bias": total["bias"], "std": total["variance"]}).div(total["size"], axis=0) ** 0.5


@claims.add("Tang & Munos 2025; Liu et al. 2025",
    "k3 unbiased and quieter as a value; of the losses only k2 unbiased, and quieter than k3",
    "1e-9 for no bias")  # fmt: skip
def _reversed(rows: pd.DataFrame) -> Answer:
    """the best value is not the best gradient: k3 is the better value, k2 the better loss"""
    said, judged, wholes = [], [], _wholes(rows)
    for kl in PRINTED:
        require({(name, "loss", kl) for name in ESTIMATORS} <= set(wholes.index))
        values = _values(rows, kl)
        bias = values["mean"] / values["truth"] - 1
        one, two, three = (wholes.loc[(name, "loss", kl)] for name in ESTIMATORS)
        judged += [values["variance"]["k3-loss"] < values["variance"]["k2-loss"], abs(bias["k3-loss"]) < 1e-9]
        judged += [bias["k2-loss"] > 1e-3, two["bias"] < 1e-9 and two["std"] < three["std"]]
        judged += [min(one["bias"], three["bias"]) > 0.05]
        off = values["mean"] / kl - 1
        said.append(
            f"KL {kl:g}: value bias {off['k2-loss']:.4f} (k2), {off['k3-loss']:.4f} (k3); gradient bias "
            f"{two['bias']:.2f} (k2), {three['bias']:.2f} (k3), std {two['std']:.3g} and {three['std']:.3g}"
        )
    return "; ".join(said), all(judged)


@claims.add(OWN, "0, where the truth is √(2 KL)", EXACT_WHY)
def _k3_in_reward(rows: pd.DataFrame) -> Answer:
    """between equally wide Gaussians k3 in the reward does not pull on the mean at all, at any distance"""
    found = need(rows, kind="gradient", width=1.0, estimator="k3-loss", placement="reward", part="mean")
    found = found.drop_duplicates("kl", keep="last")
    worst = (found["mean"].abs() / found["variance"] ** 0.5).max()
    said = f"{worst:.0e} standard deviations at most, KL {', '.join(f'{kl:g}' for kl in found['kl'])}"
    return said, worst < EXACT and found["truth"].min() > 0.05


@claims.add("theory; Liu et al. 2025 for the first two", "the same sampled means",
    "1e-9: w − 1 + u + 1 − w is u up to rounding, and w is large at times")  # fmt: skip
def _same_noise(rows: pd.DataFrame) -> Answer:
    """k2 in loss, k1 in reward and k3 in both are the same sample by sample"""
    found = need(rows, kind="gradient")
    which = list(zip(found["estimator"], found["placement"], strict=True))
    # u·g each.
    three = found[[one in (("k2-loss", "loss"), ("k1-loss", "reward"), ("k3-loss", "both")) for one in which]]
    by = three.groupby(["kl", "width", "part", "seed", "samples"])["sampled_mean"].agg(["min", "max", "size"])
    by = known(by[by["size"] == 3])
    worst = (by["max"] - by["min"]).max()
    return f"{len(by)} means, the worst apart by {worst:.0e}", worst < 1e-9


# --- widths ----------------------------------------------------------------------------------------------------------
# E_π[w²] = ∫ref²/π; towards s² = ½ its variance grows beyond every bound, and k1's does not.
EDGE = math.sqrt(0.5) * (1 - 1e-12)


def _variance(width: float, estimator: str) -> float:
    pair = Gaussians(0.0, width)
    return moments(value_terms(estimator, pair), pair)[1]


@claims.add(OWN,
    lambda rows: f"infinite from KL {math.log(2) / 2 - 0.25:.4f} on, k1's being {_variance(EDGE, 'k1-loss'):.3f}",
    "the closed form; E[w²] is finite where 2s² > 1; at a width of 0.8 k3 twenty times as noisy as k1")  # fmt: skip
def _infinite(rows: pd.DataFrame) -> Answer:
    """a policy at most 0.71 times as wide as its reference gives k3 an infinite variance"""
    finite = need(rows, kind="value", kl=0.5, width=0.8).groupby("estimator")["variance"].first()
    require({"k1-loss", "k3-loss"} <= set(finite.index))
    at, beyond = _variance(EDGE, "k3-loss"), [_variance(EDGE * (1 + by), "k3-loss") for by in (1e-2, 1e-4, 1e-6, 1e-8)]
    said = f"at KL {Gaussians(0.0, EDGE).kl:.4f} {at}, just before {beyond[-1]:.3g}"
    said += f"; at a width of 0.8 and KL 0.5 {finite['k3-loss']:.4g} against {finite['k1-loss']:.4g}"
    # E[w²] = s²/√(2s² − 1) where means agree: 100 times nearer the edge, 10 times larger.
    grows = beyond == sorted(beyond) and abs(beyond[-1] / beyond[-2] / 10 - 1) < 0.01
    return said, at == math.inf and grows and finite["k3-loss"] > 20 * finite["k1-loss"]


@claims.add(OWN, "no crossing, k3 less noisy")
def _wider(rows: pd.DataFrame) -> Answer:
    """widening the policy never makes k3 noisier than k1, up to twice the width"""
    which = dict(zip(ORDERED, ("wider", "k3-loss", "k1-loss", "error"), strict=True))
    row = records(need(rows, kind="order", **which))[-1]
    none = row.get("kl") is None
    return f"{'no crossing' if none else row['kl']} up to KL {row['to_kl']:.2f}", none and row["better_at_first"]


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
