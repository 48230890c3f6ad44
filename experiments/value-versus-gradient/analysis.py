"""What the rows say: values against formulas and samples, where the orders change, and the gradients beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kltest.reproduce import Claim

from .gaussians import Gaussians, gradient_terms, moments, value_terms
from .settings import ESTIMATORS, PLACEMENTS

Row = dict[str, Any]
NAME = "value-versus-gradient"
EXACT = 1e-9
EXACT_WHY = f"{EXACT:g} of the standard deviation or size: float64, integrated over a line where w² grows to 1e100"
# Of a few hundred means of a quarter of a million samples none should be five exact standard errors off; those of w
# have heavy tails, for which five is not too many.
SIGMAS = 5.0
SCHULMAN = "Schulman 2020, tables"
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


def tidy(rows: Sequence[Row]) -> list[Row]:
    """Values, their errors and gradients, then orders; columns are the same in all of them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    kinds = ("value", "error", "gradient", "order")

    def order(row: Row) -> tuple[Any, ...]:
        place = PLACEMENTS.index(row["placement"]) if row["kind"] == "gradient" else 0
        where = () if row["kind"] == "order" else (row["width"], row["kl"], row["samples"], row["seed"])
        return kinds.index(row["kind"]), where, row.get("estimator", row.get("direction")), place, row.get("size", 0)

    return [{column: row.get(column) for column in columns} for row in sorted(rows, key=order)]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What was published, what follows from the formulas, and what is new."""
    return [
        *(_printed(rows, kl) for kl in PRINTED),
        _formulas(rows),
        _sampled(rows),
        _sampled_errors(rows),
        *(_order(rows, *case) for case in ORDERS),
        *(_crossing(rows, kl) for kl in PRINTED),
        _never_best(rows),
        *(_followed(rows, *case) for case in FOLLOWS),
        _noise(rows),
        _reversed(rows),
        _k3_in_reward(rows),
        _same_noise(rows),
        _infinite(rows),
        _wider(rows),
    ]


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Schulman's two levels: each way to write the penalty, as a value and as a gradient."""
    return {"table": [row for kl in PRINTED for row in _table(rows, kl)]}


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """By name; those of a level of KL are at a width of 1."""
    found: dict[str, float | int | str | None] = {"samples": max((r["samples"] or 0 for r in rows), default=None)}
    for (direction, one, other, quantity), row in _orders(rows).items():
        found[f"order of {one} and {other}, {direction}, {quantity}"] = row["kl"]
    found["KL where k3 becomes infinite"] = Gaussians(0.0, math.sqrt(0.5)).kl
    for kl in _levels(rows):
        for estimator in ESTIMATORS:
            value = _value(rows, estimator, kl)
            if value is not None:
                found[f"value std of {estimator}, KL {kl:g}"] = math.sqrt(value["variance"]) / kl
                found[f"value bias of {estimator}, KL {kl:g}"] = value["mean"] / kl - 1
            for placement in PLACEMENTS:
                whole = _whole(rows, estimator, placement, kl)
                if whole is not None:
                    found[f"gradient bias of {estimator}, {placement}, KL {kl:g}"] = whole["bias"]
                    found[f"gradient std of {estimator}, {placement}, KL {kl:g}"] = whole["std"]
        one, two = _value(rows, "k1-loss", kl), _value(rows, "k2-loss", kl)
        if one and two:
            found[f"crossing of k2-loss and k1-loss, KL {kl:g}"] = crossing(two, one)
        whole = _whole(rows, "k2-loss", "loss", kl)
        if whole is not None:
            found[f"samples until k2-loss beats no gradient, KL {kl:g}"] = whole["std"] ** 2
    for row in (r for r in rows if r["kind"] == "value" and r["seed"] == 0):
        name = f"value variance of {row['estimator']}, KL {row['kl']:g}, width {row['width']:g}"
        found[name] = row["variance"]
    return found


def crossing(one: Row, other: Row) -> float | None:
    """The sample size at which the mean squared errors variance/n + bias² of two values are equal."""
    gap = (one["mean"] - one["truth"]) ** 2 - (other["mean"] - other["truth"]) ** 2
    size = (other["variance"] - one["variance"]) / gap if gap else math.inf
    return size if 0 < size < math.inf else None


# --- values ----------------------------------------------------------------------------------------------------------


def _printed(rows: Sequence[Row], kl: float) -> Claim:
    found = {name: _value(rows, name, kl) for name in ESTIMATORS}
    m = 2 * kl
    exact = {"k1-loss": m, "k2-loss": m**2 / 2 + m**3 / 4, "k3-loss": math.exp(m) - 1 - m}

    def holds() -> bool:
        judged = []
        for name, row in found.items():
            bias, std = row["mean"] / kl - 1, math.sqrt(row["variance"]) / kl
            printed_bias, printed_std = PRINTED[kl][name]
            expected_bias = m / 4 if name == "k2-loss" else 0.0
            judged += [abs(bias - printed_bias) < 6e-4, abs(std - printed_std) < 6e-3 * max(1, printed_std)]
            judged += [_close(std, math.sqrt(exact[name]) / kl), abs(bias - expected_bias) < 1e-9 * max(1, std)]
        return all(judged)

    return _claim(
        f"bias and standard deviation of k1, k2, k3 at KL {kl:g}, over KL",
        SCHULMAN,
        "; ".join(
            f"{_short(name)} {bias:g}, {math.sqrt(exact[name]) / kl:.4f}" for name, (bias, _) in PRINTED[kl].items()
        ),
        "; ".join(
            f"{_short(name)} {row['mean'] / kl - 1:.4f}, {math.sqrt(row['variance']) / kl:.4f}"
            for name, row in found.items()
            if row
        ),
        holds if all(found.values()) else None,
        "rounding of the printed table; 1e-9 against the formulas m, m²/2 + m³/4 and e^m − 1 − m, m = 2 KL",
    )


def _formulas(rows: Sequence[Row]) -> Claim:
    """Every mean and variance, of values and gradients, against the Gaussian integrals."""
    worst = 0.0
    judged = [row for row in rows if row["kind"] in ("value", "gradient")]
    for row in judged:
        pair = Gaussians.at(row["kl"], row["width"])
        terms = (
            value_terms(row["estimator"], pair)
            if row["kind"] == "value"
            else gradient_terms(row["estimator"], row["placement"], row["part"], pair)
        )
        mean, variance = moments(terms, pair)
        worst = max(worst, abs(row["mean"] - mean) / math.sqrt(variance), abs(row["variance"] / variance - 1))
    return _claim(
        "the registered functions, integrated, have the moments of the closed form",
        "theory",
        "the same",
        f"{len(judged)} means and variances, the worst off by {worst:.0e}",
        (lambda: worst < EXACT) if judged else None,
        EXACT_WHY,
    )


def _sampled(rows: Sequence[Row]) -> Claim:
    judged = [row for row in rows if row["kind"] in ("value", "gradient")]
    gaps = [abs(row["sampled_mean"] - row["mean"]) / math.sqrt(row["variance"] / row["samples"]) for row in judged]
    return _claim(
        "sampled values and gradients average to the exact expectations",
        "theory",
        f"within {SIGMAS:g} exact standard errors",
        f"{len(gaps)} means, the worst {max(gaps, default=0):.1f} standard errors off",
        (lambda: max(gaps) < SIGMAS) if gaps else None,
        f"{SIGMAS:g} standard errors",
    )


def _sampled_errors(rows: Sequence[Row]) -> Claim:
    """Only where a quarter of a million samples can tell: the square of a heavy tail has no useful standard error."""
    judged = [row for row in rows if row["kind"] == "error" and row["kl"] <= 0.5 and row["width"] >= 1]
    gaps = [abs(row["sampled"] - row["error"]) / row["standard_error"] for row in judged]
    return _claim(
        "the squared error of averages of n samples is variance/n + bias²",
        "Tang & Munos 2025, Fig. 1",
        f"within {SIGMAS:g} standard errors",
        f"{len(gaps)} sizes, levels and estimators, the worst {max(gaps, default=0):.1f} standard errors off",
        (lambda: max(gaps) < SIGMAS) if gaps else None,
        f"{SIGMAS:g} standard errors",
    )


def _lambert() -> float:
    """KL at which e^m = 1 + 2m: m = −½ − W₋₁(−e^(−½)/2)."""
    from scipy.special import lambertw

    return float(-0.5 - lambertw(-math.exp(-0.5) / 2, -1).real) / 2


def _cubic() -> float:
    """KL at which m³/64 + m²/4 + m/2 = 1: by Vieta's trigonometry or Cardano, here as numpy finds roots."""
    import numpy as np

    return float(max(root.real for root in np.roots([1 / 64, 1 / 4, 1 / 2, -1]) if abs(root.imag) < 1e-12)) / 2


def _narrow() -> float:
    """KL at which narrowing makes Var k3 = Var k1, from the closed form."""
    from scipy.optimize import brentq

    def gap(width: float) -> float:
        pair = Gaussians(0.0, width)
        one, three = (moments(value_terms(name, pair), pair)[1] for name in ("k1-loss", "k3-loss"))
        return math.log(three / one)

    return Gaussians(0.0, brentq(gap, 0.75, 0.9, xtol=1e-15)).kl


ORDERS: tuple[tuple[str, str, tuple[str, str, str, str], Callable[[], float], str], ...] = (
    (
        "with one sample k2 errs less than k1 up to this KL",
        "Tang & Munos 2025, Fig. 1; theory",
        ("shifted", "k2-loss", "k1-loss", "error"),
        _cubic,
        "the root of m³/64 + m²/4 + m/2 = 1",
    ),
    (
        "k3 errs less than k1 up to this KL",
        "Tang & Munos 2025, Fig. 1; theory",
        ("shifted", "k3-loss", "k1-loss", "error"),
        _lambert,
        "the root of e^m = 1 + 2m by Lambert's W",
    ),
    (
        "k2 is less noisy than k1 up to the golden ratio less one",
        "this work",
        ("shifted", "k2-loss", "k1-loss", "variance"),
        lambda: (math.sqrt(5) - 1) / 2,
        "m²/4 + m/2 = 1",
    ),
    (
        "narrowing the policy makes k3 noisier than k1 at this KL",
        "this work",
        ("narrower", "k3-loss", "k1-loss", "error"),
        _narrow,
        "the root of the closed form",
    ),
)


def _order(
    rows: Sequence[Row],
    claim: str,
    source: str,
    key: tuple[str, str, str, str],
    expected: Callable[[], float],
    why: str,
) -> Claim:
    row = _orders(rows).get(key)
    found = None if row is None else row["kl"]
    return _claim(
        claim,
        source,
        f"{expected():.5f}",
        "no crossing" if found is None else f"{found:.5f}",
        None if row is None else lambda: found is not None and row["better_at_first"] and _close(found, expected()),
        f"1e-9, {why}",
    )


def _crossing(rows: Sequence[Row], kl: float) -> Claim:
    """Beyond it the bias of k2 tells, and k2 is the worst of the three."""
    one, two, three = (_value(rows, name, kl) for name in ESTIMATORS)
    m = 2 * kl
    expected = 64 * (1 - m / 2 - m**2 / 4) / m**3
    found = crossing(two, one) if one and two else None

    def holds() -> bool:
        far = [row["variance"] / (10 * expected) + (row["mean"] - kl) ** 2 for row in (one, two, three)]
        # The difference of two variances and a squared bias of (KL/2)²·m² lose digits near the reference.
        return found is not None and abs(found / expected - 1) < 1e-7 and max(far) == far[1]

    return _claim(
        f"at KL {kl:g} k2 is a better value than k1 up to this many samples, and the worst of three far beyond",
        "Tang & Munos 2025, Fig. 1",
        f"{expected:.6g}",
        "no crossing" if found is None else f"{found:.6g}",
        holds if one and two and three else None,
        "1e-7; 64 (1 − m/2 − m²/4)/m³",
    )


def _never_best(rows: Sequence[Row]) -> Claim:
    levels = {kl: [_value(rows, name, kl) for name in ESTIMATORS] for kl in _levels(rows)}
    levels = {kl: found for kl, found in levels.items() if all(found)}

    def beaten(kl: float) -> bool:
        """variance/n + bias² is linear in 1/n: who is better with one sample and with infinitely many always is."""
        one, two, three = levels[kl]
        worst_case = two["variance"] + (two["mean"] - kl) ** 2
        return any(
            row["variance"] + (row["mean"] - kl) ** 2 < worst_case and abs(row["mean"] - kl) < abs(two["mean"] - kl)
            for row in (one, three)
        )

    return _claim(
        "where means differ and widths do not, k2 is the best value at no sample size",
        "this work",
        "k1 or k3 errs less with one sample and with infinitely many",
        f"so at {sum(map(beaten, levels))} of {len(levels)} levels of KL",
        (lambda: all(map(beaten, levels))) if levels else None,
    )


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


def _followed(rows: Sequence[Row], estimator: str, placement: str) -> Claim:
    combination = FOLLOWS[estimator, placement]
    mine = [r for r in rows if r["kind"] == "gradient" and (r["estimator"], r["placement"]) == (estimator, placement)]

    def gap(row: Row) -> float:
        pair = Gaussians.at(row["kl"], row["width"])
        expected = sum(factor * named(symbol, pair)[row["part"]] for symbol, factor in combination.items())
        return abs(row["mean"] - expected) / math.sqrt(row["variance"])

    worst = max(map(gap, mine), default=0.0)
    words = " − ".join(WORDS[symbol] for symbol in combination) or "0"
    words = words if "−" not in words or -1.0 in combination.values() else words.replace(" − ", " + ")
    return _claim(
        f"{_short(estimator)} in {placement} follows {words} on Gaussians",
        "Tang & Munos 2025; Liu et al. 2025; Shah et al. 2025",
        words,
        f"{len(mine)} levels, widths and parameters, the worst off by {worst:.0e} standard deviations",
        (lambda: worst < EXACT) if mine else None,
        EXACT_WHY,
    )


def _noise(rows: Sequence[Row]) -> Claim:
    """Variances with respect to the mean at a width of 1, written out."""
    formulas: dict[tuple[str, str], Callable[[float], float]] = {
        ("k1-loss", "loss"): lambda m: 1.0,
        ("k2-loss", "loss"): lambda m: 2 * m + m**2 / 4,
        ("k3-loss", "loss"): lambda m: math.exp(m) * (1 + 4 * m) - 1 - 3 * m,
        ("k1-loss", "both"): lambda m: 3 * m + (1 + m / 2) ** 2 - m,
    }
    judged = [r for r in _at_schulmans(rows) if r["part"] == "mean" and (r["estimator"], r["placement"]) in formulas]
    gaps = [abs(r["variance"] / formulas[r["estimator"], r["placement"]](2 * r["kl"]) - 1) for r in judged]
    return _claim(
        "the noise of the gradient with respect to the mean: k1 1, k2 2m + m²/4, k3 e^m (1 + 4m) − 1 − 3m",
        "theory",
        "the formulas",
        f"{len(gaps)} variances, the worst off by {max(gaps, default=0):.0e}",
        (lambda: max(gaps) < EXACT) if gaps else None,
        EXACT_WHY,
    )


def _reversed(rows: Sequence[Row]) -> Claim:
    levels = {kl: [(_value(rows, name, kl), _whole(rows, name, "loss", kl)) for name in ESTIMATORS] for kl in PRINTED}
    complete = all(value and whole for found in levels.values() for value, whole in found)

    def holds() -> bool:
        judged = []
        for found in levels.values():
            (_, g1), (v2, g2), (v3, g3) = found
            judged.append(v3["variance"] < v2["variance"] and abs(v3["mean"] / v3["truth"] - 1) < 1e-9)
            judged.append(v2["mean"] / v2["truth"] - 1 > 1e-3)
            judged.append(g2["bias"] < 1e-9 and g2["std"] < g3["std"] and min(g1["bias"], g3["bias"]) > 0.05)
        return all(judged)

    described = [
        f"KL {kl:g}: value bias {v2['mean'] / kl - 1:.4f} (k2), {v3['mean'] / kl - 1:.4f} (k3); gradient bias "
        f"{g2['bias']:.2f} (k2), {g3['bias']:.2f} (k3), std {g2['std']:.3g} and {g3['std']:.3g}"
        for kl, (_, (v2, g2), (v3, g3)) in levels.items()
        if complete
    ]
    return _claim(
        "the best value is not the best gradient: k3 is the better value, k2 the better loss",
        "Tang & Munos 2025; Liu et al. 2025",
        "k3 unbiased and quieter as a value; of the losses only k2 unbiased, and quieter than k3",
        "; ".join(described) or "not run",
        holds if complete else None,
        "1e-9 for no bias",
    )


def _k3_in_reward(rows: Sequence[Row]) -> Claim:
    mine = [r for r in _at_schulmans(rows) if (r["estimator"], r["placement"]) == ("k3-loss", "reward")]
    means = {row["kl"]: row for row in mine if row["part"] == "mean"}
    worst = max((abs(row["mean"]) / math.sqrt(row["variance"]) for row in means.values()), default=0.0)
    return _claim(
        "between equally wide Gaussians k3 in the reward does not pull on the mean at all, at any distance",
        "this work",
        "0, where the truth is √(2 KL)",
        f"{worst:.0e} standard deviations at most, KL {', '.join(f'{kl:g}' for kl in means)}",
        (lambda: worst < EXACT and all(row["truth"] > 0.05 for row in means.values())) if means else None,
        EXACT_WHY,
    )


def _same_noise(rows: Sequence[Row]) -> Claim:
    """u·g each: k2 as a loss, k1 as a reward, k3 as both."""
    three = [("k2-loss", "loss"), ("k1-loss", "reward"), ("k3-loss", "both")]
    found: dict[tuple[Any, ...], dict[tuple[str, str], float]] = {}
    for row in (r for r in rows if r["kind"] == "gradient" and (r["estimator"], r["placement"]) in three):
        where = tuple(row[name] for name in ("kl", "width", "part", "seed", "samples"))
        found.setdefault(where, {})[row["estimator"], row["placement"]] = row["sampled_mean"]
    whole = [list(values.values()) for values in found.values() if len(values) == 3]
    worst = max((max(values) - min(values) for values in whole), default=0.0)
    return _claim(
        "k2 in loss, k1 in reward and k3 in both are the same sample by sample",
        "theory; Liu et al. 2025 for the first two",
        "the same sampled means",
        f"{len(whole)} means, the worst apart by {worst:.0e}",
        (lambda: worst < 1e-9) if whole else None,
        "1e-9: w − 1 + u + 1 − w is u up to rounding, and w is large at times",
    )


# --- widths ----------------------------------------------------------------------------------------------------------


def _infinite(rows: Sequence[Row]) -> Claim:
    """E_π[w²] = ∫ref²/π; towards s² = ½ its variance grows beyond every bound, and k1's does not."""
    edge = math.sqrt(0.5) * (1 - 1e-12)
    expected = math.log(2) / 2 - 0.25

    def of(width: float, estimator: str) -> float:
        pair = Gaussians(0.0, width)
        return moments(value_terms(estimator, pair), pair)[1]

    beyond = [of(edge * (1 + by), "k3-loss") for by in (1e-2, 1e-4, 1e-6, 1e-8)]
    finite = _value(rows, "k3-loss", 0.5, width=0.8), _value(rows, "k1-loss", 0.5, width=0.8)
    return _claim(
        "a policy at most 0.71 times as wide as its reference gives k3 an infinite variance",
        "this work",
        f"infinite from KL {expected:.4f} on, k1's being {of(edge, 'k1-loss'):.3f}",
        f"at KL {Gaussians(0.0, edge).kl:.4f} {of(edge, 'k3-loss')}, just before {beyond[-1]:.3g}"
        + (
            f"; at a width of 0.8 and KL 0.5 {finite[0]['variance']:.4g} against {finite[1]['variance']:.4g}"
            if all(finite)
            else ""
        ),
        (
            lambda: (
                of(edge, "k3-loss") == math.inf
                and beyond == sorted(beyond)
                # E[w²] = s²/√(2s² − 1) where means agree: 100 times nearer the edge, 10 times larger.
                and abs(beyond[-1] / beyond[-2] / 10 - 1) < 0.01
                and finite[0]["variance"] > 20 * finite[1]["variance"]
            )
        )
        if all(finite)
        else None,
        "the closed form; E[w²] is finite where 2s² > 1; at a width of 0.8 k3 twenty times as noisy as k1",
    )


def _wider(rows: Sequence[Row]) -> Claim:
    row = _orders(rows).get(("wider", "k3-loss", "k1-loss", "error"))
    return _claim(
        "widening the policy never makes k3 noisier than k1, up to twice the width",
        "this work",
        "no crossing, k3 less noisy",
        "not run"
        if row is None
        else f"{'no crossing' if row['kl'] is None else row['kl']} up to KL {row['to_kl']:.2f}",
        None if row is None else lambda: row["kl"] is None and row["better_at_first"],
    )


# --- rows ------------------------------------------------------------------------------------------------------------


def _value(rows: Iterable[Row], estimator: str, kl: float, width: float = 1.0) -> Row | None:
    return next(
        (
            row
            for row in rows
            if row["kind"] == "value" and (row["estimator"], row["kl"], row["width"]) == (estimator, kl, width)
        ),
        None,
    )


def _at_schulmans(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "gradient" and row["width"] == 1.0]


def _whole(rows: Iterable[Row], estimator: str, placement: str, kl: float) -> Row | None:
    """Both parameters together at a width of 1: bias and standard deviation over the length of the truth."""
    parts = [
        row
        for row in _at_schulmans(rows)
        if (row["estimator"], row["placement"], row["kl"]) == (estimator, placement, kl)
    ]
    parts = list({row["part"]: row for row in parts}.values())
    if not parts:
        return None
    size = math.hypot(*(row["truth"] for row in parts))
    return {
        "bias": math.hypot(*(row["mean"] - row["truth"] for row in parts)) / size,
        "std": math.sqrt(sum(row["variance"] for row in parts)) / size,
        "parts": {row["part"]: row for row in parts},
    }


def _orders(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], Row]:
    return {
        (row["direction"], row["one"], row["other"], row["quantity"]): row for row in rows if row["kind"] == "order"
    }


def _levels(rows: Iterable[Row]) -> list[float]:
    return sorted({row["kl"] for row in rows if row["kind"] == "value" and row["width"] == 1.0})


def _table(rows: Sequence[Row], kl: float) -> list[Row]:
    found = []
    for placement in PLACEMENTS:
        for estimator in ESTIMATORS:
            value, whole = _value(rows, estimator, kl), _whole(rows, estimator, placement, kl)
            if value is None or whole is None:
                continue
            size = math.sqrt(2 * kl)
            biases = [
                (whole["parts"][part]["mean"] - whole["parts"][part]["truth"]) / size for part in ("mean", "width")
            ]
            found.append(
                {
                    "KL": f"{kl:g}",
                    "estimator": _short(estimator),
                    "placed in": placement,
                    "value bias": _number(value["mean"] / kl - 1),
                    "value std": _number(math.sqrt(value["variance"]) / kl),
                    "bias, mean": _number(biases[0]),
                    "bias, width": _number(biases[1]),
                    "gradient std": _number(whole["std"]),
                }
            )
    return found


def _number(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3g}".replace("-", "−")


def _short(estimator: str) -> str:
    return estimator.removesuffix("-loss")


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(other)


def _claim(
    claim: str, source: str, expected: str, found: str, holds: Callable[[], bool] | None, tolerance: str = ""
) -> Claim:
    """Not run where there is nothing to judge."""
    agrees = None if holds is None else bool(holds())
    return Claim(NAME, claim, source, expected, "not run" if holds is None else found, agrees, tolerance)
