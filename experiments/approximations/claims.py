"""Effects of approximations on the gradient: claims and tables."""

import math

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import Bound, above, at_least, at_most, below, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import known, need, ordered, require

from .experiment import EXACT, PARTS, TOKENS

EMA_PG = "Zhang & Ba 2026 (EMA-PG, arXiv 2602.04417), Top-k KL"
# The largest relative error of a number that is rounded to eight significant bits.
HALF_UNIT = 2.0**-9
SUMS = "sums of float64"

KINDS = ("right", "wrong")

claims = Claims("approximations")
tidy = ordered(PARTS)


@claims.measure(f"{EMA_PG}; Chen 2026 for two tokens", SUMS, off_theory=near(0, EXACT))
def _head(rows: pd.DataFrame) -> Measured:
    """top-k with a sampled tail, differentiated, has `∇π(S)` beside ∇KL; with the head's log-ratio detached it is exact
    at every k"""
    return {"off_theory": need(rows, "head", form=("top-k", "top-k-detached"))["theory_error"]}


AT_REFERENCE = {"form": "top-k", "distance": 0.0, "k": below(TOKENS)}


@claims.measure(f"{EMA_PG}; {OWN}", "rounding is 1e-16", bias=above(1e-3))
def _at_the_reference(rows: pd.DataFrame) -> Measured:
    """so top-k is biased even at π = ref, by more than {bias}, for any fixed head but the whole vocabulary"""
    return {"bias": need(rows, "head", **AT_REFERENCE)["bias"]}


@claims.measure(OWN, "runs that have settled", mass_off=near(0, 1e-10), kl_off=near(0, 1e-10))
def _drifted(rows: pd.DataFrame) -> Measured:
    """training without a reward, from the reference, top-k leaves it: a stable head ends at `π ∝ ref·e^(−1{{v ∈ S}})`,
    whatever β, its mass m at `m/(m + (1 − m)e)`"""
    found = need(rows, "drift", form="top-k", mass=below(1 - EXACT)).dropna(subset=["predicted_kl"])
    found = known(found).astype({"predicted_kl": float, "predicted_mass": float})
    return {
        "mass_off": found["mass_after"] - found["predicted_mass"],
        "kl_off": found["kl"] - found["predicted_kl"],
        "mass": found["mass"],
        "mass_after": found["mass_after"],
    }


@claims.measure(OWN, "exact training, until KL(π‖ref) is below 0.01", times_as_many=above(10))
def _way_back(rows: pd.DataFrame) -> Measured:
    """a policy that has run ahead comes back more than {times_as_many} times later with the clamp, if it does (`16
    tokens`, chances `1/rank`)"""
    steps = need(rows, "return", step=0).set_index(["penalty", "start"])["returned"]
    start = steps.index.get_level_values("start").max()
    plain, clamped = (steps.get((name, start), 0) for name in ("k3-loss", "k3-clamped"))
    require(plain and not pd.isna(plain) and clamped != 0)
    never = math.inf if pd.isna(clamped) else clamped
    return {"times_as_many": never / plain, "updates_without": plain, "with": never, "lead": start}


@claims.measure(OWN, "squared errors near their mean", found_over_predicted=near(1, 0.15), misread=above(500))
def _grid(rows: pd.DataFrame, misread: Bound) -> Measured:
    """log-probs rounded before they are subtracted: where more than {misread} tokens are misread the error of the
    gradient is within {found_over_predicted:±.0%} of that of differences on a grid, `√(Σπ²f(h − f)/Σπ²u²)`, `f = |u|
    mod h`, h the grid's step at the log-prob"""
    found = need(
        rows, "precision", rounded="log-probs", estimator="k2-loss", misread=lambda x: misread(x.astype(float))
    )
    return {"found_over_predicted": found["relative_error"] / found["predicted_error"]}


def _large(rows: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Rows with enough tokens for rounding errors to be averages."""
    return need(rows, "precision", vocabulary=lambda x: x >= 4096, **wanted)


@claims.measure(OWN, "rounding errors of thousands of tokens", factor_apart=below(1.15), log_ratio=at_most(0.1))
def _same_for_all(rows: pd.DataFrame, log_ratio: Bound) -> Measured:
    """no formula gives the digits back: for log-ratios up to {log_ratio} k1, k2 and k3 are then equally wrong, up to a
    factor of {factor_apart}"""
    found = _large(rows, rounded="log-probs", log_ratio=log_ratio)
    errors = found.groupby(["kind", "vocabulary", "log_ratio", "seed"])["relative_error"].agg(["min", "max", "size"])
    three = known(errors[errors["size"] == 3])
    return {"factor_apart": three["max"] / three["min"]}


@claims.measure(
    "Qi et al. 2025 (arXiv 2510.26788)",
    "three more bits are a factor of 8",
    ratio_of_errors=within(7, 9),
    log_ratio=at_least(0.1),
)
def _sixteen(rows: pd.DataFrame, log_ratio: Bound) -> Measured:
    """for log-ratios from {log_ratio} on float16 keeps {ratio_of_errors} times as much of a log-prob as bfloat16"""
    found = _large(rows, rounded="log-probs", estimator="k2-loss", log_ratio=log_ratio)
    by = found.groupby(["kind", "log_ratio", "seed"])["relative_error"].last().unstack("kind")
    require({"bfloat16", "float16"} <= set(by))
    return {"ratio_of_errors": (by["bfloat16"] / by["float16"]).dropna()}


@claims.measure(
    OWN,
    "twice the half unit in the last place, 2^−9: π²-weighted and centred the error may exceed that of one product",
    lost=below(2 * HALF_UNIT),
    kind="bfloat16",
)
def _rounded_ratio(rows: pd.DataFrame, kind: str) -> Measured:
    """a rounded log-ratio costs k1 in the reward and k2 less than {lost:.4f} of the gradient in {kind}, at any
    distance"""
    found = need(rows, "precision", rounded="arithmetic", kind=kind, estimator=("k1-reward", "k2-loss"))
    return {"lost": found["relative_error"]}


@claims.measure(
    OWN,
    "all but a hundredth; half a unit in the last place",
    lost_by_k3=above(0.99),
    lost_by_k2=below(HALF_UNIT),
    log_ratio=3e-4,
)
def _nothing_left(rows: pd.DataFrame, log_ratio: float) -> Measured:
    """and k3 more than {lost_by_k3:.0%} near the reference, at log-ratios of {log_ratio:g}: w rounds to one, and
    `1 − w` to nothing"""
    found = _large(rows, rounded="arithmetic", kind="bfloat16", log_ratio=log_ratio)
    return {f"lost_by_{name}": need(found, estimator=f"{name}-loss")["relative_error"] for name in ("k3", "k2")}


@claims.measure(OWN, "the next order in 1/B", exponent=within(0.97, 1.03), batch_size=at_least(64))
def _falls(rows: pd.DataFrame, batch_size: Bound) -> Measured:
    """for B from {batch_size} on it tends to ∇KL/E[L] (whole return), or its local form (tokens), like `B^(−a)` with a
    from {exponent}"""
    found = need(rows, "batch", batch_size=batch_size).sort_values("batch_size").groupby(["normalised", "seed"])
    slopes = [-np.diff(np.log(mine["relative_distance"])) / np.diff(np.log(mine["batch_size"])) for _, mine in found]
    return {"exponent": np.concatenate(slopes)}


def _asymmetries(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    found = need(rows, "lengths")
    whole = found["field"] == "whole return"
    return found[whole]["asymmetry"], found[~whole]["asymmetry"]


@claims.measure(OWN, "far above rounding", asymmetry=above(1e-3), that_of_the_whole_return=near(0, EXACT))
def _no_field(rows: pd.DataFrame) -> Measured:
    """u_t/L, reward-to-go/L and k3_t/L follow no function: the asymmetry of their Jacobians is above {asymmetry}, that
    of the whole return's is zero"""
    whole, others = _asymmetries(rows)
    return {"asymmetry": others, "that_of_the_whole_return": whole}


@claims.measure(OWN, "where the gradient is this short", off=near(0, 1e-7), gradient_norm=below(1e-9))
def _ends(rows: pd.DataFrame, gradient_norm: Bound) -> Measured:
    """training with the length-normalised penalty ends at `ref·e^(L(R − c)/β)`"""
    return {"off": need(rows, "optimum", gradient_norm=gradient_norm)["end_error"]}


@claims.measure(OWN, "the effect fades like 1/β", right_ones=above(1e-6), wrong_ones=below(-1e-6))
def _grows(rows: pd.DataFrame) -> Measured:
    """so it makes right answers longer and wrong ones shorter than the reference's, in the mean"""
    found = need(rows, "optimum")
    return {f"{kind}_ones": found[f"length_of_{kind}"] / found[f"reference_length_of_{kind}"] - 1 for kind in KINDS}
