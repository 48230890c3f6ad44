"""Effects of staleness on gradients, weights and training: claims, tables and the numbers that the paper cites."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, frame, known, mean, need, require
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .experiment import CLIP, EXACT, PATH, most_updates, multiplier, ratio_free_settles

TRL = "TRL #4637, #6503"
ORDER = (
    *("part", "length", "estimator", "staleness", "tokens", "compared", "noise", "at"),
    *("recipe", "updates", "inner_steps", "batch_size", "seed"),
)
WHOLE = ("k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio")
UNCORRECTED = ("k1-reward", "k2-loss", "k2-loss-sequence", "k3-loss")
# A bias, a drift or a gap is called one where it is larger than this, many times what rounding leaves.
SEEN = 1e-4
# Gaps below this are what is left of zero, and may be zero itself.
ROUNDING = 1e-14
# Rollouts of a batch for which the errors with and without ratios are compared.
BATCH = 512
# Shorter rollouts are at times the noisier with prefix ratios.
LONG = at_least(10)
# Tokens after which the first ones count for little in a mean over all.
SETTLED = 100
LIMIT = "float64, sums over all rollouts"
SOME = "many times what rounding leaves"

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


@claims.measure("Precup et al. 2000; an estimate that Shah et al. 2025, §3, leave open", LIMIT, bias=near(0, EXACT))
def _whole(rows: pd.DataFrame) -> Measured:
    """full-sequence ratios, and prefix ratios on the cost to go, follow the whole KL at every staleness"""
    return {"bias": _path(rows, *WHOLE)["bias"]}


@claims.measure(f"DeepSeek-V3.2, §3.1, Eq. 7; {TRL}", LIMIT, gradient_bias=near(0, EXACT), value_bias=near(0, EXACT))
def _single_decision(rows: pd.DataFrame) -> Measured:
    """k3 times its differentiable token ratio is unbiased in value and gradient, on a single decision, at every
    staleness"""
    found = _path(rows, "k3-ratio", length=1)
    return {"gradient_bias": found["bias"], "value_bias": found["value_bias"]}


@claims.measure(OWN, SOME, bias=above(SEEN), growth_of_the_drift=above(0))
def _token_on_sequences(rows: pd.DataFrame) -> Measured:
    """on sequences it is not: what it lacks on-policy stays, and prefixes weighted by the sampler come to that, a
    drift from its own on-policy gradient that grows with staleness"""
    found = _sequences(rows, "k3-ratio").sort_values("staleness")
    series = [one for _, one in found.groupby(["length", "seed"]) if one["staleness"].iloc[0] == 0 and len(one) > 2]
    require(series)
    return {
        "bias": pd.concat([one["bias"] for one in series]),
        "growth_of_the_drift": pd.concat([one["drift"].diff().dropna() for one in series]),
        "mean_drift_at_the_stalest": mean(one["drift"].iloc[-1] for one in series),
    }


@claims.measure(OWN, SOME, bias=above(SEEN))
def _detached(rows: pd.DataFrame) -> Measured:
    """k3 with its ratio detached stays the forward KL's, on a single decision as well: biased at every staleness"""
    return {"bias": _path(rows, "k3-ratio-detached")["bias"]}


@claims.measure(f"TRL #6586; {OWN}", SOME, bias=above(SEEN))
def _broadcast(rows: pd.DataFrame) -> Measured:
    """one sequence ratio broadcast over the tokens of a sequence is biased at every staleness, on-policy as well"""
    return {"bias": _sequences(rows, "k3-broadcast-ratio")["bias"]}


@claims.measure(OWN, SOME, bias=above(SEEN))
def _stale(rows: pd.DataFrame) -> Measured:
    """rewards from the sampler's log-probs are biased, however exact the ratio"""
    return {"bias": _path(rows, "k1-reward-stale", staleness=above(0))["bias"]}


@claims.measure(OWN, "15 %: second order, and updates of unequal length", times_the_drift=within(3.4, 4.6), updates=4)
def _first_order(rows: pd.DataFrame, updates: int) -> Measured:
    """without a ratio the bias is of first order in staleness: after {updates} updates the drift is {times_the_drift}
    times that of one"""
    one, four = (
        _path(rows, *UNCORRECTED, staleness=step).set_index(["estimator", "length", "seed"])["drift"]
        for step in (1, updates)
    )
    return {"times_the_drift": (four / one).dropna()}


@claims.measure(
    "this work, after Schulman et al. 2017",
    f"{LIMIT}; {SOME}",
    bias_inside=near(0, EXACT),
    largest_bias_beyond=above(SEEN),
)
def _clip(rows: pd.DataFrame) -> Measured:
    """a clipped ratio is exact on a single decision until a ratio leaves `1 ± ε`"""
    found = _path(rows, "k1-reward-clipped-ratio", length=1)
    beyond = known(found[found["furthest"] > CLIP])
    return {"bias_inside": found[found["furthest"] < CLIP]["bias"], "largest_bias_beyond": beyond["bias"].max()}


@claims.measure(
    "Metelli et al. 2018: it is e^(−D₂), D₂ the Rényi divergence, 2·KL to leading order and never below KL",
    "the next order is linear in the noise of the sampler's logits",
    off_over_noise=below(2),
    rate=above(1),
    at=LONG,
)
def _exponential(rows: pd.DataFrame, at: Bound) -> Measured:
    """from {at} tokens on the effective share of full-sequence weights falls as `e^(−2·KL(π‖μ))`, exponentially in
    length: the rate is off by less than {off_over_noise} times the noise of the sampler's logits, and above {rate}"""
    found = need(rows, "weights", at=at)
    rate = -found["log_sequence_share"] / found["kl_to_sampler"]
    return {"off_over_noise": (rate - 2).abs() / found["noise"], "rate": rate}


@claims.measure(
    OWN,
    "the first tokens are not yet in the long run's contexts",
    token_share_over_early=near(1, 0.1),
    prefix_share_over_early=below(1),
    tokens=SETTLED,
)
def _tokens_flat(rows: pd.DataFrame, tokens: int) -> Measured:
    """the effective share of token weights at the longest is within {token_share_over_early:±.0%} of that at {tokens}
    tokens, that of prefix weights is smaller"""
    found = need(rows, "weights").sort_values("at")
    last = found.groupby(["noise", "seed"])[["at", "token_share", "prefix_share"]].last()
    early = need(found, at=tokens).set_index(["noise", "seed"])
    last = known(last[last["at"] > tokens].loc[lambda one: one.index.isin(early.index)])
    early = early.loc[last.index]
    names = ("token_share", "prefix_share")
    return {f"{name}_over_early": last[name] / early[name] for name in names}


@claims.measure(
    "Precup et al. 2000; this work",
    "an order, in these environments; for short rollouts it can be either",
    times_the_variance=above(1),
    tokens=LONG,
)
def _prefix_less_noisy(rows: pd.DataFrame, tokens: Bound) -> Measured:
    """from {tokens} tokens on the full-sequence ratio is noisier than prefix ratios on the cost to go"""
    whole, prefix = (
        need(rows, "length", compared=name, tokens=tokens).set_index(["tokens", "seed"])["variance"] for name in WHOLE
    )
    return {"times_the_variance": whole / prefix}


@claims.measure(
    OWN,
    "central differences; larger factors leave the range where a cycle is linear",
    off=near(0, 1e-6),
    predicted=below(500),
)
def _cycles(rows: pd.DataFrame, predicted: Bound) -> Measured:
    """what a cycle of updates does to a small step off π* has closed forms, with and without ratios: the largest
    eigenvalue is as predicted where that is below {predicted}"""
    found = need(rows, "stability", predicted=lambda x: predicted(x.astype(float)))
    return {"off": found["multiplier"] / found["predicted"].astype(float) - 1, "draws": found["seed"].nunique()}


@claims.measure(OWN, "exact: whole numbers of updates", settles_just_below_the_threshold=EVERY)
def _stale_threshold(rows: pd.DataFrame) -> Measured:
    """with rewards from stale log-probs training settles below `2/(rate·β·λ)` updates to one sampler and only there, λ
    the largest eigenvalue of the Fisher information"""
    found = need(rows, "stability", recipe="stale")
    limits = {seed: most_updates(one.iloc[0]) for seed, one in found.groupby("seed")}
    below_it = found["updates"] < found["seed"].map(limits)
    require(below_it.nunique() >= 2)
    return {
        "settles_just_below_the_threshold": (found["multiplier"] < 1) == below_it,
        "thresholds": [f"{limit:.2f}" for limit in limits.values()],
    }


@claims.measure(
    OWN, "at the largest number of updates, where that is enough to tell", settles_just_below_half_a_nat=EVERY
)
def _none_threshold(rows: pd.DataFrame) -> Measured:
    """without ratios and without a baseline on the KL, many updates settle where `KL(π*‖ref) < 1/2` and only there"""
    agrees, kls = [], []
    for _, one in need(rows, "stability", recipe="none").sort_values("updates").groupby("seed"):
        expected, last = ratio_free_settles(one.iloc[-1]), one.iloc[-1]
        if expected is not None:
            agrees.append(bool((last["multiplier"] < 1) == expected))
            kls.append(last["kl"])
    return {"settles_just_below_half_a_nat": agrees, "kl": kls}


@claims.measure(
    OWN,
    "the margin for a mean over repetitions; fewer rollouts make the baseline noise itself, fewer "
    "updates have not arrived",
    times_the_gap=below(1.25),
    batch_size=at_least(16),
    way=above(60),
)
def _ratio_free(rows: pd.DataFrame, batch_size: Bound, way: Bound) -> Measured:
    """sampled, with batches from {batch_size} on, the update without ratios but with a baseline ends with less than
    {times_the_gap} times the gap of one update a sampler, however stale the rollouts (updates times rate above
    {way})"""
    found = need(rows, "training", recipe="none-centred", batch_size=batch_size)
    found = found[way(found["steps"] * found["learning_rate"])]
    gaps = found.sort_values("inner_steps").groupby(["batch_size", "seed"])["gap"]
    times = [gap.iloc[1:].max() / max(gap.iloc[0], ROUNDING) for _, gap in gaps if len(gap) > 1]
    return {"times_the_gap": times}


# ------------------------------------------------------------------------------------------------------ a sampler's age


def _aged(rows: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows of paths, with whether prefix ratios are noisier than none, and the error without over that with them."""
    found = need(rows, "age", **wanted)
    error = (found["variance_none"] + BATCH * found["bias_none"] ** 2 / found["noise"]) / found["variance_prefix"]
    noisier = found["variance_prefix"] > found["variance_none"]
    return found.assign(noisier=noisier, error=error, left=found["bias_token"] / found["bias_none"])


@claims.measure(
    OWN, "a first-order law: signs of differences near zero can differ", share_as_said=above(0.9), age=at_most(4)
)
def _said(rows: pd.DataFrame, age: Bound) -> Measured:
    """for samplers up to {age} updates old the sign of `tr Cov(G, X)` says if prefix ratios add noise or remove it, in
    more than {share_as_said} of the environments"""
    found = _aged(rows, age=age)
    right = found["noisier"] == (found["variance_slope_prefix"] > 0)
    return {
        "share_as_said": right.groupby([found["start"], found["tokens"], found["made"]]).mean(),
        "paths": len(found),
    }


@claims.measure(
    OWN,
    "shares of random environments",
    better_at_every_batch_size=above(0.5),
    more_than_early=above(0),
    age=at_most(16),
    made=64,
)
def _at_every_size(rows: pd.DataFrame, age: Bound, made: int) -> Measured:
    """late on a path, after {made} updates, prefix ratios remove noise as well as bias in most environments: for
    samplers up to {age} updates old they have the smaller mean squared error at every batch size in a share of more
    than {better_at_every_batch_size}, a larger one than early on it"""
    better = 1 - _aged(rows, age=age).groupby(["start", "tokens", "age", "made"])["noisier"].mean().unstack("made")
    require(made in better and len(better.columns) > 1)
    early = better[better.columns.min()]
    return {"better_at_every_batch_size": better[made].dropna(), "more_than_early": (better[made] - early).dropna()}


@claims.measure(
    OWN, "shares and medians over environments", share_better=above(0.9), times_the_error=above(1.1), age=4, batch=BATCH
)
def _left_out(rows: pd.DataFrame, age: int, batch: int) -> Measured:
    """with batches of {batch} rollouts and samplers {age} updates old, prefix ratios have the smaller error in more
    than {share_better} of the environments; without a ratio it is in the median more than {times_the_error} times as
    large"""
    found = _aged(rows, age=age)
    by = found["error"].groupby([found["start"], found["tokens"], found["made"]])
    return {"share_better": by.agg(lambda error: (error > 1).mean()), "times_the_error": by.median()}


@claims.measure(
    OWN,
    "medians and shares over environments",
    share_of_the_bias_left=above(0.2),
    worse_than_none=within(0, 0.5),
    tokens=at_least(2),
    age=at_most(4),
)
def _token_ratio(rows: pd.DataFrame, tokens: Bound, age: Bound) -> Measured:
    """a token's ratio leaves a bias of the same order as no ratio does: more than {share_of_the_bias_left} of it in the
    median with {tokens} tokens or more, and in some environments more than all of it"""
    found = _aged(rows, tokens=tokens, age=age)
    left = found["left"].groupby([found["start"], found["tokens"], found["made"]]).median()
    return {"share_of_the_bias_left": left, "worse_than_none": (found["left"] > 1).mean()}


# ------------------------------------------------------------------------------------------------------ caps and masks


def _caps(rows: pd.DataFrame, *names: str, **wanted: Any) -> pd.DataFrame:
    return need(rows, "caps", cap=names, **wanted)


@claims.measure("importance sampling", LIMIT, bias=near(0, EXACT))
def _all_weights(rows: pd.DataFrame) -> Measured:
    """the product of the engine's weights, without a cap, follows the policy gradient however far the engine is off"""
    return {"bias": _caps(rows, "all")["bias"]}


@claims.measure(OWN, "means over environments", times_the_bias=above(1), off=at_least(0.4))
def _masks_cost_more(rows: pd.DataFrame, off: Bound) -> Measured:
    """where they act (logits off by {off}), a mask of rollouts leaves more bias than a cap at the same weight, at
    every length"""
    found = _caps(rows, "tis-sequence", "mis-sequence", off=off)
    bias = found.groupby(["cap", "tokens", "off"])["bias"].mean()
    return {"times_the_bias": bias["mis-sequence"] / bias["tis-sequence"]}


@claims.measure(
    "a first-order law: the mean takes back a share 1/L of the log-ratio",
    "the next order is linear in the distance; the median over environments",
    left_off=near(0, 0.15),
    off=at_most(0.1),
)
def _means_keep_the_bias(rows: pd.DataFrame, off: Bound) -> Measured:
    """of the bias that no weight at all has, the geometric mean of a rollout's weights leaves `1 − 1/L`: next to all
    of it in long rollouts (logits off by {off})"""
    where = ["tokens", "off", "seed"]
    mean_weight, no_weight = (
        _caps(rows, name, off=off, tokens=lambda x: x > 1).set_index(where)["bias"]
        for name in ("tis-geometric", "none")
    )
    left = (mean_weight / no_weight).groupby("tokens").median()
    return {"left_off": left - (1 - 1 / left.index.to_numpy())}


@claims.measure(OWN, "means over environments", growth=above(0))
def _grows_with_the_drift(rows: pd.DataFrame) -> Measured:
    """the bias of every cap and mask grows with the distance of the engine, at every length of two tokens or more"""
    found = need(rows, "caps", tokens=lambda x: x > 1)
    found = found[~found["cap"].isin(["all"])]
    bias = found.groupby(["cap", "tokens", "off"])["bias"].mean().unstack("off")
    require(len(bias.columns) > 1)
    return {"growth": bias[bias.columns.max()] - bias[bias.columns.min()]}


@numbers.add
def _of_the_path(rows: pd.DataFrame) -> Cited:
    yield number("updates of the path", PATH["updates"])
    found, where = need(rows, "path"), ["estimator", "length", "staleness"]
    yield from melted(found.groupby(where)[["bias"]].mean(), ["bias"])
    yield number("largest bias of whole ratios", _path(rows, *WHOLE)["bias"].max())


@numbers.add
def _of_weights(rows: pd.DataFrame) -> Cited:
    found = need(rows, "weights")
    shares = ["prefix_share", "log_sequence_share", "each"]
    means = found.assign(each=found["kl_to_sampler"] / found["at"]).groupby(["at", "noise"])[shares].mean()
    # Exponential in the KL, which differs between environments: a plain mean would be the share of the nearest one.
    means["sequence_share"] = means["log_sequence_share"].map(math.exp)
    yield from melted(means, {"prefix_share": "prefix_share", "sequence_share": "sequence_share", "each": "KL a token"})


numbers.melt("training", ["gap"], ["recipe", "batch_size", "inner_steps"], means=True)


@numbers.add
def _of_age(rows: pd.DataFrame) -> Cited:
    found = _aged(rows)
    found = found.assign(worse=found["left"] > 1, cost=found["variance_prefix"] / found["variance_none"])
    by = found.groupby(["tokens", "made", "age"])
    yield from melted(by[["error", "left"]].median(), {"error": "median error", "left": "median left"})
    yield from melted(by[["noisier", "worse"]].mean(), {"noisier": "share noisier", "worse": "share worse"})
    yield number("batch compared", BATCH)
    yield from melted(by[["cost"]].max(), {"cost": "largest cost"})
    young = found[(found["age"] == 1) & (found["predicted_even"] > 0)]
    yield from melted(young.groupby(["tokens", "made"])[["predicted_even"]].median(), {"predicted_even": "median even"})
