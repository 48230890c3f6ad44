"""What the rows say: claims, a table by length and steering, and the numbers that the paper cites."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from kltest.reproduce import Claim

from ..judging import Answer, Question, answers, select
from .settings import CONDITIONS, DISCOUNTS, EXACT, PARTS

Row = dict[str, Any]

TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the partial gradient of a token-level loss"
OWN = "this work"
LOCAL = ("k2-loss", "full-loss", "k1-reward-immediate")
RIGHT = ("k1-reward", "k1-reward-to-go")
# A share of the gradient below this would not be called missing by anyone.
CLEAR = 1e-2
# Rounding stays below EXACT; what is there may be small, but not as small as this.
VISIBLE = 1e-4


def tidy(rows: Sequence[Row]) -> list[Row]:
    """As computed, part by part."""
    return sorted(rows, key=lambda row: list(PARTS).index(row["part"]))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """One for each question; not run where rows that it needs are not there."""
    return answers("sequence", QUESTIONS, rows)


def _followed(rows: Sequence[Row], names: Sequence[str], column: str) -> Answer:
    chosen = [row for row in select(rows, "estimators") if row["estimator"] in names]
    if not chosen:
        return None
    off, longest = max(row[column] for row in chosen), max(row["length"] for row in chosen)
    who = ", ".join(dict.fromkeys(row["estimator"] for row in chosen))
    return f"{who}: off by {off:.0e} of its length, to T = {longest:,}", off < EXACT


def _root(rows: Sequence[Row]) -> Answer:
    chosen = select(rows, "root")
    if not chosen:
        return None
    off = max(abs(row["whole"] - row["chance"] * (1 - row["chance"]) * row["departure"]) for row in chosen)
    local = max(abs(row["local"]) for row in chosen)
    return f"truth off by {off:.0e}, local at most {local:.0e}", off < 1e-12 and local < 1e-15


def _root_seen(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "root") if row["estimator"] in (*LOCAL, "k3-loss", *RIGHT)]
    if not chosen:
        return None
    right = [row for row in chosen if row["estimator"] in RIGHT]
    off = max((abs(row["found"] - row["whole"]) for row in right), default=0.0)
    blind = max((abs(row["found"]) for row in chosen if row["estimator"] not in RIGHT), default=0.0)
    return f"to-go off by {off:.0e}; the others move the root by at most {blind:.0e}", off < 1e-12 and blind < 1e-15


def _context_free(rows: Sequence[Row]) -> Answer:
    chosen = [*select(rows, "length", steering=0.0), *select(rows, "vocabulary", steering=0.0)]
    if not chosen:
        return None
    most = max(row["missed"] for row in chosen)
    return f"at most {most:.0e}, over {len(chosen)} lengths, vocabularies and draws", most < EXACT


def _steered(rows: Sequence[Row]) -> Answer:
    chosen = _at_longest(rows)
    levels = sorted({row["steering"] for row in chosen})
    if len(levels) < 2 or chosen[0]["length"] < 1000:
        return None
    rises = all(
        one["missed"] / one["kept"] < other["missed"] / other["kept"]
        for one in chosen
        for other in chosen
        if one["seed"] == other["seed"] and one["steering"] < other["steering"]
    )
    shares = [_mean(row["missed"] / row["kept"] for row in chosen if row["steering"] == level) for level in levels]
    text = ", ".join(f"{share:.2g} at κ = {level:g}" for level, share in zip(levels, shares, strict=True))
    return f"T = {chosen[0]['length']:,}: {text}", rises


def _levels_off(rows: Sequence[Row]) -> Answer:
    """Growth from two tokens to the longest, in the mean over draws; change beyond ten memories, in every draw."""
    chosen = [row for row in select(rows, "length") if row["steering"] >= 0.75]
    growth, change = [], []
    for steering in sorted({row["steering"] for row in chosen}):
        mine: dict[int, dict[int, float]] = {}
        for row in chosen:
            if row["steering"] == steering:
                mine.setdefault(row["seed"], {})[row["length"]] = row["missed"]
        beyond = sorted({row["length"] for row in chosen if row["length"] >= 10 / (1 - steering) - EXACT})
        if len(beyond) < 2 or any(not {2, *beyond} <= set(draw) for draw in mine.values()):
            continue
        growth.append(fmean(draw[beyond[-1]] - draw[2] for draw in mine.values()))
        change += [abs(draw[beyond[-1]] - draw[beyond[0]]) for draw in mine.values()]
    if not growth:
        return None
    least, most = min(growth), max(change)
    found = f"from T = 2 on it grows by {least:.2f} or more; beyond ten memories it changes by {most:.3f} at most"
    return found, least > 0.1 and most < 0.05


def _formula(rows: Sequence[Row]) -> Answer:
    chosen = [*select(rows, "length"), *select(rows, "vocabulary")]
    if not chosen:
        return None
    off = max(row["off_formula"] for row in chosen)
    return f"off by {off:.0e}, to T = {max(row.get('length', 0) for row in chosen):,}", off < EXACT


def _last(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "length") if row["length"] >= 100]
    if not chosen:
        return None
    most = max(row["last"] * row["length"] for row in chosen)
    return f"at most {most:.2f}/T for T ≥ 100", most < 1.1


def _conditions(rows: Sequence[Row]) -> Answer:
    chosen = select(rows, "conditions")
    if not chosen:
        return None
    share = {name: [row["missed"] for row in chosen if row["condition"] == name] for name in CONDITIONS}
    exact = all(max(share[name]) < EXACT for name in ("both context-free", "relabelled"))
    others = ("policy context-free", "reference context-free", "neither")
    clear = all(min(share[name]) > CLEAR for name in others)
    again = max(row["off_again"] for row in chosen)
    text = ", ".join(f"{name} {_mean(share[name]):.2f}" for name in CONDITIONS)
    return f"missed: {text}; second route off by {again:.0e}", exact and clear and again < EXACT


def _discounted(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "credit", what="discount", critic=0.0) if row["steering"] > 0]
    if not chosen:
        return None
    falls, ends = True, 0.0
    for key in sorted({(row["steering"], row["seed"]) for row in chosen}):
        bias = {row["discount"]: row["bias"] for row in chosen if (row["steering"], row["seed"]) == key}
        falls &= all(bias[a] > bias[b] for a, b in pairwise(DISCOUNTS))
        ends = max(ends, bias[1.0])
    text = ", ".join(
        f"{_mean(row['bias'] for row in chosen if row['discount'] == discount):.2f} at γ = {discount:g}"
        for discount in (0.0, 0.9, 0.99)
    )
    return f"{text}, {ends:.0e} at γ = 1 (means over κ and draws)", falls and ends < EXACT


def _critic(rows: Sequence[Row]) -> Answer:
    again = select(rows, "credit", what="rollout by rollout")
    chosen = select(rows, "credit", what="discount")
    if not again:
        return None
    formed = max(row["off_formula"] for row in again)
    alone = {(row["steering"], row["seed"], row["discount"]): row["bias"] for row in chosen if row["critic"] == 0}
    scaled = max(
        abs(row["bias"] - (1 - row["critic"]) * alone[row["steering"], row["seed"], row["discount"]]) for row in chosen
    )
    text = f"advantages formed along every rollout: off by {formed:.0e}; bias off by {scaled:.0e}"
    return text, max(formed, scaled) < EXACT


def _curl(rows: Sequence[Row]) -> Answer:
    chosen = select(rows, "field")
    single, several = (
        [row["asymmetry"] for row in chosen if (row["length"] == 1) == one_step] for one_step in (True, False)
    )
    if not (single and several):
        return None
    return (
        f"one token: {max(single):.0e}; more: {min(several):.2g} to {max(several):.2f}",
        max(single) < EXACT and min(several) > VISIBLE,
    )


def _curl_without_bias(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "conditions") if row["condition"] in ("both context-free", "relabelled")]
    if not chosen:
        return None
    missed, least = max(row["missed"] for row in chosen), min(row["asymmetry"] for row in chosen)
    return f"missed at most {missed:.0e}, asymmetry at least {least:.2f}", missed < EXACT and least > CLEAR


def _circulation(rows: Sequence[Row]) -> Answer:
    found = {row["field"]: row for row in select(rows, "circulation")}
    if not found:
        return None
    formula = found["local_reverse_kl"]["formula"]
    off = max(abs(found[name]["circulation"] - formula) for name in ("local_reverse_kl", "k2-loss"))
    whole = abs(found["reverse_kl"]["circulation"])
    return (
        f"Δp·ΔKL = {formula:.6f}; both off by {off:.0e}; ∇KL: {whole:.0e}",
        off < EXACT and whole < EXACT and formula > CLEAR,
    )


def _ends(rows: Sequence[Row]) -> Answer:
    chosen = select(rows, "ends")
    if not chosen:
        return None
    starts, off = (pick(row[name] for row in chosen) for pick, name in ((min, "starts_apart"), (max, "off_rest")))
    triangular = max(max(row["by_earlier_logits"], row["blocks_asymmetry"]) for row in chosen)
    stable = max(row["least_stable"] for row in chosen)
    return (
        f"starts {starts:.2f} apart end within {off:.0e} of the rest point; eigenvalues real to {triangular:.0e}, "
        f"the largest {stable:.3f}",
        off < 1e-6 and triangular < EXACT and stable < 0,
    )


QUESTIONS = (
    Question(
        "a token-level loss follows the local gradient, at any length",
        TANG_MUNOS,
        "Σ_t E ∇KL_t, prefixes held fixed",
        lambda rows: _followed(rows, LOCAL, "off_local"),
        f"{EXACT:g}: sums of 10,000 terms in float64",
    ),
    Question(
        "k1 in the reward with credit for later tokens follows ∇KL(π‖ref), at any length",
        TANG_MUNOS,
        "∇KL(π‖ref)",
        lambda rows: _followed(rows, RIGHT, "bias"),
        f"{EXACT:g}: sums of 10,000 terms in float64",
    ),
    Question("the blind root", "theory", "truth p(1 − p)·d, local 0", _root, "1e-12 and 1e-15: rounding"),
    Question(
        "implementations at the blind root",
        "theory",
        "to-go gives p(1 − p)·d, token-level losses 0",
        _root_seen,
        "1e-12 and 1e-15: rounding",
    ),
    Question("what is missed where no context is seen", OWN, "0 at κ = 0", _context_free, f"{EXACT:g}: rounding"),
    Question(
        "what is missed, against what is kept, grows with how strongly tokens steer later ones",
        OWN,
        "from 0 at κ = 0 upwards, in every draw",
        _steered,
        "the order, at the longest length",
    ),
    Question(
        "what is missed grows with length up to a few memories 1/(1 − κ) in the mean over draws, then levels off",
        OWN,
        "growth, then no change (κ ≥ 0.75)",
        _levels_off,
        "growth over 0.1; level to 0.05 from ten memories on",
    ),
    Question(
        "what a persistent bigram misses, in closed form",
        OWN,
        "a token decides the KL of (1 − κⁿ)/(1 − κ) later ones",
        _formula,
        f"{EXACT:g}: sums of 10,000 terms in float64",
    ),
    Question("the last token alone", "theory", "about 1/T of the gradient", _last, "1.1/T: tokens differ in context"),
    Question(
        "when a token-level loss is exact",
        OWN,
        "where the KL to come does not depend on the token: both context-free, or relabelled alike",
        _conditions,
        f"exact: {EXACT:g}; not exact: above {CLEAR:g}",
    ),
    Question(
        "a discount γ goes from the local gradient to the whole",
        OWN,
        "bias falls in γ, to 0 at γ = 1",
        _discounted,
        f"{EXACT:g} at γ = 1; the order elsewhere",
    ),
    Question(
        "generalised advantages with a critic that knows a share α of the KL to come",
        OWN,
        "(1 − α) times the bias of a discount λ",
        _critic,
        f"{EXACT:g}: rounding",
    ),
    Question(
        "a token-level loss is the gradient of no function for T > 1",
        "theory",
        "‖J − Jᵀ‖/‖J + Jᵀ‖ is 0 at T = 1 only",
        _curl,
        f"zero: {EXACT:g}; not zero: above {VISIBLE:g}",
    ),
    Question(
        "it is the gradient of no function even where it misses nothing",
        OWN,
        "an asymmetric Jacobian at an exact gradient",
        _curl_without_bias,
        f"zero: {EXACT:g}; not zero: above {CLEAR:g}",
    ),
    Question(
        "what a token-level loss gains by going round a rectangle of two logits",
        OWN,
        "∮ = Δp·ΔKL; 0 for ∇KL",
        _circulation,
        f"{EXACT:g}: a Gauss-Legendre rule of 30 nodes an edge",
    ),
    Question(
        "with a reward, in a token tree: one end, no rotation",
        OWN,
        "every start ends at the rest point; eigenvalues real, below 0",
        _ends,
        f"1e-6 in probability after the steps made; triangular to {EXACT:g}",
    ),
)


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What is missed, by length and steering: the share, and the cosine of the local gradient, means over draws."""
    chosen = select(rows, "length")
    levels = sorted({row["steering"] for row in chosen})
    found = []
    for length in sorted({row["length"] for row in chosen}):
        line: Row = {"T": f"{length:,}"}
        for level in levels:
            mine = [row for row in chosen if (row["length"], row["steering"]) == (length, level)]
            share, angle = _mean(row["missed"] for row in mine), _mean(row["cosine"] for row in mine)
            line[f"κ = {level:g}"] = f"{share:.2f} ({angle:.2f})".replace("-", "−") if share >= EXACT else "0 (1)"
        found.append(line)
    return {"table": found} if found else {}


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """By name; means over draws where there are several."""
    longest = _at_longest(rows)
    result: dict[str, float | int | str | None] = {"longest": longest[0]["length"] if longest else None}
    for steering in (0.5, 0.75, 0.9, 0.99):
        mine = [row for row in longest if row["steering"] == steering]
        result[f"missed, {steering:g}"] = _mean(row["missed"] for row in mine)
        result[f"missed against kept, {steering:g}"] = _mean(row["missed"] / row["kept"] for row in mine)
        result[f"cosine, {steering:g}"] = _mean(row["cosine"] for row in mine)
        result[f"lowest cosine, {steering:g}"] = min((row["cosine"] for row in mine), default=None)
        result[f"highest cosine, {steering:g}"] = max((row["cosine"] for row in mine), default=None)
        short = select(rows, "length", steering=steering, length=2)
        result[f"missed by two tokens, {steering:g}"] = _mean(row["missed"] for row in short)
        for discount in (0.9, 0.95, 0.99):
            credit = select(rows, "credit", what="discount", critic=0.0, steering=steering, discount=discount)
            result[f"bias at discount {discount:g}, {steering:g}"] = _mean(row["bias"] for row in credit)
    result["last token, T = 100"] = max((row["last"] for row in select(rows, "length", length=100)), default=None)
    for name in CONDITIONS:
        result[f"missed, {name}"] = _mean(row["missed"] for row in select(rows, "conditions", condition=name))
        result[f"asymmetry, {name}"] = _mean(row["asymmetry"] for row in select(rows, "conditions", condition=name))
    result["largest asymmetry"] = max((row["asymmetry"] for row in select(rows, "field")), default=None)
    for row in select(rows, "circulation"):
        result[f"circulation of {row['field']}"] = row["circulation"]
        result["circulation by formula"] = row["formula"]
    off = [row["off_formula"] for row in [*select(rows, "length"), *select(rows, "vocabulary")]]
    result["recursion against formula"] = max(off, default=None)
    ends = select(rows, "ends")
    result["ends off rest"] = max((row["off_rest"] for row in ends), default=None)
    result["starts apart"] = min((row["starts_apart"] for row in ends), default=None)
    return result


def _at_longest(rows: Sequence[Row]) -> list[Row]:
    chosen = select(rows, "length")
    longest = max((row["length"] for row in chosen), default=None)
    return [row for row in chosen if row["length"] == longest]


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
