"""What approximations do to the gradient: claims, tables and the numbers that the paper cites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..judging import Answer, Question, answers, at_most, select
from .settings import EXACT, LOG_RATIOS, PARTS, TOKENS

Row = dict[str, Any]
NAME = "approximations"
OWN = "this work"
EMA_PG = "Zhang & Ba 2026 (EMA-PG, arXiv 2602.04417), Top-k KL"
VERL = "verl, low_var_kl; theory"
# The clamped k3 clamps the log-ratio as well.
LOG_BOUND = 20.0
# Tokens enough for squared rounding errors to be near their mean.
MANY = 500
# The largest relative error of a number that is rounded to eight significant bits.
HALF_UNIT = 2.0**-9


def tidy(rows: Sequence[Row]) -> list[Row]:
    """As computed, part by part."""
    return sorted(rows, key=lambda row: list(PARTS).index(row["part"]))


def _heads(rows: Sequence[Row], form: str) -> list[Row]:
    """On one step and on prefixes: what is claimed is claimed of both."""
    one, prefixes = select(rows, "head", form=form), select(rows, "prefixes", form=form)
    return [*one, *prefixes] if one and prefixes else []


def _truncated(rows: Sequence[Row]) -> list[Row]:
    return [row for row in select(rows, "head", form="top-k", distance=0.0) if row["k"] < TOKENS]


def _biased_at_the_reference(rows: Sequence[Row]) -> Answer:
    found = [row["bias"] for row in _truncated(rows)]
    return (f"{min(found):.2g} … {max(found):.2g}", min(found) > 1e-3) if found else None


def _detached(rows: Sequence[Row]) -> Answer:
    found = _heads(rows, "top-k-detached")
    return at_most(found, "theory_error", EXACT)


def _drifted(rows: Sequence[Row]) -> Answer:
    found = [r for r in select(rows, "drift", form="top-k") if r["predicted_kl"] is not None and r["mass"] < 1 - EXACT]
    if not found:
        return None
    row = found[0]
    words = (
        f"head {row['mass']:.2f} → {row['mass_after']:.4f}, KL {row['kl']:.4f}; predicted {row['predicted_mass']:.4f}"
    )
    off = max(abs(row["mass_after"] - row["predicted_mass"]), abs(row["kl"] - row["predicted_kl"]))
    return words, off < 1e-10


def _unsettled(rows: Sequence[Row]) -> Answer:
    found = [row for row in select(rows, "drift", form="top-k") if row["predicted_kl"] is None]
    if not found:
        return None
    norms, kls = ([row[name] for row in found] for name in ("gradient_norm", "kl"))
    words = f"‖gradient‖ {min(norms):.2g} … {max(norms):.2g}, KL {min(kls):.2g} … {max(kls):.2g}"
    return words, min(norms) > 1e-3 and min(kls) > 1e-3


def _stays(rows: Sequence[Row]) -> Answer:
    return at_most([{"kl": abs(row["kl"])} for row in select(rows, "drift", form="top-k-detached")], "kl", EXACT)


def root_of_k3(value: float, sign: float) -> float:
    """The log-ratio on one side of zero at which e^{−u} − 1 + u has this value; by bisection."""
    inside, outside = 0.0, sign * (value + 2)
    for _ in range(200):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if math.expm1(-middle) + middle < value else (inside, middle)
    return inside


def _dead(rows: Sequence[Row]) -> Answer:
    found = select(rows, "clamp", u=LOG_RATIOS[0])
    if not found:
        return None
    off = [
        abs(row[edge] - sign * min(abs(root_of_k3(row["bound"], sign)), LOG_BOUND))
        for row in found
        for edge, sign in (("low", -1), ("high", 1))
    ]
    row = max(found, key=lambda one: -abs(one["bound"] - 10))
    return f"at {row['bound']:g}: dead below {row['low']:.4f} and above {row['high']:.4f}", max(off) < 1e-9


def _silenced(rows: Sequence[Row]) -> Answer:
    found = [row for row in select(rows, "lead", bound=10.0) if row["dead_mass"] > 0.5]
    if not found:
        return None
    left = [row["pull"] / row["pull of k3-loss"] for row in found]
    exact = max(row["theory_error"] for row in found) < EXACT
    return f"{min(left):.1e} … {max(left):.1e} of the pull left", max(left) < 0.1 and exact


def _alive(rows: Sequence[Row]) -> Answer:
    return at_most([row for row in select(rows, "lead") if row["dead_mass"] == 0], "relative_bias", EXACT)


def _returns(rows: Sequence[Row]) -> dict[tuple[str, float], int | None]:
    return {(row["penalty"], row["start"]): row["returned"] for row in select(rows, "return", step=0)}


def _way_back(rows: Sequence[Row]) -> Answer:
    steps = _returns(rows)
    start = max((at for _, at in steps), default=0.0)
    plain, clamped = (steps.get((name, start), 0) for name in ("k3-loss", "k3-clamped"))
    if not plain or clamped == 0:
        return None
    words = f"{plain} updates without, {clamped or 'never'} with the clamp, from a lead of {start:g}"
    return words, clamped is None or clamped > 10 * plain


def _large(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Where there are enough tokens for rounding errors to be averages."""
    return [row for row in select(rows, "precision", **wanted) if row["vocabulary"] >= 4096]


def _read(rows: Sequence[Row]) -> Answer:
    found = [
        row["relative_error"] / row["predicted_error"]
        for row in select(rows, "precision", rounded="log-probs", estimator="k2-loss")
        if row["misread"] > MANY
    ]
    return (f"{min(found):.3f} … {max(found):.3f} of it", min(found) > 0.85 and max(found) < 1.15) if found else None


def _same_for_all(rows: Sequence[Row]) -> Answer:
    cells: dict[tuple, list[float]] = {}
    for row in _large(rows, rounded="log-probs"):
        if row["log_ratio"] <= 0.1:
            cells.setdefault((row["kind"], row["vocabulary"], row["log_ratio"]), []).append(row["relative_error"])
    spread = [max(same) / min(same) for same in cells.values() if len(same) == 3]
    return (f"at most a factor {max(spread):.3f} apart", max(spread) < 1.15) if spread else None


def _sixteen(rows: Sequence[Row]) -> Answer:
    both = [
        {row["log_ratio"]: row for row in _large(rows, rounded="log-probs", estimator="k2-loss", kind=kind)
         if row["log_ratio"] >= 0.1}
        for kind in ("bfloat16", "float16")
    ]  # fmt: skip
    ratios = [row["relative_error"] / both[1][at]["relative_error"] for at, row in both[0].items() if at in both[1]]
    return (f"{min(ratios):.2f} … {max(ratios):.2f}", all(7 < one < 9 for one in ratios)) if ratios else None


def _nothing_left(rows: Sequence[Row]) -> Answer:
    found = {
        row["estimator"]: row["relative_error"]
        for row in _large(rows, rounded="arithmetic", kind="bfloat16", log_ratio=3e-4)
    }
    if not {"k2-loss", "k3-loss"} <= found.keys():
        return None
    words = f"k3: {found['k3-loss']:.3f} of the gradient lost; k2: {found['k2-loss']:.4f}"
    return words, found["k3-loss"] > 0.99 and found["k2-loss"] < HALF_UNIT


def _digits_kept(rows: Sequence[Row]) -> Answer:
    chosen = [
        r for r in select(rows, "precision", rounded="arithmetic", kind="bfloat16") if r["estimator"] != "k3-loss"
    ]
    # π²-weighted, and centred: the error may exceed that of a single product.
    return at_most(chosen, "relative_error", 2 * HALF_UNIT)


def _single(rows: Sequence[Row]) -> Answer:
    return at_most(select(rows, "precision", kind="float32"), "relative_error", 0.01)


def _falls(rows: Sequence[Row]) -> Answer:
    halvings = []
    for name in ("token-mean", "whole-return"):
        for seed in sorted({row["seed"] for row in select(rows, "batch")}):
            far = {r["batch_size"]: r["relative_distance"] for r in select(rows, "batch", normalised=name, seed=seed)}
            sizes = sorted(size for size in far if size >= 64)
            halvings += [math.log(far[a] / far[b]) / math.log(b / a) for a, b in pairwise(sizes)]
    return (f"B^(−{min(halvings):.3f}) … B^(−{max(halvings):.3f})", min(halvings) > 0.97 and max(halvings) < 1.03) if (
        halvings
    ) else None  # fmt: skip


def _one_by_one(rows: Sequence[Row]) -> Answer:
    return at_most(select(rows, "batch"), "enumeration_error", EXACT)


def _objective(rows: Sequence[Row]) -> Answer:
    return at_most(select(rows, "lengths", field="whole return"), "objective_error", EXACT)


def _no_field(rows: Sequence[Row]) -> Answer:
    found = select(rows, "lengths")
    whole = [row["asymmetry"] for row in found if row["field"] == "whole return"]
    others = [row["asymmetry"] for row in found if row["field"] != "whole return"]
    if not found:
        return None
    words = f"{min(others):.2g} … {max(others):.2g}; whole return: {max(whole):.0e}"
    return words, min(others) > 1e-3 and max(whole) < EXACT


def _k1(rows: Sequence[Row]) -> Answer:
    found = [row["k1_loss"] for row in select(rows, "lengths", field="whole return")]
    return (f"{min(found):.2f} … {max(found):.2f} times as long", min(found) > 1e-2) if found else None


def _end(rows: Sequence[Row]) -> Answer:
    return at_most([row for row in select(rows, "optimum") if row["gradient_norm"] < 1e-9], "end_error", 1e-7)


def _grows(rows: Sequence[Row]) -> Answer:
    found = select(rows, "optimum", penalty="length-normalised")
    if not found:
        return None
    right = [row["length_of_right"] / row["reference_length_of_right"] for row in found]
    wrong = [row["length_of_wrong"] / row["reference_length_of_wrong"] for row in found]
    words = (
        f"right ones {min(right):.3f} … {max(right):.3f} times as long, wrong ones {min(wrong):.3f} … {max(wrong):.3f}"
    )
    return words, min(right) > 1 + 1e-6 and max(wrong) < 1 - 1e-6


def _keeps(rows: Sequence[Row]) -> Answer:
    off = [
        {"off": abs(row[f"length_of_{kind}"] - row[f"reference_length_of_{kind}"])}
        for row in select(rows, "optimum", penalty="k2-loss-sequence")
        for kind in ("right", "wrong")
    ]
    return at_most(off, "off", 1e-9)


SUMS = f"{EXACT:g}: sums of float64"
QUESTIONS = (
    Question("top-k with a sampled tail, differentiated: beside ∇KL, with prefixes held fixed, there is ∇π(S)",
             f"{EMA_PG}; theory", "∇π(S), and Σ d(s)∇π(S|s) on prefixes",
             lambda rows: at_most(_heads(rows, "top-k"), "theory_error", EXACT), SUMS),
    Question("so it is biased even at π = ref, for any fixed head but the whole vocabulary", f"{EMA_PG}; theory",
             "a gradient where there should be none", _biased_at_the_reference, "above 0.001, rounding is 1e-16"),
    Question("with the head's log-ratio detached it is exact at every k", "TT-OPD 2026 (arXiv 2609.34447)",
             "no bias", _detached, SUMS),
    Question("a head alone lacks the tail's share of the gradient, and has ∇π(S) as well", "theory",
             "∇π(S) − E[1{y ∉ S}·u·g]", lambda rows: at_most(_heads(rows, "head-alone"), "theory_error", EXACT), SUMS),
    Question("training without a reward, from the reference, top-k leaves it: a stable head ends at "
             "π ∝ ref·e^(−1{v ∈ S}), whatever β", OWN, "the head's mass m becomes m/(m + (1 − m)e)", _drifted, "1e-10"),
    Question("a head that does not stay the likeliest does not settle at a constant rate", OWN,
             "gradient and KL(π‖ref) above 0.001 at the end", _unsettled, "settled runs: below 1e-10"),
    Question("with the head detached such training stays at the reference", OWN, "KL(π‖ref) = 0", _stays, SUMS),
    Question("a clamped k3 has no gradient at u below −2.6 or above 11", VERL,
             "the roots of e^(−u) − 1 + u = bound, ±20 at most", _dead, "1e-9: bisection"),
    Question("where no token is in the dead zone it is k3", VERL, "∇KL(ref‖π)", _alive, SUMS),
    Question("once the tokens that the policy has left are in it, hardly any of the pull remains", f"{VERL}; {OWN}",
             "less than 10 % of k3's at a bound of 10: Σ over the living tokens of (π − ref)·g", _silenced, SUMS),
    Question("a policy that has run ahead comes back many times later", OWN, "more than ten times as many updates",
             _way_back, "exact training, until KL(π‖ref) is below 0.01"),
    Question("log-probs rounded before they are subtracted: the error of the gradient is that of differences on a grid",
             OWN, "√(Σπ²f(h − f)/Σπ²u²), f = |u| mod h, h the grid's step at the log-prob", _read,
             "15 %, where more than 500 tokens are misread"),
    Question("no formula gives the digits back: k1, k2 and k3 are then equally wrong", OWN, "ratio 1", _same_for_all,
             "15 %, for |log-ratios| up to 0.1"),
    Question("float16 keeps eight times as much of a log-prob as bfloat16", "Qi et al. 2025 (arXiv 2510.26788)",
             "ratio of errors 8", _sixteen, "7 … 9"),
    Question("a rounded log-ratio costs k1 in the reward and k2 half a unit in the last place, at any distance", OWN,
             f"below {2 * HALF_UNIT:.4f} in bfloat16", _digits_kept, "twice 2^−9"),
    Question("and k3 everything near the reference: w rounds to 1, and 1 − w to nothing", OWN,
             "bfloat16, log-ratios of 3e-4: all of it", _nothing_left, "more than 99 %"),
    Question("float32 is enough everywhere here", OWN, "below 1 %", _single, "log-ratios from 1e-4"),
    Question("one mean over a batch's tokens: the closed form is the sum over all batches", "theory", "equal",
             _one_by_one, SUMS),
    Question("and tends to ∇KL/E[L] (whole return), or its local form (tokens), like 1/B", "theory",
             "distance ∝ 1/B", _falls, "exponents within 3 %, B from 64"),
    Question("each rollout over its own length: the gradient of E[(Σu − 1)/L]", "theory", "equal", _objective, SUMS),
    Question("u_t/L, reward-to-go/L and k3_t/L follow no function", "theory",
             "Jacobians that are not symmetric; whole return's is", _no_field, "above 0.001 against rounding"),
    Question("k1 in the loss over L is no longer zero", "theory", "a gradient", _k1, "against length-normalised k2's"),
    Question("training with the length-normalised penalty ends at ref·e^(L(R − c)/β), and not at π*", OWN,
             "this, and π* for k2 of the sequence", _end, "1e-7, where the gradient is below 1e-9"),
    Question("so it makes right answers longer and wrong ones shorter than the reference's", OWN,
             "mean length of right ones up, of wrong ones down", _grows, "more than 1e-6: it fades like 1/β"),
    Question("at π* both keep the lengths that they have under the reference", "theory", "unchanged", _keeps, "1e-9"),
)  # fmt: skip


def claims(rows: Sequence[Row]) -> list:
    return answers(NAME, QUESTIONS, rows)


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Where training with either penalty ends, and errors in low precision."""
    ends = [
        {
            "β": f"{row['beta']:g}",
            "penalty": row["penalty"],
            "KL(π‖ref)": f"{row['kl']:.4f}",
            "J* − J": f"{max(row['gap'], 0.0):.4f}",
            "length of right answers": f"{row['length_of_right']:.3f} ({row['reference_length_of_right']:.3f})",
            "of wrong ones": f"{row['length_of_wrong']:.3f} ({row['reference_length_of_wrong']:.3f})",
        }
        for row in select(rows, "optimum")
    ]
    errors: list[Row] = []
    largest = max((row["vocabulary"] for row in select(rows, "precision")), default=None)
    chosen = select(rows, "precision", vocabulary=largest)
    for kind, rounded, name in dict.fromkeys((row["kind"], row["rounded"], row["estimator"]) for row in chosen):
        mine = [row for row in chosen if (row["kind"], row["rounded"], row["estimator"]) == (kind, rounded, name)]
        errors.append(
            {
                "type": kind,
                "rounded": rounded,
                "estimator": name,
                **{f"u ≈ {row['log_ratio']:g}": f"{row['relative_error']:.2g}" for row in mine},
            }
        )
    return {"table": ends, "precision": errors}


def numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """What the paper cites."""
    result: dict[str, Any] = {"tokens": TOKENS}
    for row in select(rows, "drift", form="top-k"):
        result |= {f"{name} after a head of {row['k']}": row[name] for name in ("mass", "mass_after", "kl")}
    at_reference = [row["bias"] for row in _truncated(rows)]
    if at_reference:
        result |= {"smallest push at the reference": min(at_reference), "largest push": max(at_reference)}
    for row in select(rows, "clamp", u=LOG_RATIOS[0]):
        result |= {f"dead {edge}, bound {row['bound']:g}": row[edge] for edge in ("low", "high")}
    for row in select(rows, "lead"):
        at = f"lead {row['lead']:g}, bound {row['bound']:g}"
        result |= {f"pull left, {at}": row["pull"] / row["pull of k3-loss"], f"dead mass, {at}": row["dead_mass"]}
    for (name, start), returned in _returns(rows).items():
        result[f"updates of {name} from {start:g}"] = returned
    for row in select(rows, "precision"):
        where = (
            f"{row['estimator']}, {row['kind']} {row['rounded']}, {row['vocabulary']} tokens, u {row['log_ratio']:g}"
        )
        result[f"error of {where}"] = row["relative_error"]
    for row in select(rows, "batch", seed=0):
        result[f"distance of {row['normalised']}, batches of {row['batch_size']}"] = row["relative_distance"]
    asymmetries = [row["asymmetry"] for row in select(rows, "lengths") if row["field"] != "whole return"]
    if asymmetries:
        result |= {"smallest asymmetry": min(asymmetries), "largest asymmetry": max(asymmetries)}
    for row in select(rows, "optimum", penalty="length-normalised"):
        result |= {
            f"{name}, beta {row['beta']:g}": value for name, value in row.items() if name not in ("part", "beta")
        }
    return result
