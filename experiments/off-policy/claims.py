"""Effects of staleness on gradients, weights and training: claims, tables and the numbers that the paper cites."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, exactly, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, frame, known, mean, need, require
from kltest.reproduce.numbers import Cited, Numbers, extremes, melted, number

from .experiment import CLIP, EXACT, most_updates, multiplier, ratio_free_settles
from .step import STALE, error

TRL = "TRL #4637, #6503"
ORDER = (
    *("part", "length", "estimator", "staleness", "tokens", "noise", "at"),
    *("recipe", "updates", "inner_steps", "batch_size", "seed"),
)
WHOLE = ("k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio")
UNCORRECTED = ("k1-reward", "k2-loss", "k2-loss-sequence", "k3-loss")
# A bias, a drift or a gap is called one where it is larger than this, many times what rounding leaves.
SEEN = 1e-4
# Gaps below this are what is left of zero, and may be zero itself.
ROUNDING = 1e-14
# Rollouts of a batch for which the errors of the ways are compared.
BATCH = 512
# From so many tokens on the effective share is exponential.
LONG = at_least(10)
# At the reference exact KLs and sampled log-ratios are the same: what rounding makes of it is no difference.
ROUNDING_OF_NOISE = 1e-9
# Policies that have been trained.
UPDATED = at_least(1)
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


# -------------------------------------------------------------------------------------------- the step that is taken


def _own(rows: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Policies on their own rollouts, with whether exact KLs make their gradient the noisier one."""
    found = need(rows, "step", drift="none", **wanted)
    return found.assign(noisier=found["exact"] > 1 + ROUNDING_OF_NOISE, slope=found["slope"].astype(float))


def _stale(rows: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Samplers of policies, with orders of the ways' errors; noise beyond the range of a float is infinite."""
    found = need(rows, "step", **{"drift": ("age", "engine"), **wanted})
    names = ["even", *(f"{name}_{way}" for name in ("bias", "noise", "pairs") for way in STALE)]
    found = found.assign(**{name: found[name].astype(float).fillna(math.inf) for name in names})
    errors = pd.DataFrame({way: error(found, way, BATCH) for way in STALE})
    return found.assign(
        **{f"error_{way}": errors[way] for way in STALE},
        prefix=found["noise_prefix"] / found["noise_sequence"],
        left=found["bias_token"] / found["bias_none"],
        cost=found["noise_token"] / found["noise_none"],
        better=errors["token"] < errors["none"],
    )


@claims.measure(
    OWN, "shares of random environments", share_noisier=above(0.75), times_the_noise=above(1.5), made=UPDATED
)
def _exact_from_the_reference(rows: pd.DataFrame, made: Bound) -> Measured:
    """trained from the reference (from {made} update on) exact next-token KLs make the gradient of `E[R] − β·KL`
    noisier than sampled log-ratios do: in a share of more than {share_noisier} of the policies of every
    family and length, in the median more than {times_the_noise} times"""
    found = _own(rows, start="reference", made=made).groupby(["family", "tokens"])
    return {"share_noisier": found["noisier"].mean(), "times_the_noise": found["exact"].median()}


@claims.measure(OWN, "shares of random environments", before=below(0.5), after=above(0.75), made=4)
def _exact_away(rows: pd.DataFrame, made: int) -> Measured:
    """away from the reference exact KLs add noise to a share of less than {before} of the policies of a family as long
    as they are not trained, and to more than {after} of them after {made} updates"""
    shares = [_own(rows, start="away", made=one).groupby("family")["noisier"].mean() for one in (0, made)]
    return {"before": shares[0], "after": shares[1]}


@claims.measure(
    f"{OWN}: exact for the scalar", "shares of random environments, of every family and length", right=above(0.8)
)
def _slope(rows: pd.DataFrame) -> Measured:
    """from either start, the slope of the return on the log-ratios says if exact KLs add noise to the gradient: they do
    where it is above `β/2`, and remove noise elsewhere, in a share of more than {right} of the policies"""
    found = _own(rows, slope=lambda one: one.notna())
    right = found["noisier"] == (found["slope"] > 0.5)
    return {"right": right.groupby([found["family"], found["tokens"]]).mean(), "policies": len(found)}


@claims.measure(
    OWN, "medians over environments and samplers", trained=above(5), untrained=below(1.5), made=4, nats=at_most(0.1)
)
def _prefix(rows: pd.DataFrame, made: int, nats: Bound) -> Measured:
    """after {made} updates, from either start, a penalty with prefix ratios has in the median more than {trained} times
    the noise of one ratio on the return less its baseline, with samplers up to {nats} nats away; away from the
    reference and not trained less than {untrained} times"""
    found = _stale(rows, nats=nats, tokens=above(1))
    return {
        "trained": need(found, made=made).groupby(["start", "family"])["prefix"].median(),
        "untrained": need(found, start="away", made=0).groupby("family")["prefix"].median(),
    }


@claims.measure(
    OWN,
    "the margin of the noise is 10 %; shares and medians over environments and samplers",
    better=above(0.6),
    times_the_noise=below(1.1),
    of_the_bias_left=within(0.1, 0.8),
    nats=at_most(0.1),
    batch=BATCH,
)
def _token_ratio(rows: pd.DataFrame, nats: Bound, batch: int) -> Measured:
    """up to {nats} nats away a token's ratio costs no noise, in the median less than {times_the_noise} times that
    without a ratio, leaves {of_the_bias_left} of the bias, and has the smaller error with batches of {batch} in a share
    of more than {better} of the samplers"""
    found = _stale(rows, nats=nats, tokens=above(1)).groupby(["family", "nats"])
    return {
        "better": found["better"].mean(),
        "times_the_noise": found["cost"].median(),
        "of_the_bias_left": found["left"].median(),
    }


@claims.measure(
    OWN,
    "medians over environments",
    rollouts=above(500),
    rollouts_far=above(100_000),
    tokens=at_least(100),
    made=UPDATED,
    nats=0.1,
    far=3.0,
)
def _boundary(rows: pd.DataFrame, tokens: Bound, made: Bound, nats: float, far: float) -> Measured:
    """of a trained policy (from {made} update on) and an engine that is off by normal noise, one ratio on the return of
    {tokens} tokens or more has a smaller error than none and the token's only with more than {rollouts} rollouts at
    {nats} nats, and with more than {rollouts_far} at {far}"""
    found = _stale(rows, drift="engine", tokens=tokens, made=made)
    of = [need(found, nats=one).groupby(["family", "tokens"])["even"].median() for one in (nats, far)]
    return {"rollouts": of[0], "rollouts_far": of[1]}


@claims.measure(
    OWN,
    "medians over environments",
    rollouts=exactly(2),
    times_the_noise=below(1),
    family="mistakes",
    made=UPDATED,
    nats=at_most(0.1),
)
def _older(rows: pd.DataFrame, family: str, made: Bound, nats: Bound) -> Measured:
    """with an older policy as the sampler, up to {nats} nats away, and a reward that one mistake takes away, it has the
    smaller error from {rollouts} rollouts on, as it removes noise as well: in the median it has less than
    {times_the_noise} times that without a ratio, at every length"""
    found = _stale(rows, drift="age", family=family, made=made, nats=nats)
    ratio = found["noise_sequence"] / found["noise_none"]
    return {
        "rollouts": found.groupby("tokens")["even"].median(),
        "times_the_noise": ratio.groupby(found["tokens"]).median(),
    }


@claims.measure(OWN, "medians over environments and samplers", times_the_rollouts=above(10), nats=0.1, far=3.0)
def _rises(rows: pd.DataFrame, nats: float, far: float) -> Measured:
    """that boundary depends on the distance of a whole rollout: at {far} nats it takes more than {times_the_rollouts}
    times the rollouts that it takes at {nats}, in every family at every length"""
    near_by, further = (
        _stale(rows, nats=one, tokens=above(1)).groupby(["family", "tokens"])["even"].median() for one in (nats, far)
    )
    return {"times_the_rollouts": further / near_by}


@claims.measure(
    OWN,
    "medians over environments and samplers",
    of_many_small_rewards=below(0.15),
    of_one_mistake=above(0.3),
    tokens=at_least(100),
    nats=0.1,
)
def _length(rows: pd.DataFrame, tokens: Bound, nats: float) -> Measured:
    """at {nats} nats and {tokens} tokens or more the bias without a ratio is below {of_many_small_rewards} of the
    gradient where the reward is a sum of many small ones, above {of_one_mistake} where one mistake fails a rollout"""
    found = _stale(rows, nats=nats, tokens=tokens).groupby(["family", "tokens"])["bias_none"].median()
    return {"of_many_small_rewards": found["bigram"], "of_one_mistake": found["mistakes"]}


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
def _of_the_step(rows: pd.DataFrame) -> Cited:
    own, stale = _own(rows), _stale(rows, tokens=above(1))
    yield from melted(own.groupby(["start", "made"])[["exact"]].median(), {"exact": "exact over sampled"})
    slope = own[own["slope"].notna()]
    right = slope["noisier"] == (slope["slope"] > 0.5)
    yield number("share right by slope", right.mean())
    yield number("smallest share right by slope", right.groupby([slope["start"], slope["made"]]).mean().min())
    yield number("longest step", stale["tokens"].max())
    yield from melted(stale.groupby(["start", "made", "nats"])[["prefix"]].median(), {"prefix": "prefix over sequence"})
    close = need(stale, nats=at_most(0.1)).groupby(["family", "nats"])["left"].median()
    yield from extremes("bias left by token", close)
    trained = need(stale, made=UPDATED)
    even = trained.groupby(["drift", "family", "tokens", "nats"])[["even"]].median()
    yield from melted(even.replace(math.inf, math.nan).dropna(), {"even": "rollouts needed"})
