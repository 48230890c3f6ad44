"""What the rows say: the worked examples, how bias and size go with distance, and whose signs turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kltest.reproduce import Claim

from .settings import EXAMPLES

Row = dict[str, Any]
NAME = "differentiate-the-estimate"
EXACT = 1e-10
ROUNDED = 1e-6  # rows keep eight figures, of levels that are solved for to as many
NEAR = 1e-3
ENOUGH = 50  # pairs that a frequency is judged by
THIS = "this work"
TANG = "Tang & Munos 2025"


def tidy(rows: Sequence[Row]) -> list[Row]:
    """The examples, the binary line, the distances."""
    parts = ("examples", "binary", "distance")
    names = ("estimator", "example", "path", "vocabulary", "pairs", "seed", "probability", "kl")

    def order(row: Row) -> tuple[Any, ...]:
        return parts.index(row["part"]), *(row.get(name, "") for name in names)

    return sorted(rows, key=order)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What was published, what follows from the formulas, and what is new."""
    return [
        _binary(rows),
        _four_values(rows),
        _four_truth(rows),
        _four_k3(rows),
        _unbiased(rows),
        _right_at_any_distance(rows),
        _nothing_at_any_distance(rows),
        _linear(rows),
        _leading(rows),
        _same_rate(rows),
        _turned(rows),
        _never_with_two(rows),
        _how_often(rows),
        _coin(rows),
        _one_action(rows, "taken up"),
        _one_action(rows, "dropped"),
        _repels_dropped(rows),
        _repels_binary(rows),
        _abs(rows),
    ]


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Every estimator of one step on the two examples; those that agree in everything share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(row["estimator"] for row in rows if row["part"] == "examples"):
        binary, four = _example(rows, name, "binary"), _example(rows, name, "four actions")
        if binary is None or four is None:
            continue
        line = (
            _shown(binary["derivative"], 5),
            ", ".join(_shown(value, 3) for value in four["gradient"]),
            _shown(four["relative_error"], 3),
            "–" if four["cosine"] is None else _shown(four["cosine"], 3),
            _shown(four["size"], 3),
            _shown(four["std"], 2),
        )
        lines.setdefault(line, []).append(name)
    titles = ("binary, d/dp", "four actions", "bias", "cosine", "size", "std")
    ordered = sorted(lines.items(), key=lambda line: (float(line[0][2]), float(line[0][5]), line[1]))
    return {
        "table": [{"estimators": ", ".join(names), **dict(zip(titles, line, strict=True))} for line, names in ordered]
    }


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """By name; "QUANTITY of ESTIMATOR, PATH, V, KL" is a median over pairs."""
    examples = [row for row in rows if row["part"] == "examples"]
    four = [row for row in examples if row["example"] == "four actions"]
    found: dict[str, float | int | str | None] = {
        "estimators": len({row["estimator"] for row in examples}),
        "unbiased": sum(row["relative_error"] < EXACT for row in four),
        "pairs": max((row["pairs"] for row in rows if row["part"] == "distance"), default=None),
    }
    for row in examples:
        if row["derivative"] is not None:
            found[f"derivative of {row['estimator']}"] = row["derivative"]
        found[f"bias of {row['estimator']}, {row['example']}"] = row["relative_error"]
    for row in (r for r in rows if r["part"] == "distance" and r["seed"] == 0):
        where = f"{row['estimator']}, {row['path']}, {row['vocabulary']}, {row['kl']:g}"
        for quantity in ("relative_error", "cosine", "size", "flipped", "any_flipped"):
            found[f"{quantity} of {where}"] = row[quantity]
    return found


# --- the examples ----------------------------------------------------------------------------------------------------


def _binary(rows: Sequence[Row]) -> Claim:
    """d/dp of KL((p, 1 − p)‖(½, ½)) = log(p/(1 − p)); of KL the other way (p − ½)/(p(1 − p))."""
    p = EXAMPLES["binary"][0][0]
    log4, forward = math.log(p / (1 - p)), (p - 0.5) / (p * (1 - p))
    expected = {"k1-loss": 0.0, "k2-loss": log4, "k3-loss": forward, "k1-reward": log4, "k3-reward": log4 - forward}
    found = {name: _example(rows, name, "binary") for name in expected}
    complete = all(found.values())
    return _claim(
        "P = (0.8, 0.2), Q = (0.5, 0.5): d/dp of k1, k2, k3 in loss, of k1, k3 in reward; the truth is log 4",
        f"{TANG}; theory",
        ", ".join(f"{value:.5f}" for value in expected.values()),
        ", ".join(f"{row['derivative']:.5f}" for row in found.values() if row),
        (
            lambda: (
                all(abs(found[name]["derivative"] - value) < EXACT for name, value in expected.items())
                and abs(found["k1-loss"]["truth"][0] / (p * (1 - p)) - math.log(4)) < EXACT
            )
        )
        if complete
        else None,
        "1e-10",
    )


def _four() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    policy, reference = map(np.array, EXAMPLES["four actions"])
    return policy, reference, np.log(policy / reference)


def _four_values(rows: Sequence[Row]) -> Claim:
    policy, _, u = _four()
    found = {name: _example(rows, name, "four actions") for name in ("k1-loss", "k2-loss", "k3-loss")}
    kl, half_square = float(policy @ u), float(policy @ u**2) / 2
    return _claim(
        "π = (.4, .3, .2, .1), ref = (.1, .2, .3, .4): the values that k1, k2 and k3 average to",
        "theory",
        f"{kl:.4f}, {half_square:.4f}, {kl:.4f}",
        ", ".join(f"{row['logged']:.4f}" for row in found.values() if row),
        (
            lambda: all(
                abs(found[name]["logged"] - value) < EXACT
                for name, value in {"k1-loss": kl, "k2-loss": half_square, "k3-loss": kl}.items()
            )
        )
        if all(found.values())
        else None,
        "1e-10",
    )


def _four_truth(rows: Sequence[Row]) -> Claim:
    policy, _, u = _four()
    expected = policy * (u - policy @ u)
    row = _example(rows, "k2-loss", "four actions")
    return _claim(
        "the same policies: the gradient of KL(π‖ref), and of k2 in loss",
        "theory",
        _vector(expected),
        "not run" if row is None else _vector(row["gradient"]),
        None if row is None else lambda: _near(row["truth"], expected) and _near(row["gradient"], expected),
        "1e-10",
    )


def _four_k3(rows: Sequence[Row]) -> Claim:
    policy, reference, _ = _four()
    row = _example(rows, "k3-loss", "four actions")
    return _claim(
        "the same policies: k3 in loss has another sign at the second action",
        "theory",
        f"{_vector(policy - reference)}, one sign turned",
        "not run" if row is None else f"{_vector(row['gradient'])}, {row['flipped']} turned",
        None
        if row is None
        else lambda: (
            _near(row["gradient"], policy - reference)
            and row["flipped"] == 1
            and row["gradient"][1] > 0 > row["truth"][1]
        ),
        "1e-10",
    )


def _unbiased(rows: Sequence[Row]) -> Claim:
    four = [row for row in rows if row["part"] == "examples" and row["example"] == "four actions"]
    found = {row["estimator"] for row in four if row["relative_error"] < EXACT}
    expected = {row["estimator"] for row in four if row["named"] == {"reverse_kl": 1.0}}
    return _claim(
        "of all registered estimators of one step these are unbiased",
        "the descriptions of the estimators",
        f"{len(expected)} of {len(four)}",
        f"{len(found)} of {len(four)}"
        + (f", not those: {', '.join(sorted(found ^ expected))}" if found ^ expected else ""),
        (lambda: found == expected and len(four) > len(found)) if four else None,
        "1e-10",
    )


# --- distance --------------------------------------------------------------------------------------------------------


def _right_at_any_distance(rows: Sequence[Row]) -> Claim:
    mine = _distance(rows, "k2-loss")
    worst = max((row["relative_error_high"] for row in mine), default=0.0)
    return _claim(
        "k2 in loss is right at every distance",
        f"{TANG}; Liu et al. 2025",
        "no bias",
        f"{len(mine)} distances, paths and vocabularies, the worst relative error {worst:.0e}",
        (lambda: worst < 1e-9) if mine else None,
        "1e-9: near the reference gradients are a thousandth of what they are sums of",
    )


def _nothing_at_any_distance(rows: Sequence[Row]) -> Claim:
    mine = _distance(rows, "k1-loss")
    worst = max((row["size_high"] for row in mine), default=0.0)
    return _claim(
        "k1 in loss has no gradient at any distance",
        TANG,
        "0",
        f"{len(mine)} distances and vocabularies, the largest {worst:.0e}",
        (lambda: worst < 1e-9) if mine else None,
        "1e-9 of the truth",
    )


def _linear(rows: Sequence[Row]) -> Claim:
    slopes = _slopes(rows, "k3-loss", "relative_error")
    return _claim(
        "k3 in loss: the relative error falls linearly with the distance from the reference",
        "theory",
        "slope 1 against √KL",
        ", ".join(f"{slope:.3f} (V = {size})" for size, slope in slopes.items()),
        (lambda: all(abs(slope - 1) < 0.05 for slope in slopes.values())) if slopes else None,
        "0.05: medians of KL up to 0.001, where the second order tells already",
    )


def _leading(rows: Sequence[Row]) -> Claim:
    """1 − w = u − u²/2 + …: what k3 adds to the truth is −E[g u²/2], which is also what k2 in the reward follows."""
    mine = [row for row in _distance(rows, "k3-loss", path="random") if row["kl"] <= 1e-5]
    gaps = [abs(row["relative_error"] / row["second_order"] - 1) for row in mine]
    return _claim(
        "k3 in loss: near the reference the error is that of the next order, E[g u²/2]",
        THIS,
        "the same size",
        f"{len(gaps)} distances, the worst off by {max(gaps, default=0):.1%}",
        (lambda: max(gaps) < 0.01) if gaps else None,
        "1 % up to KL 1e-5: the third order is √KL of the second",
    )


def _same_rate(rows: Sequence[Row]) -> Claim:
    loss = {_place(row): row["relative_error"] for row in _distance(rows, "k3-loss")}
    gaps = [abs(row["size"] / loss[_place(row)] - 1) for row in _distance(rows, "k3-reward") if _place(row) in loss]
    slopes = _slopes(rows, "k3-reward", "size") if gaps else {}
    return _claim(
        "k3 in reward: the gradient vanishes at the same rate, and is that error",
        f"{TANG}; Shah et al. 2025; theory",
        "size equal to the error of k3 in loss, slope 1 against √KL",
        f"{len(gaps)} distances, the worst off by {max(gaps, default=0):.0e}; "
        + ", ".join(f"{slope:.3f} (V = {size})" for size, slope in slopes.items()),
        (lambda: max(gaps) < ROUNDED and all(abs(slope - 1) < 0.05 for slope in slopes.values())) if slopes else None,
        "1e-6: rows keep eight figures; 0.05 for slopes",
    )


# --- signs and sizes -------------------------------------------------------------------------------------------------


def _turned(rows: Sequence[Row]) -> Claim:
    """The truth is π(u − KL), k3 in the loss π(1 − w), whose sign is that of u."""
    mine = [r for r in _distance(rows, "k3-loss") if r["vocabulary"] > 2 and r["path"] in ("random", "sharpened")]
    off = sum(row["flips_off"] for row in mine)
    turned = [row for row in mine if row["flipped"] > 0]
    return _claim(
        "k3 in loss pulls an action the wrong way exactly where 0 < u < KL",
        THIS,
        "no action otherwise",
        f"{off} otherwise; some turned at {len(turned)} of {len(mine)} distances, paths and vocabularies",
        # Few policies of few actions may have no such action at all.
        (lambda: off == 0) if turned or off else None,
        "actions whose pull is below 1e-6 of the gradient are not counted",
    )


def _never_with_two(rows: Sequence[Row]) -> Claim:
    mine = _distance(rows, "k3-loss", vocabulary=2)
    worst = max((row["any_flipped"] for row in mine), default=0.0)
    return _claim(
        "with two actions k3 in loss never pulls the wrong way: KL is an average of two u of opposite sign",
        THIS,
        "never",
        f"{worst:.0%} of pairs at worst, {len(mine)} distances and paths",
        (lambda: worst == 0) if mine else None,
    )


def _how_often(rows: Sequence[Row]) -> Claim:
    """u of N(·, 2 KL): the density at 0 is 1/√(4π KL), the window KL."""
    mine = [row for row in _distance(rows, "k3-loss", path="random") if row["vocabulary"] >= 100]
    mine = [row for row in mine if row["kl"] in (0.001, 0.00316, 0.01) and row["pairs"] >= ENOUGH]
    ratios = [row["flipped"] / math.sqrt(row["kl"] / (4 * math.pi)) for row in mine]
    return _claim(
        "k3 in loss pulls a share of about √(KL/4π) of all actions the wrong way, for random log-ratios",
        THIS,
        "0.28 √KL",
        ", ".join(f"{row['flipped']:.4f} at KL {row['kl']:g}" for row in mine),
        (lambda: all(abs(ratio - 1) < 0.2 for ratio in ratios)) if ratios else None,
        "a fifth: some hundred actions, log-ratios of unequal spread",
    )


def _coin(rows: Sequence[Row]) -> Claim:
    """An even function of u against an odd one."""
    mine = [row for row in _distance(rows, "k3-reward", path="random") if row["vocabulary"] >= 32 and row["kl"] <= NEAR]
    mine = [row for row in mine if row["pairs"] >= ENOUGH]
    return _claim(
        "k3 in reward pulls half of the actions the wrong way near the reference: its direction is that of a coin",
        THIS,
        "half of the actions, cosine about 0",
        ", ".join(
            f"{row['flipped']:.3f} and {row['cosine']:.2f} (V = {row['vocabulary']})"
            for row in mine
            if row["kl"] == 1e-4
        ),
        (lambda: all(abs(row["flipped"] - 0.5) < 0.05 and abs(row["cosine"]) < 0.2 for row in mine)) if mine else None,
        "0.05 and 0.2: medians and means of a hundred pairs",
    )


def _one_action(rows: Sequence[Row], path: str) -> Claim:
    """All other actions keep their proportions, so that one direction is left; an action goes from r to b ≤ ½.

    ‖π − ref‖/‖π(u − KL)‖ = (b − r)/(b(1 − b)(logit b − logit r)) = x(1 − x)/(b(1 − b)) for some x between.
    """
    mine = [row for row in _distance(rows, "k3-loss", path=path) if row["vocabulary"] >= 32 and row["kl"] <= 1]
    taken = path == "taken up"
    strongest = (min if taken else max)(mine, key=lambda row: row["size"], default=None)
    return _claim(
        "one unlikely action taken up: k3 in loss pulls back in the right direction, too weakly"
        if taken
        else "one likely action dropped: k3 in loss pulls back in the right direction, too strongly",
        THIS,
        f"cosine 1, size {'below' if taken else 'above'} 1",
        "not run"
        if strongest is None
        else f"cosine 1 to {1 - min(row['cosine_low'] for row in mine):.0e}; size {strongest['size']:.2f} at KL "
        f"{strongest['kl']:g}, V = {strongest['vocabulary']}",
        (
            lambda: all(
                row["cosine_low"] > 1 - ROUNDED and (row["size_high"] < 1 if taken else row["size_low"] > 1)
                for row in mine
            )
        )
        if mine
        else None,
        "1e-6 for the cosine; nine of ten pairs for the size",
    )


def _repels_dropped(rows: Sequence[Row]) -> Claim:
    """k3 in the reward is the truth less k3 in the loss, and there is one direction: 1 − size of it is left."""
    mine = [row for row in _distance(rows, "k3-reward", path="dropped") if row["vocabulary"] >= 32]
    worst = max((row["cosine_high"] for row in mine), default=0.0)
    return _claim(
        "one likely action dropped: k3 in reward pushes straight away from the reference, at every distance",
        THIS,
        "cosine −1",
        f"{worst:.6f} at most, {len(mine)} distances and vocabularies",
        (lambda: worst < -1 + ROUNDED) if mine else None,
        "1e-6",
    )


def _repels_binary(rows: Sequence[Row]) -> Claim:
    mine = [r for r in rows if r["part"] == "binary" and r["estimator"] == "k3-reward" and r["probability"] != 0.5]
    wrong = [row["probability"] for row in mine if row["derivative"] * row["true_derivative"] >= 0]
    return _claim(
        "two actions, ref = (½, ½): k3 in reward pushes away from the reference wherever the policy is",
        THIS,
        "log(p/(1 − p)) − (p − ½)/(p(1 − p)), of the other sign than the truth",
        f"of the other sign at {len(mine) - len(wrong)} of {len(mine)} probabilities",
        (
            lambda: (
                not wrong
                and all(
                    abs(row["derivative"] - math.log(p / (1 - p)) + (p - 0.5) / (p * (1 - p)))
                    < 1e-7 * (1 + 1 / p / (1 - p))
                    for row in mine
                    for p in [row["probability"]]
                )
            )
        )
        if mine
        else None,
        "rows keep eight figures",
    )


def _abs(rows: Sequence[Row]) -> Claim:
    slopes = _slopes(rows, "abs-loss", "size")
    return _claim(
        "the absolute value pulls as strongly however near the reference: relative to the truth 1/√KL",
        THIS,
        "slope −1 against √KL",
        ", ".join(f"{slope:.3f} (V = {size})" for size, slope in slopes.items()),
        (lambda: all(abs(slope + 1) < 0.05 for slope in slopes.values())) if slopes else None,
        "0.05, as above",
    )


# --- rows ------------------------------------------------------------------------------------------------------------


def _distance(rows: Iterable[Row], estimator: str, **wanted: Any) -> list[Row]:
    return [
        row
        for row in rows
        if row["part"] == "distance"
        and row["estimator"] == estimator
        and all(row[name] == value for name, value in wanted.items())
    ]


def _example(rows: Iterable[Row], estimator: str, example: str) -> Row | None:
    return next(
        (r for r in rows if r["part"] == "examples" and (r["estimator"], r["example"]) == (estimator, example)), None
    )


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("path", "vocabulary", "pairs", "seed", "kl"))


def _slopes(rows: Iterable[Row], estimator: str, quantity: str) -> dict[int, float]:
    """By vocabulary: how the logarithm of a median grows with that of √KL near the reference, on random paths."""
    found = {}
    mine = [row for row in _distance(rows, estimator, path="random", seed=0) if row["kl"] <= NEAR]
    for size in sorted({row["vocabulary"] for row in mine}):
        here = [row for row in mine if row["vocabulary"] == size]
        x, y = (np.log([row[name] for row in here]) for name in ("kl", quantity))
        if len(here) > 1:
            found[size] = float(np.polyfit(x / 2, y, 1)[0])
    return found


def _near(found: Sequence[float], expected: np.ndarray) -> bool:
    return bool(np.abs(np.array(found) - expected).max() < EXACT)


def _vector(values: Iterable[float]) -> str:
    return f"({', '.join(_shown(value, 4) for value in values)})"


def _shown(value: float, digits: int) -> str:
    """Without a sign or decimals where it is zero."""
    return "0" if abs(value) < EXACT else f"{value:.{digits}f}".replace("-", "−")


def _claim(
    claim: str, source: str, expected: str, found: str, holds: Callable[[], bool] | None, tolerance: str = ""
) -> Claim:
    """Not run where there is nothing to judge."""
    agrees = None if holds is None else bool(holds())
    return Claim(NAME, claim, source, expected, "not run" if holds is None else found, agrees, tolerance)
