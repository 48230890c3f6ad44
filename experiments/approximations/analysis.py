"""Effects of approximations on the gradient: claims, tables and the numbers that the paper cites."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.special import lambertw

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import known, need, ordered, records, require
from kltest.reproduce.numbers import Cited, Numbers, extremes, melted

from .settings import EXACT, LOG_RATIOS, PARTS, TOKENS

EMA_PG = "Zhang & Ba 2026 (EMA-PG, arXiv 2602.04417), Top-k KL"
VERL = "verl, low_var_kl; theory"
# The clamped k3 clamps the log-ratio as well.
LOG_BOUND = 20.0
# Tokens enough for squared rounding errors to be near their mean.
MANY = 500
# The largest relative error of a number that is rounded to eight significant bits.
HALF_UNIT = 2.0**-9
SUMS = f"{EXACT:g}: sums of float64"

KINDS = ("right", "wrong")

claims = Claims("approximations")
numbers = Numbers()
tidy = ordered(PARTS)


def _on_both(form: str) -> Callable[[pd.DataFrame], pd.Series]:
    """Claims about heads hold for one step and for prefixes."""
    return lambda rows: pd.concat([need(rows, part, form=form) for part in ("head", "prefixes")])["theory_error"]


claims.bound("top-k with a sampled tail, differentiated: beside ∇KL, with prefixes held fixed, there is ∇π(S)",
    f"{EMA_PG}; theory", "∇π(S), and Σ d(s)∇π(S|s) on prefixes", SUMS, _on_both("top-k"), EXACT)  # fmt: skip

AT_REFERENCE = {"form": "top-k", "distance": 0.0, "k": lambda x: x < TOKENS}

claims.between("so it is biased even at π = ref, for any fixed head but the whole vocabulary", f"{EMA_PG}; theory",
    "a gradient where there should be none", "above 0.001, rounding is 1e-16", "{low:.2g} … {high:.2g}", "bias", "head",
    **AT_REFERENCE, above=1e-3)  # fmt: skip

claims.bound("with the head's log-ratio detached it is exact at every k", "TT-OPD 2026 (arXiv 2609.34447)", "no bias",
    SUMS, _on_both("top-k-detached"), EXACT)  # fmt: skip

claims.bound("a head alone lacks the tail's share of the gradient, and has ∇π(S) as well", "theory",
    "∇π(S) − E[1{y ∉ S}·u·g]", SUMS, _on_both("head-alone"), EXACT)  # fmt: skip


@claims.add(OWN, "the head's mass m becomes m/(m + (1 − m)e)", "1e-10")
def _drifted(rows: pd.DataFrame) -> Answer:
    """training without a reward, from the reference, top-k leaves it: a stable head ends at
    π ∝ ref·e^(−1{v ∈ S}), whatever β"""
    found = need(rows, "drift", form="top-k", mass=lambda x: x < 1 - EXACT).dropna(subset=["predicted_kl"])
    found = known(found).astype({"predicted_kl": float, "predicted_mass": float})
    row = found.iloc[0]
    said = (
        f"head {row['mass']:.2f} → {row['mass_after']:.4f}, KL {row['kl']:.4f}; predicted {row['predicted_mass']:.4f}"
    )
    off = [
        (found[name] - found[of]).abs().max() for name, of in (("mass_after", "predicted_mass"), ("kl", "predicted_kl"))
    ]
    return said, max(off) < 1e-10


@claims.add(OWN, "gradient and KL(π‖ref) above 0.001 at the end", "settled runs: below 1e-10")
def _unsettled(rows: pd.DataFrame) -> Answer:
    """a head that does not stay the likeliest does not settle at a constant rate"""
    found = need(rows, "drift", form="top-k", predicted_kl=lambda x: x.isna())
    norm, kl = found["gradient_norm"], found["kl"]
    said = f"‖gradient‖ {norm.min():.2g} … {norm.max():.2g}, KL {kl.min():.2g} … {kl.max():.2g}"
    return said, norm.min() > 1e-3 and kl.min() > 1e-3


claims.bound("with the head detached such training stays at the reference", OWN, "KL(π‖ref) = 0", SUMS, "kl", EXACT,
    "drift", form="top-k-detached")  # fmt: skip


def root_of_k3(value: float, sign: float) -> float:
    """Return the log-ratio u on one side of zero at which e^{−u} − 1 + u is v: 1 + v + W(−e^{−1 − v})."""
    return float(1 + value + lambertw(-math.exp(-1 - value), 0 if sign > 0 else -1).real)


@claims.add(VERL, "the roots of e^(−u) − 1 + u = bound, ±20 at most", "1e-9: bisection against Lambert's W")
def _dead(rows: pd.DataFrame) -> Answer:
    """a clamped k3 has no gradient at u below −2.6 or above 11"""
    found = need(rows, "clamp", u=LOG_RATIOS[0])
    off = [
        abs(row[edge] - sign * min(abs(root_of_k3(row["bound"], sign)), LOG_BOUND))
        for row in records(found)
        for edge, sign in (("low", -1), ("high", 1))
    ]
    row = found.loc[(found["bound"] - 10).abs().idxmin()]
    return f"at {row['bound']:g}: dead below {row['low']:.4f} and above {row['high']:.4f}", max(off) < 1e-9


claims.bound("where no token is in the dead zone it is k3", VERL, "∇KL(ref‖π)", SUMS, "relative_bias", EXACT,
    "lead", dead_mass=0)  # fmt: skip


@claims.add(f"{VERL}; {OWN}", "less than 10 % of k3's at a bound of 10: Σ over the living tokens of (π − ref)·g",
    SUMS)  # fmt: skip
def _silenced(rows: pd.DataFrame) -> Answer:
    """once the tokens that the policy has left are in it, hardly any of the pull remains (16 tokens, chances 1/rank)"""
    found = need(rows, "lead", bound=10.0, dead_mass=lambda x: x > 0.5)
    left = found["pull"] / found["pull of k3-loss"]
    said = f"{left.min():.1e} … {left.max():.1e} of the pull left"
    return said, left.max() < 0.1 and found["theory_error"].max() < EXACT


@claims.add(OWN, "more than ten times as many updates", "exact training, until KL(π‖ref) is below 0.01")
def _way_back(rows: pd.DataFrame) -> Answer:
    """a policy that has run ahead comes back many times later (16 tokens, chances 1/rank)"""
    steps = need(rows, "return", step=0).set_index(["penalty", "start"])["returned"]
    start = steps.index.get_level_values("start").max()
    plain, clamped = (steps.get((name, start), 0) for name in ("k3-loss", "k3-clamped"))
    require(plain and not pd.isna(plain) and clamped != 0)
    never = pd.isna(clamped)
    said = f"{plain:.0f} updates without, {'never' if never else f'{clamped:.0f}'} with the clamp"
    return f"{said}, from a lead of {start:g}", never or clamped > 10 * plain


claims.between("log-probs rounded before they are subtracted: the error of the gradient is that of differences on "
    "a grid", OWN, "√(Σπ²f(h − f)/Σπ²u²), f = |u| mod h, h the grid's step at the log-prob",
    "15 %, where more than 500 tokens are misread", "{low:.3f} … {high:.3f} of it",
    lambda found: found["relative_error"] / found["predicted_error"], "precision", rounded="log-probs",
    estimator="k2-loss", misread=lambda x: x.astype(float) > MANY, above=0.85, below=1.15)  # fmt: skip


def _large(rows: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Rows with enough tokens for rounding errors to be averages."""
    return need(rows, "precision", vocabulary=lambda x: x >= 4096, **wanted)


@claims.add(OWN, "ratio 1", "15 %, for |log-ratios| up to 0.1")
def _same_for_all(rows: pd.DataFrame) -> Answer:
    """no formula gives the digits back: k1, k2 and k3 are then equally wrong"""
    found = _large(rows, rounded="log-probs")
    near = found[found["log_ratio"] <= 0.1].groupby(["kind", "vocabulary", "log_ratio", "seed"])["relative_error"]
    errors = near.agg(["min", "max", "size"])
    three = known(errors[errors["size"] == 3])
    apart = (three["max"] / three["min"]).max()
    return f"at most a factor {apart:.3f} apart", apart < 1.15


@claims.add("Qi et al. 2025 (arXiv 2510.26788)", "ratio of errors 8", "7 … 9")
def _sixteen(rows: pd.DataFrame) -> Answer:
    """float16 keeps eight times as much of a log-prob as bfloat16"""
    found = _large(rows, rounded="log-probs", estimator="k2-loss")
    by = (
        found[found["log_ratio"] >= 0.1].groupby(["kind", "log_ratio", "seed"])["relative_error"].last().unstack("kind")
    )
    require({"bfloat16", "float16"} <= set(by))
    ratios = known((by["bfloat16"] / by["float16"]).dropna())
    return f"{ratios.min():.2f} … {ratios.max():.2f}", ratios.between(7, 9, inclusive="neither").all()


# π²-weighted, and centred: the error may exceed that of a single product.
claims.bound("a rounded log-ratio costs k1 in the reward and k2 half a unit in the last place, at any distance", OWN,
    f"below {2 * HALF_UNIT:.4f} in bfloat16", "twice 2^−9", "relative_error", 2 * HALF_UNIT, "precision",
    rounded="arithmetic", kind="bfloat16", estimator=lambda x: x != "k3-loss")  # fmt: skip


@claims.add(OWN, "bfloat16, log-ratios of 3e-4: all of it", "more than 99 %")
def _nothing_left(rows: pd.DataFrame) -> Answer:
    """and k3 everything near the reference: w rounds to 1, and 1 − w to nothing"""
    found = _large(rows, rounded="arithmetic", kind="bfloat16", log_ratio=3e-4)
    lost = found.groupby(["estimator", "seed"])["relative_error"].last().groupby("estimator").agg(["min", "max"])
    require({"k2-loss", "k3-loss"} <= set(lost.index))
    all_of_it, some = lost["min"]["k3-loss"], lost["max"]["k2-loss"]
    return f"k3: {all_of_it:.3f} of the gradient lost; k2: {some:.4f}", all_of_it > 0.99 and some < HALF_UNIT


claims.bound("float32 is enough everywhere here", OWN, "below 1 %", "log-ratios from 1e-4", "relative_error", 0.01,
    "precision", kind="float32")  # fmt: skip

claims.bound("one mean over a batch's tokens: the closed form is the sum over all batches", "theory", "equal", SUMS,
    "enumeration_error", EXACT, "batch")  # fmt: skip


@claims.add("theory", "distance ∝ 1/B", "exponents within 3 %, B from 64")
def _falls(rows: pd.DataFrame) -> Answer:
    """and tends to ∇KL/E[L] (whole return), or its local form (tokens), like 1/B"""
    found = need(rows, "batch")
    found = known(found[found["batch_size"] >= 64]).sort_values("batch_size").groupby(["normalised", "seed"])
    slopes = [-np.diff(np.log(mine["relative_distance"])) / np.diff(np.log(mine["batch_size"])) for _, mine in found]
    slopes = np.concatenate(slopes)
    require(len(slopes))
    return f"B^(−{min(slopes):.3f}) … B^(−{max(slopes):.3f})", min(slopes) > 0.97 and max(slopes) < 1.03


claims.bound("each rollout over its own length: the gradient of E[(Σu − 1)/L]", "theory", "equal", SUMS,
    "objective_error", EXACT, "lengths", field="whole return")  # fmt: skip


def _asymmetries(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    found = need(rows, "lengths")
    whole = found["field"] == "whole return"
    return found[whole]["asymmetry"], found[~whole]["asymmetry"]


@claims.add("theory", "Jacobians that are not symmetric; whole return's is", "above 0.001 against rounding")
def _no_field(rows: pd.DataFrame) -> Answer:
    """u_t/L, reward-to-go/L and k3_t/L follow no function"""
    whole, others = _asymmetries(rows)
    said = f"{others.min():.2g} … {others.max():.2g}; whole return: {whole.max():.0e}"
    return said, others.min() > 1e-3 and whole.max() < EXACT


claims.between("k1 in the loss over L is no longer zero", "theory", "a gradient", "against length-normalised k2's",
    "{low:.2f} … {high:.2f} times as long", "k1_loss", "lengths", field="whole return", above=1e-2)  # fmt: skip

claims.bound("training with the length-normalised penalty ends at ref·e^(L(R − c)/β), and not at π*", OWN,
    "this, and π* for k2 of the sequence", "1e-7, where the gradient is below 1e-9", "end_error", 1e-7, "optimum",
    gradient_norm=lambda x: x < 1e-9)  # fmt: skip


@claims.add(OWN, "mean length of right ones up, of wrong ones down", "more than 1e-6: it fades like 1/β")
def _grows(rows: pd.DataFrame) -> Answer:
    """so it makes right answers longer and wrong ones shorter than the reference's"""
    found = need(rows, "optimum", penalty="length-normalised")
    right, wrong = (found[f"length_of_{kind}"] / found[f"reference_length_of_{kind}"] for kind in KINDS)
    said = f"right ones {right.min():.3f} … {right.max():.3f} times as long"
    said += f", wrong ones {wrong.min():.3f} … {wrong.max():.3f}"
    return said, right.min() > 1 + 1e-6 and wrong.max() < 1 - 1e-6


claims.bound("at π* both keep the lengths that they have under the reference", "theory", "unchanged", "1e-9",
    lambda found: pd.concat([found[f"length_of_{kind}"] - found[f"reference_length_of_{kind}"] for kind in KINDS]),
    1e-9, "optimum", penalty="k2-loss-sequence")  # fmt: skip


@numbers.add
def _of_heads(rows: pd.DataFrame) -> Cited:
    yield from extremes("push at the reference", need(rows, "head", **AT_REFERENCE)["bias"])
    yield from melted(need(rows, "drift", form="top-k", likely_mass=0.8), ["mass", "mass_after"], ["k"])


@numbers.add
def _of_clamps(rows: pd.DataFrame) -> Cited:
    edges = {"low": "dead below", "high": "dead above"}
    yield from melted(need(rows, "clamp", u=LOG_RATIOS[0]), edges, ["bound"])
    lead = need(rows, "lead")
    lead = lead.assign(left=lead["pull"] / lead["pull of k3-loss"])
    yield from melted(lead, {"left": "pull left", "dead_mass": "dead mass"}, ["lead", "bound"])


numbers.melt("return", {"returned": "updates"}, ["penalty", "start"], step=0)

numbers.melt("precision", {"relative_error": "error"}, ["estimator", "kind", "rounded", "vocabulary", "log_ratio"],
    seed=0)  # fmt: skip

numbers.add(lambda rows: extremes("asymmetry", _asymmetries(rows)[1]))


numbers.melt("optimum", {name: name for name in ("length_of_right", "reference_length_of_right")}, ["beta"],
    penalty="length-normalised", seed=0)  # fmt: skip
