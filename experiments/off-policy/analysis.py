"""Effects of staleness on gradients, weights and training: claims, tables and the numbers that the paper cites."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Row, frame, known, mean, need, require
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .closed_forms import most_updates, multiplier, ratio_free_settles
from .settings import CLIP, EXACT, FOLLOWED, PATH, RECIPES, TRAINED

TRL = "TRL #4637, #6503"
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

claims = Claims("off-policy")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows in a fixed order; if a cycle has a closed form, `predicted` is what it multiplies a small step by."""
    found = [{**row, "predicted": multiplier(row)} if row["part"] == "stability" else dict(row) for row in rows]
    key = lambda row: [(one is not None, isinstance(one, str), one or 0) for one in map(row.get, ORDER)]  # noqa: E731
    return frame(sorted(found, key=key))


def _path(rows: pd.DataFrame, *names: str, **wanted: Any) -> pd.DataFrame:
    return need(rows, "path", estimator=names, **wanted)


def _sequences(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    return _path(rows, name, length=lambda x: x > 1)


claims.bound("full-sequence ratios, and prefix ratios on the cost to go, follow the whole KL at every staleness",
    "theory; an estimate that Shah et al. 2025, §3, leave for future work", "no bias", LIMIT, "bias", EXACT, "path",
    estimator=WHOLE)  # fmt: skip

claims.bound("every estimator with a name for what it follows off-policy follows that", "theory",
    f"combinations of named gradients for all of {len(FOLLOWED)} but the clipped one", LIMIT, "off_followed",
    EXACT, "path")  # fmt: skip

claims.bound("the truth by recursion is the truth by automatic differentiation", OWN, "equal", LIMIT, "truth_again",
    EXACT, "path")  # fmt: skip


@claims.add(f"DeepSeek-V3.2, §3.1, Eq. 7; {TRL}", "exact at every staleness", LIMIT)
def _single_decision(rows: pd.DataFrame) -> Answer:
    """k3 times its differentiable token ratio is unbiased in value and gradient, on a single decision"""
    found = _path(rows, "k3-ratio", length=1)
    gradient, logged = found["bias"].max(), found["value_bias"].abs().max()
    return f"gradient within {gradient:.1e}, value within {logged:.1e}", max(gradient, logged) < EXACT


@claims.add("theory", "biased at every staleness, and its drift from its own on-policy gradient grows",
    f"{SEEN:g}, where rounding leaves 1e-15")  # fmt: skip
def _token_on_sequences(rows: pd.DataFrame) -> Answer:
    """on sequences it is not: what it lacks on-policy stays, and prefixes weighted by the sampler come to that"""
    found = _sequences(rows, "k3-ratio").sort_values("staleness")
    series = [one for _, one in found.groupby(["length", "seed"]) if one["staleness"].iloc[0] == 0 and len(one) > 2]
    require(series)
    grows = all(one["drift"].is_monotonic_increasing and one["drift"].is_unique for one in series)
    least, last = min(one["bias"].min() for one in series), mean(one["drift"].iloc[-1] for one in series)
    said = f"bias never below {least:.3f}; {last:.2f} added at the stalest"
    return f"{said}, {'' if grows else 'not '}growing all the way", grows and least > SEEN


@claims.add("theory", "equal to the former", LIMIT)
def _token_value(rows: pd.DataFrame) -> Answer:
    """its value is the KL with prefixes weighted by the sampler, not KL(π‖ref)"""
    found = need(_sequences(rows, "k3-ratio"), staleness=lambda x: x > 0)
    off, furthest = found["value_off_sampler"].abs().max(), found["value_bias"].abs().max()
    said = f"the former within {off:.1e}; up to {100 * furthest:.0f} % from the latter"
    return said, off < EXACT and furthest > SEEN


@claims.add("theory; Liu et al. 2025", "equal bias and variance", "1e-9 of relative moments up to 1e2")
def _twins(rows: pd.DataFrame) -> Answer:
    """k2 with its ratio detached is the same estimator as k3 with its ratio differentiable"""
    where, what = ["length", "staleness", "seed"], ["bias", "variance", "drift"]
    one, other = (_path(rows, name).set_index(where)[what] for name in ("k3-ratio", "k2-ratio-detached"))
    off = known((one - other).dropna()).abs().max(axis=None)
    return f"bias and variance equal within {off:.1e}", off < 1e-9


claims.between("k3 with its ratio detached stays the forward KL's, on a single decision as well", "theory",
    "biased at every staleness", f"{SEEN:g}", "bias at least {low:.3f}", "bias", "path", estimator="k3-ratio-detached",
    above=SEEN)  # fmt: skip


@claims.add("TRL #6586; theory", "1/T·∇KL(π‖ref) + (1 − 1/T)·local forward KL on-policy, and biased at every staleness",
    LIMIT)  # fmt: skip
def _broadcast(rows: pd.DataFrame) -> Answer:
    """one sequence ratio broadcast over the tokens of a sequence is biased, on-policy as well"""
    found = _sequences(rows, "k3-broadcast-ratio")
    fresh, bias = need(found, staleness=0)["off_followed"].max(), found["bias"]
    said = f"on-policy within {fresh:.1e}; bias {bias.min():.2f} to {bias.max():.1f}"
    return said, fresh < EXACT and bias.min() > SEEN


@claims.add("theory", "reverse_kl − to_sampler_kl", LIMIT)
def _stale(rows: pd.DataFrame) -> Answer:
    """rewards from the sampler's log-probs lack ∇KL(π‖μ), however exact the ratio"""
    found = _path(rows, "k1-reward-stale", staleness=lambda x: x > 0)
    off, bias = found["off_followed"].max(), found["bias"]
    return f"within {off:.1e}; bias {bias.min():.3f} to {bias.max():.2f}", off < EXACT and bias.min() > SEEN


@claims.add("theory", "four times the drift of one update after four",
    "15 %: second order, and updates of unequal length")  # fmt: skip
def _first_order(rows: pd.DataFrame) -> Answer:
    """without a ratio the bias is of first order in staleness"""
    one, four = (
        _path(rows, *UNCORRECTED, staleness=step).set_index(["estimator", "length", "seed"])["drift"] for step in (1, 4)
    )
    ratios = known((four / one).dropna())
    return f"{ratios.min():.2f} to {ratios.max():.2f} times", 3.4 < ratios.min() <= ratios.max() < 4.6


@claims.add("this work, after Schulman et al. 2017", "no bias inside, some beyond", LIMIT)
def _clip(rows: pd.DataFrame) -> Answer:
    """a clipped ratio is exact on a single decision until a ratio leaves 1 ± ε"""
    found = _path(rows, "k1-reward-clipped-ratio", length=1)
    inside, outside = (
        known(found[where])["bias"].max() for where in (found["furthest"] < CLIP, found["furthest"] > CLIP)
    )
    return f"at most {inside:.1e} inside, up to {outside:.2f} beyond", inside < EXACT and outside > SEEN


claims.bound("effective sample sizes by recursion are those of all rollouts", OWN, "equal", LIMIT, "off_enumerated",
    EXACT, "weights")  # fmt: skip


@claims.add("theory: it is e^(−D₂), D₂ the Rényi divergence, 2·KL to leading order and never below KL",
    f"log share −2·KL from {LONG} tokens on, but for the next order; never above −KL",
    f"{NEXT_ORDER:g} times the noise: the next order is linear in it")  # fmt: skip
def _exponential(rows: pd.DataFrame) -> Answer:
    """the effective share of full-sequence weights falls as e^(−2·KL(π‖μ)): exponentially in length"""
    found = need(rows, "weights", at=lambda x: x >= LONG)
    rate = -found["log_sequence_share"] / found["kl_to_sampler"]
    off, least = ((rate - 2).abs() / found["noise"]).max(), rate.min()
    said = f"2 within {off:.2f} times the noise of the sampler's logits; at least {least:.2f} times KL(π‖μ)"
    return said, off < NEXT_ORDER and least > 1


@claims.add("theory", f"tokens the same at {SETTLED} and at the longest",
    "10 %: the first tokens are not yet in the long run's contexts")  # fmt: skip
def _tokens_flat(rows: pd.DataFrame) -> Answer:
    """the effective share of token weights does not fall with length, that of prefix weights does"""
    found = need(rows, "weights").sort_values("at")
    last = found.groupby(["noise", "seed"])[["at", "token_share", "prefix_share"]].last()
    early = need(found, at=SETTLED).set_index(["noise", "seed"])
    last = known(last[last["at"] > SETTLED].loc[lambda one: one.index.isin(early.index)])
    early = early.loc[last.index]
    off = (last["token_share"] / early["token_share"] - 1).abs().max()
    falls = (last["prefix_share"] < early["prefix_share"]).all()
    return f"tokens {100 * off:.1f} % apart, prefixes {'fall' if falls else 'do not fall'}", off < 0.1 and falls


def _times(rows: pd.DataFrame) -> pd.Series:
    whole, prefix = (need(rows, "length", compared=name).set_index(["tokens", "seed"])["variance"] for name in WHOLE)
    return (whole / prefix)[lambda times: times.index.get_level_values("tokens") >= LONG]


claims.between("prefix ratios on the cost to go are less noisy than the full-sequence ratio, once rollouts are long",
    "Precup et al. 2000; this work", f"variance of the latter larger from {LONG} tokens on",
    "above 1, in these environments; for short rollouts it can be either", "{low:.2f} to {high:.1f} times", _times,
    above=1)  # fmt: skip

claims.bound("where training rests on-policy it rests for every number of updates to one sampler", OWN,
    "the rest point does not move", "1e-9: updates of rounding's size, 64 times", "moved", 1e-9,
    "stability")  # fmt: skip

claims.between("what a cycle of updates does to a small step off π* has closed forms, with and without ratios", OWN,
    "the largest eigenvalue as predicted", f"{DIFFERENCES:g}: central differences",
    "within {high:.1e} in {count} cycles",
    lambda found: (found["multiplier"] / found["predicted"].astype(float) - 1).abs(), "stability",
    predicted=lambda x: x.astype(float) < SMALL, below=DIFFERENCES)  # fmt: skip


@claims.add(OWN, "stable below, unstable above, λ the largest eigenvalue of the Fisher information",
    "exact: whole numbers of updates")  # fmt: skip
def _stale_threshold(rows: pd.DataFrame) -> Answer:
    """with rewards from stale log-probs training settles only below 2/(rate·β·λ) updates to one sampler"""
    agrees, said, sides = True, [], set()
    for _, one in need(rows, "stability", recipe="stale").groupby("seed"):
        limit = most_updates(one.iloc[0])
        settles, below = one["multiplier"] < 1, one["updates"] < limit
        agrees &= (settles == below).all()
        sides |= set(below)
        stable, unstable = one[settles]["updates"], one[~settles]["updates"]
        said.append(f"settles to {max(stable, default=0)}, not from {min(unstable, default='–')} on ({limit:.2f})")
    require(len(sides) >= 2)
    return "; ".join(said), agrees


@claims.add(OWN, "stable below ½ nat, unstable above", "at the largest number of updates, where that is enough to tell")
def _none_threshold(rows: pd.DataFrame) -> Answer:
    """without ratios and without a baseline on the KL, many updates settle only where KL(π*‖ref) < 1/2"""
    said, agrees = [], True
    for _, one in need(rows, "stability", recipe="none").sort_values("updates").groupby("seed"):
        last = one.iloc[-1]
        expected, settles = ratio_free_settles(last), last["multiplier"] < 1
        if expected is not None:
            said.append(f"K = {last['kl']:.2f}: {'settles' if settles else 'does not'}")
            agrees &= settles == expected
    require(said)
    return "; ".join(said), agrees


claims.bound("without ratios, with a baseline, the update is that of a regression whose least value is at π*",
    "Flet-Berliac et al. 2024 (CoPG)", "−∇Var_μ(R − β·Σu)/(2β)", "1e-9: a difference of logits over a learning rate",
    "off_regression", 1e-9, "stability")  # fmt: skip


@claims.add(OWN,
    "at π*, as far as the factors or one update a sampler bring it, where they are below one; not where above",
    f"ten times that gap; of cycles that grow, those that do so {GROWN:g}-fold in all")  # fmt: skip
def _as_stable(rows: pd.DataFrame) -> Answer:
    """training with exact expectations ends as these factors say"""
    # Cycles that multiply a small step until it is large leave a tenfold gap; those that shrink it leave none: no more
    # than one update a sampler, or than the factor squared has left of the early gap, quadratic in a small step.
    which = ["recipe", "learning_rate", "seed"]
    there = tuple(name for name, recipe in RECIPES.items() if recipe[2] == "optimum")
    exact, cycles = need(rows, "training", batch_size=0, recipe=there), need(rows, "stability")
    exact = exact[[*which, "inner_steps", "steps", "gap", "early_gap"]]
    first = need(exact, inner_steps=1).set_index(which)["gap"].clip(lower=ROUNDING).rename("first").reset_index()
    cycles = cycles[[*which, "updates", "multiplier"]].rename(columns={"updates": "inner_steps"})
    both = exact[exact["inner_steps"] > 1].merge(first, on=which).merge(cycles, on=[*which, "inner_steps"])
    shrinks, turns = both["multiplier"] < 1, (both["steps"] - int(TRAINED["early"])) / both["inner_steps"]
    left = both["early_gap"] * both["multiplier"] ** (2 * turns)
    settled = (both["gap"] / both["first"].where(both["first"] > left, left))[shrinks]
    grown = (both["gap"] / both["first"])[~shrinks & (turns * both["multiplier"].map(math.log) > math.log(GROWN))]
    require(not settled.empty and not grown.empty)
    said = f"at most {settled.max():.2f} times as much where it shrinks, from {grown.min():.3g} times else"
    return said, settled.max() < 10 < grown.min()


@claims.add("theory", "equal ends", "1e-6 of the gap")
def _same_end(rows: pd.DataFrame) -> Answer:
    """with prefix or full-sequence ratios the number of updates to one sampler makes no difference in expectation"""
    found = need(rows, "training", batch_size=0, recipe=("sequence", "prefix-to-go"))
    gaps = found.groupby(["recipe", "seed"])["gap"].agg(["min", "max", "size"])
    gaps = known(gaps[gaps["size"] > 1])
    apart = (gaps["max"] - gaps["min"] - ROUNDING).clip(lower=0.0) / gaps["min"].clip(lower=ROUNDING)
    return f"gaps equal within {apart.max():.1e}", apart.max() < 1e-6


@claims.add(OWN, "no larger a gap than with one update a sampler", "25 %: the mean over repetitions")
def _ratio_free(rows: pd.DataFrame) -> Answer:
    """sampled, the update without ratios but with a baseline loses nothing to stale rollouts"""
    found = need(rows, "training", recipe="none-centred")
    found = found[(found["batch_size"] >= FEW) & (found["steps"] * found["learning_rate"] > THERE)]
    gaps = found.sort_values("inner_steps").groupby(["batch_size", "seed"])["gap"]
    times = [gap.iloc[1:].max() / max(gap.iloc[0], ROUNDING) for _, gap in gaps if len(gap) > 1]
    require(times)
    return f"at most {max(times):.2f} times the gap of one update", max(times) < 1.25


STATED = {"updates of the path": PATH["updates"], "repeats": TRAINED["repeats"]}
numbers.add(lambda rows: [number(name, value) for name, value in STATED.items()])


@numbers.add
def _of_the_path(rows: pd.DataFrame) -> Cited:
    found, where = need(rows, "path"), ["estimator", "length", "staleness"]
    yield from melted(found.groupby(where)[["bias"]].mean(), ["bias"])
    token = need(found, estimator="k3-ratio").astype({"value_bias": float})
    what = ["value_bias", "token_share", "prefix_share", "sequence_share"]
    yield from melted(token.groupby(where)[what].mean(), what)
    yield number("largest bias of whole ratios", _path(rows, *WHOLE)["bias"].max())


numbers.melt("length", ["price"], ["compared", "tokens"], means=True)


@numbers.add
def _of_weights(rows: pd.DataFrame) -> Cited:
    found = need(rows, "weights")
    shares = ["token_share", "prefix_share", "log_sequence_share", "each"]
    means = found.assign(each=found["kl_to_sampler"] / found["at"]).groupby(["at", "noise"])[shares].mean()
    # Exponential in the KL, which differs between environments: a plain mean would be the share of the nearest one.
    means["sequence_share"] = means["log_sequence_share"].map(math.exp)
    names = {name: name for name in ("token_share", "prefix_share", "sequence_share")} | {"each": "KL a token"}
    yield from melted(means, names)


@numbers.add
def _of_stability(rows: pd.DataFrame) -> Cited:
    for seed, one in need(rows, "stability").groupby("seed"):
        yield number("most updates", most_updates(one.iloc[-1]), seed=seed)


numbers.melt("training", ["gap"], ["recipe", "batch_size", "inner_steps"], means=True)
numbers.single("training", {"batch size": ("batch_size", "max")})
