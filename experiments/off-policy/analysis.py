"""What staleness does to gradients, weights and training: claims, tables and the numbers that the paper cites."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from kltest.reproduce import Claim

from ..judging import Answer, Question, answers, at_most, select
from .closed_forms import EXACT_RECIPES, most_updates, multiplier, ratio_free_settles
from .settings import CLIP, EXACT, FOLLOWED, PATH, RECIPES, TRAINED

Row = dict[str, Any]
NAME = "off-policy"
ORDER = (
    *("part", "length", "estimator", "staleness", "tokens", "compared", "noise", "at"),
    *("recipe", "updates", "inner_steps", "batch_size", "seed"),
)
WHOLE = ("k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio")
UNCORRECTED = ("k1-reward", "k2-loss", "k2-loss-sequence", "k3-loss")
# A bias, a drift or a gap is called one where it is larger than this, many times what rounding leaves.
SEEN = 1e-4
# Central differences of size 1e-6.
DIFFERENCES = 1e-6
# What multiplies them by more leaves the range where a cycle is linear.
SMALL = 500.0
# A cycle that grows so much in all of training has had the time to show it.
GROWN = 1e6
# Gaps below this are what is left of zero, and may be zero itself.
ROUNDING = 1e-14
# Shorter rollouts are at times the noisier with prefix ratios.
LONG = 10
# Tokens after which the first ones count for little in a mean over all.
SETTLED = 100
# −D₂/KL(π‖μ) is −2 plus terms of the order of the sampler's distance.
NEXT_ORDER = 2.0
# With fewer rollouts a baseline is noise itself.
FEW = 16
# Updates times learning rate from which sampled runs are at their end and no longer on the way there.
THERE = 60.0
LIMIT = f"{EXACT:g}: float64, sums over all rollouts"


def tidy(rows: Sequence[Row]) -> list[Row]:
    """In a fixed order; where a cycle has a closed form, `predicted` is what it multiplies a small step by."""
    found = [{**row, "predicted": multiplier(row)} if row["part"] == "stability" else dict(row) for row in rows]
    return sorted(found, key=lambda row: [_rank(row.get(name)) for name in ORDER])


def _rank(value: Any) -> tuple:
    return (value is not None, isinstance(value, str), value if value is not None else 0)


def claims(rows: Sequence[Row]) -> list[Claim]:
    return answers(NAME, QUESTIONS, rows)


def _path(rows: Sequence[Row], names: Iterable[str], **wanted: Any) -> list[Row]:
    return [row for row in select(rows, "path", **wanted) if row["estimator"] in names]


def _series(rows: Sequence[Row], along: str, *keys: str) -> dict[tuple, list[Row]]:
    """Rows by these keys, each list in the order of `along`."""
    found: dict[tuple, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row[along]):
        found[tuple(row[key] for key in keys)].append(row)
    return found


def _sequences(rows: Sequence[Row], names: Iterable[str]) -> list[Row]:
    return [row for row in _path(rows, names) if row["length"] > 1]


def _single_decision(rows: Sequence[Row]) -> Answer:
    found = _path(rows, ("k3-ratio",), length=1)
    if not found:
        return None
    gradient, logged = max(row["bias"] for row in found), max(abs(row["value_bias"]) for row in found)
    return f"gradient within {gradient:.1e}, value within {logged:.1e}", max(gradient, logged) < EXACT


def _token_on_sequences(rows: Sequence[Row]) -> Answer:
    series = _series(_sequences(rows, ("k3-ratio",)), "staleness", "length", "seed")
    known = [one for one in series.values() if one[0]["staleness"] == 0 and len(one) > 2]
    if not known:
        return None
    grows = all(a["drift"] < b["drift"] for one in known for a, b in pairwise(one))
    least = min(row["bias"] for one in known for row in one)
    last = _mean(one[-1]["drift"] for one in known)
    said = (
        f"bias never below {least:.3f}; {last:.2f} added at the stalest, {'' if grows else 'not '}growing all the way"
    )
    return said, grows and least > SEEN


def _token_value(rows: Sequence[Row]) -> Answer:
    found = [row for row in _sequences(rows, ("k3-ratio",)) if row["staleness"]]
    if not found:
        return None
    off, furthest = max(abs(row["value_off_sampler"]) for row in found), max(abs(row["value_bias"]) for row in found)
    return f"the former within {off:.1e}; up to {100 * furthest:.0f} % from the latter", off < EXACT and furthest > SEEN


def _twins(rows: Sequence[Row]) -> Answer:
    one, other = (
        {(r["length"], r["staleness"], r["seed"]): r for r in _path(rows, (name,))}
        for name in ("k3-ratio", "k2-ratio-detached")
    )
    both = one.keys() & other.keys()
    if not both:
        return None
    off = max(abs(one[key][name] - other[key][name]) for key in both for name in ("bias", "variance", "drift"))
    return f"bias and variance equal within {off:.1e}", off < 1e-9


def _detached(rows: Sequence[Row]) -> Answer:
    found = _path(rows, ("k3-ratio-detached",))
    least = min((row["bias"] for row in found), default=None)
    return None if least is None else (f"bias at least {least:.3f}", least > SEEN)


def _broadcast(rows: Sequence[Row]) -> Answer:
    found = _sequences(rows, ("k3-broadcast-ratio",))
    fresh = [row["off_followed"] for row in found if not row["staleness"]]
    if not fresh:
        return None
    biases = [row["bias"] for row in found]
    said = f"on-policy within {max(fresh):.1e}; bias {min(biases):.2f} to {max(biases):.1f}"
    return said, max(fresh) < EXACT and min(biases) > SEEN


def _stale(rows: Sequence[Row]) -> Answer:
    found = [row for row in _path(rows, ("k1-reward-stale",)) if row["staleness"]]
    if not found:
        return None
    off, least = max(row["off_followed"] for row in found), min(row["bias"] for row in found)
    said = f"within {off:.1e}; bias {least:.3f} to {max(row['bias'] for row in found):.2f}"
    return said, off < EXACT and least > SEEN


def _first_order(rows: Sequence[Row]) -> Answer:
    series = _series(_path(rows, UNCORRECTED), "staleness", "estimator", "length", "seed")
    ratios = []
    for one in series.values():
        by = {row["staleness"]: row["drift"] for row in one}
        ratios += [by[4] / by[1]] if 1 in by and 4 in by else []
    return (f"{min(ratios):.2f} to {max(ratios):.2f} times", 3.4 < min(ratios) <= max(ratios) < 4.6) if ratios else None


def _clip(rows: Sequence[Row]) -> Answer:
    found = _path(rows, ("k1-reward-clipped-ratio",), length=1)
    inside = [row["bias"] for row in found if row["furthest"] < CLIP]
    outside = [row["bias"] for row in found if row["furthest"] > CLIP]
    if not inside or not outside:
        return None
    said = f"at most {max(inside):.1e} inside, up to {max(outside):.2f} beyond"
    return said, max(inside) < EXACT and max(outside) > SEEN


def _exponential(rows: Sequence[Row]) -> Answer:
    found = [
        (-row["log_sequence_share"] / row["kl_to_sampler"], row["noise"])
        for row in select(rows, "weights")
        if row["at"] >= LONG
    ]
    if not found:
        return None
    off, least = max(abs(rate - 2) / noise for rate, noise in found), min(rate for rate, _ in found)
    said = f"2 within {off:.2f} times the noise of the sampler's logits; at least {least:.2f} times KL(π‖μ)"
    return said, off < NEXT_ORDER and least > 1


def _tokens_flat(rows: Sequence[Row]) -> Answer:
    series = _series(select(rows, "weights"), "at", "noise", "seed")
    pairs = [
        (one[-1], row) for one in series.values() for row in one if row["at"] == SETTLED and one[-1]["at"] > SETTLED
    ]
    if not pairs:
        return None
    off = max(abs(last["token_share"] / row["token_share"] - 1) for last, row in pairs)
    falls = all(last["prefix_share"] < row["prefix_share"] for last, row in pairs)
    return f"tokens {100 * off:.1f} % apart, prefixes {'fall' if falls else 'do not fall'}", off < 0.1 and falls


def _prices(rows: Sequence[Row]) -> Answer:
    whole, prefix = (
        {(row["tokens"], row["seed"]): row["variance"] for row in select(rows, "length", compared=name)}
        for name in WHOLE
    )
    both = {key: whole[key] / prefix[key] for key in whole.keys() & prefix.keys() if key[0] >= LONG}
    return (f"{min(both.values()):.2f} to {max(both.values()):.1f} times", min(both.values()) > 1) if both else None


def _closed_form(rows: Sequence[Row]) -> Answer:
    found = [row for row in select(rows, "stability") if row["predicted"] is not None and row["predicted"] < SMALL]
    if not found:
        return None
    off = max(abs(row["multiplier"] / row["predicted"] - 1) for row in found)
    return f"within {off:.1e} in {len(found)} cycles", off < DIFFERENCES


def _stale_threshold(rows: Sequence[Row]) -> Answer:
    series = _series(select(rows, "stability", recipe="stale"), "updates", "seed")
    if not series:
        return None
    agrees, said = True, []
    for one in series.values():
        limit = most_updates(one[0])
        agrees &= all((row["multiplier"] < 1) == (row["updates"] < limit) for row in one)
        stable, unstable = (
            [row["updates"] for row in one if (row["multiplier"] < 1) is wanted] for wanted in (True, False)
        )
        said.append(f"settles to {max(stable, default=0)}, not from {min(unstable, default='–')} on ({limit:.2f})")
    sides = {row["updates"] < most_updates(row) for one in series.values() for row in one}
    return ("; ".join(said), agrees) if len(sides) == 2 else None


def _none_threshold(rows: Sequence[Row]) -> Answer:
    series = _series(select(rows, "stability", recipe="none"), "updates", "seed")
    last = [(one[-1], ratio_free_settles(one[-1])) for one in series.values()]
    known = [(row["kl"], row["multiplier"] < 1, settles) for row, settles in last if settles is not None]
    said = "; ".join(f"K = {kl:.2f}: {'settles' if found else 'does not'}" for kl, found, _ in known)
    return (said, all(found is settles for _, found, settles in known)) if known else None


def _as_stable(rows: Sequence[Row]) -> Answer:
    """Cycles that multiply a small step until it is large leave a tenfold gap; those that shrink it leave none.

    None: no more than one update a sampler, or than the factor squared has left of the early gap, which is quadratic in
    a small step.
    """
    stability = {(r["recipe"], r["updates"], r["learning_rate"], r["seed"]): r for r in select(rows, "stability")}
    series = _series(select(rows, "training", batch_size=0), "inner_steps", "recipe", "learning_rate", "seed")
    settled, not_settled = [], []
    for (recipe, rate, seed), one in series.items():
        if RECIPES[recipe][2] != "optimum" or one[0]["inner_steps"] != 1:
            continue
        first = max(one[0]["gap"], ROUNDING)
        for row in one[1:]:
            cycle = stability.get((recipe, row["inner_steps"], rate, seed))
            if cycle is None:
                continue
            cycles = (row["steps"] - int(TRAINED["early"])) / row["inner_steps"]
            if cycle["multiplier"] < 1:
                settled.append(row["gap"] / max(first, row["early_gap"] * cycle["multiplier"] ** (2 * cycles)))
            elif cycle["multiplier"] ** cycles > GROWN:
                not_settled.append(row["gap"] / first)
    if not settled or not not_settled:
        return None
    said = f"at most {max(settled):.2f} times as much where it shrinks, from {min(not_settled):.3g} times else"
    return said, max(settled) < 10 < min(not_settled)


def _same_end(rows: Sequence[Row]) -> Answer:
    series = _series(
        [row for row in select(rows, "training", batch_size=0) if row["recipe"] in ("sequence", "prefix-to-go")],
        "inner_steps", "recipe", "seed",
    )  # fmt: skip
    known = [[row["gap"] for row in one] for one in series.values() if len(one) > 1]
    if not known:
        return None
    off = max(max(max(gaps) - min(gaps) - ROUNDING, 0.0) / max(min(gaps), ROUNDING) for gaps in known)
    return f"gaps equal within {off:.1e}", off < 1e-6


def _ratio_free(rows: Sequence[Row]) -> Answer:
    drawn = [
        row
        for row in select(rows, "training", recipe="none-centred")
        if row["batch_size"] >= FEW and row["steps"] * row["learning_rate"] > THERE
    ]
    series = _series(drawn, "inner_steps", "batch_size", "seed")
    known = [one for one in series.values() if len(one) > 1]
    if not known:
        return None
    worst = max(row["gap"] / max(one[0]["gap"], ROUNDING) for one in known for row in one[1:])
    return f"at most {worst:.2f} times the gap of one update", worst < 1.25


TRL = "TRL #4637, #6503"
QUESTIONS = (
    Question(
        "full-sequence ratios, and prefix ratios on the cost to go, follow the whole KL at every staleness",
        "theory; an estimate that Shah et al. 2025, §3, leave for future work",
        "no bias",
        lambda rows: at_most(_path(rows, WHOLE), "bias", EXACT),
        LIMIT,
    ),
    Question(
        "every estimator with a name for what it follows off-policy follows that",
        "theory",
        f"{sum(name is not None for name in FOLLOWED.values())} combinations of named gradients",
        lambda rows: at_most(select(rows, "path"), "off_followed", EXACT),
        LIMIT,
    ),
    Question(
        "the truth by recursion is the truth by automatic differentiation",
        "this work",
        "equal",
        lambda rows: at_most(select(rows, "path"), "truth_again", EXACT),
        LIMIT,
    ),
    Question(
        "k3 times its differentiable token ratio is unbiased in value and gradient, on a single decision",
        f"DeepSeek-V3.2, §3.1, Eq. 7; {TRL}",
        "exact at every staleness",
        _single_decision,
        LIMIT,
    ),
    Question(
        "on sequences it is not: what it lacks on-policy stays, and prefixes weighted by the sampler come to that",
        "theory",
        "biased at every staleness, and its drift from its own on-policy gradient grows",
        _token_on_sequences,
        f"{SEEN:g}, where rounding leaves 1e-15",
    ),
    Question(
        "its value is the KL with prefixes weighted by the sampler, not KL(π‖ref)",
        "theory",
        "equal to the former",
        _token_value,
        LIMIT,
    ),
    Question(
        "k2 with its ratio detached is the same estimator as k3 with its ratio differentiable",
        "theory; Liu et al. 2025",
        "equal bias and variance",
        _twins,
        "1e-9 of relative moments up to 1e2",
    ),
    Question(
        "k3 with its ratio detached stays the forward KL's, on a single decision as well",
        "theory",
        "biased at every staleness",
        _detached,
        f"{SEEN:g}",
    ),
    Question(
        "one sequence ratio broadcast over the tokens of a sequence is biased, on-policy as well",
        "TRL #6586; theory",
        "1/T·∇KL(π‖ref) + (1 − 1/T)·local forward KL on-policy, and biased at every staleness",
        _broadcast,
        LIMIT,
    ),
    Question(
        "rewards from the sampler's log-probs lack ∇KL(π‖μ), however exact the ratio",
        "theory",
        "reverse_kl − to_sampler_kl",
        _stale,
        LIMIT,
    ),
    Question(
        "without a ratio the bias is of first order in staleness",
        "theory",
        "four times the drift of one update after four",
        _first_order,
        "15 %: second order, and updates of unequal length",
    ),
    Question(
        "a clipped ratio is exact on a single decision until a ratio leaves 1 ± ε",
        "this work, after Schulman et al. 2017",
        "no bias inside, some beyond",
        _clip,
        LIMIT,
    ),
    Question(
        "effective sample sizes by recursion are those of all rollouts",
        "this work",
        "equal",
        lambda rows: at_most(select(rows, "weights"), "off_enumerated", EXACT),
        LIMIT,
    ),
    Question(
        "the effective share of full-sequence weights falls as e^(−2·KL(π‖μ)): exponentially in length",
        "theory: it is e^(−D₂), D₂ the Rényi divergence, 2·KL to leading order and never below KL",
        f"log share −2·KL from {LONG} tokens on, but for the next order; never above −KL",
        _exponential,
        f"{NEXT_ORDER:g} times the noise: the next order is linear in it",
    ),
    Question(
        "the effective share of token weights does not fall with length, that of prefix weights does",
        "theory",
        f"tokens the same at {SETTLED} and at the longest",
        _tokens_flat,
        "10 %: the first tokens are not yet in the long run's contexts",
    ),
    Question(
        "prefix ratios on the cost to go are less noisy than the full-sequence ratio, once rollouts are long",
        "Precup et al. 2000; this work",
        f"variance of the latter larger from {LONG} tokens on",
        _prices,
        "above 1, in these worlds; for short rollouts it can be either",
    ),
    Question(
        "where training rests on-policy it rests for every number of updates to one sampler",
        "this work",
        "the rest point does not move",
        lambda rows: at_most(select(rows, "stability"), "moved", 1e-9),
        "1e-9: updates of rounding's size, 64 times",
    ),
    Question(
        "what a cycle of updates does to a small step off π* has closed forms, with and without ratios",
        "this work",
        "the largest eigenvalue as predicted",
        _closed_form,
        f"{DIFFERENCES:g}: central differences",
    ),
    Question(
        "with rewards from stale log-probs training settles only below 2/(rate·β·λ) updates to one sampler",
        "this work",
        "stable below, unstable above, λ the largest eigenvalue of the Fisher information",
        _stale_threshold,
        "exact: whole numbers of updates",
    ),
    Question(
        "without ratios and without a baseline on the KL, many updates settle only where KL(π*‖ref) < 1/2",
        "this work",
        "stable below ½ nat, unstable above",
        _none_threshold,
        "at the largest number of updates, where that is enough to tell",
    ),
    Question(
        "without ratios, with a baseline, the update is that of a regression whose least value is at π*",
        "Flet-Berliac et al. 2024 (CoPG)",
        "−∇Var_μ(R − β·Σu)/(2β)",
        lambda rows: at_most(select(rows, "stability"), "off_regression", 1e-9),
        "1e-9: a difference of logits over a learning rate",
    ),
    Question(
        "training with exact expectations ends as these factors say",
        "this work",
        "at π*, as far as the factors or one update a sampler bring it, where they are below one; not where above",
        _as_stable,
        f"ten times that gap; of cycles that grow, those that do so {GROWN:g}-fold in all",
    ),
    Question(
        "with prefix or full-sequence ratios the number of updates to one sampler makes no difference in expectation",
        "theory",
        "equal ends",
        _same_end,
        "1e-6 of the gap",
    ),
    Question(
        "sampled, the update without ratios but with a baseline loses nothing to stale rollouts",
        "this work",
        "no larger a gap than with one update a sampler",
        _ratio_free,
        "25 %: the mean over repetitions",
    ),
)


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Bias along the path, and what training came to."""
    biases = []
    lengths = sorted({row["length"] for row in select(rows, "path")})
    steps = [one for one in (0, 4, 16, 64) if any(row["staleness"] == one for row in select(rows, "path"))]
    for name in dict.fromkeys(row["estimator"] for row in select(rows, "path")):
        row: Row = {"estimator": name}
        for length in lengths:
            for step in steps:
                found = _path(rows, (name,), length=length, staleness=step)
                row[f"T = {length}, {step} old"] = _short(_mean(one["bias"] for one in found))
        last = _path(rows, (name,), length=lengths[-1], staleness=steps[-1]) if steps else []
        row["variance"] = _short(_mean(one["variance"] for one in last))
        biases.append(row)
    ends = []
    for (recipe, batch), one in _series(select(rows, "training"), "inner_steps", "recipe", "batch_size").items():
        by = _series(one, "seed", "inner_steps")
        ends.append(
            {
                "recipe": recipe,
                "KL term": RECIPES[recipe][0],
                "reward's ratio": RECIPES[recipe][1],
                "rollouts": batch or "exact",
                **{f"n = {count}": _short(_mean(row["gap"] for row in found)) for (count,), found in by.items()},
            }
        )
    return {"bias": biases, "training": ends}


def numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """What the paper cites; means over worlds."""
    result: dict[str, Any] = {}
    for (name, length, step), found in _series(
        select(rows, "path"), "seed", "estimator", "length", "staleness"
    ).items():
        where = f"{name}, T = {length}, {step} updates old"
        result |= {f"{what} of {where}": _mean(row[what] for row in found) for what in ("bias", "drift", "variance")}
        if name == "k3-ratio":
            result[f"value bias of {where}"] = _mean(row["value_bias"] for row in found)
            result |= {
                f"{what}, T = {length}, {step} updates old": _mean(row[what] for row in found)
                for what in ("token_share", "prefix_share", "sequence_share", "kl_to_sampler")
            }
    exact = [row["bias"] for row in _path(rows, WHOLE)]
    result["largest bias of whole ratios"] = max(exact, default=None)
    result["largest off followed"] = max(
        (row["off_followed"] for row in select(rows, "path") if row["off_followed"] is not None), default=None
    )
    for (name, count), found in _series(select(rows, "length"), "seed", "compared", "tokens").items():
        result[f"price of {name}, {count} tokens"] = _mean(row["price"] for row in found)
        result[f"variance of {name}, {count} tokens"] = _mean(row["variance"] for row in found)
    for (noise, at), found in _series(select(rows, "weights"), "seed", "noise", "at").items():
        where = f"{at} tokens, noise {noise:g}"
        result |= {f"{what}, {where}": _mean(row[what] for row in found) for what in ("token_share", "prefix_share")}
        # Exponential in the KL, which differs between worlds: a plain mean would be the share of the nearest world.
        result[f"sequence_share, {where}"] = math.exp(_mean(row["log_sequence_share"] for row in found))
        result[f"KL a token, {where}"] = _mean(row["kl_to_sampler"] / at for row in found)
    for (recipe, seed), found in _series(select(rows, "stability"), "updates", "recipe", "seed").items():
        result |= {f"factor of {recipe}, world {seed}, {row['updates']} updates": row["multiplier"] for row in found}
        result |= {f"KL of the optimum, world {seed}": found[0]["kl"]}
        result |= {f"most updates, world {seed}": most_updates(found[0])}
    for (recipe, batch, count), found in _series(
        select(rows, "training"), "seed", "recipe", "batch_size", "inner_steps"
    ).items():
        where = f"{recipe}, {batch or 'exact'}, {count} updates"
        result[f"gap of {where}"] = _mean(row["gap"] for row in found)
    size = max((row["batch_size"] for row in select(rows, "training")), default=0)
    result |= {
        "updates of the path": PATH["updates"],
        "repeats": TRAINED["repeats"],
        "batch size": size,
        "clip": CLIP,
        "beta of training": TRAINED["beta"],
        "recipes with a closed form": len(EXACT_RECIPES) + 2,
    }
    return result


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if abs(value) < EXACT else f"{value:.2g}"
