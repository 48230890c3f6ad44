"""Estimators that regularise as asked, at another coefficient, or not at all: claims, tables and numbers."""

import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, exactly, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Missing, Row, Rows, frame, known, need, require, select
from kltest.reproduce.numbers import Cited, Numbers, number

from ..records import rounded
from .experiment import CENTRED, EXACT, LOCAL, OPTIMUM, PARTS

ENVIRONMENTS = ("bandit", "sequence", "mdp")
WRONG_IN_LOSS = (*LOCAL, "k3-loss", "k3-loss-sequence")

# Six figures of each number are kept: more than any claim needs, and rows stay small.
FIGURES = 6
DROPPED = ("steps", "learning_rate", "entropy", "reward", "predicted_reward")
# Training has settled where its β' is that of the predicted fixed point, to 1 %; from this β on it has to have.
SETTLED, CERTAIN = 0.01, 3.0
# An end is on the frontier where less than 0.5 % of what could be earned at its KL is missing; a coefficient is one
# number where no β and no environment differs from it by more than 2 %: both are as far as training has settled.
ON_FRONTIER, SAME = 5e-3, 0.02
# A penalty that at the largest β of all leaves the policy where the optimum of a β ten times smaller would be.
LOOSE = 0.1
# Shares of ∇KL(π‖ref) that are missed, by which losses are listed.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, math.inf)
NOISY = ("k1-reward", "k1-both", "rao-blackwell")
# A biased estimator, and an unbiased one that is noisier.
PAIRS = (("k2-loss", "rao-blackwell"), ("k2-loss", "k1-both"), ("k3-loss", "k1-both"))
SETTLING = "as far as training has settled"
FORMS = f"Korbak et al. 2022 for π*, Vojnovic & Yun 2025 for the form of k3's; {OWN}"
AS_ASKED = f"Tang & Munos 2025; Liu et al. 2025; {OWN}"
ANTONIADIS = "Antoniadis 2026, ch. 3, for one such environment"

claims = Claims("coefficients")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows in the order of parts and settings; what does not apply is left out."""
    parts = list(PARTS)

    def place(row: Row) -> tuple[Any, ...]:
        words, sizes = ("environment", "estimator"), ("beta", "batch_size", "seed")
        return parts.index(row["part"]), *(row.get(name, "") for name in words), *(row.get(name, 0) for name in sizes)

    def kept(row: Row) -> Row:
        out = DROPPED if row["part"] in ("exact", "sampled") else ()
        return {name: rounded(value, FIGURES) for name, value in row.items() if value is not None and name not in out}

    return frame([kept(row) for row in sorted(rows, key=place)])


# Hold of one estimator on the policy in one environment: the coefficients β' of optima as far from the reference.
# `factor` is the geometric mean of β'/β over the ends that have settled, `spread` the factor that one standard
# deviation is, `low` and `high` the extremes, `last` that at the largest β, `shortfall` the largest share of the reward
# that is missing. `kind` says what it comes to.
Held = namedtuple("Held", "kind factor spread low high last shortfall", defaults=[math.nan] * 6)
KINDS = {
    "asked": "as asked",
    "scaled": "at another coefficient",
    "drifts": "at a coefficient that changes with β",
    "loose": "not: no coefficient holds it",
    "none": "not at all: as without a penalty",
    "astray": "somewhere else than predicted",
}


def held(rows: Rows, environment: str, estimator: str) -> Held | None:
    """Return how an estimator holds the policy in an environment; None without rows of exact training."""
    mine, free = (select(rows, "exact", environment=environment, estimator=name) for name in (estimator, "none"))
    if mine.empty:
        return None
    if not free.empty:
        pairs = mine.merge(free[["beta", "seed", "kl", "gain"]], on=["beta", "seed"], suffixes=("", "_free"))
        same = (pairs["kl"] - pairs["kl_free"]).abs() <= 1e-6 * pairs["kl_free"]
        same &= (pairs["gain"] - pairs["gain_free"]).abs() <= 1e-6
        if len(pairs) and same.all():
            return Held("none")
    rests, diverged = settled(mine), mine["diverged"].astype(bool)
    if (~rests & (mine["beta"] >= CERTAIN)).any():
        return Held("none" if estimator == "none" else "astray")
    # For what no fixed point is predicted nothing says that training is over; it may diverge, and that counts.
    ends = mine[rests & mine["coefficient_by_kl"].notna() & ~diverged]
    if ends.empty:
        return Held("loose")
    factors = ends["coefficient_by_kl"] / ends["beta"]
    last, shortfall = factors[ends["beta"] == ends["beta"].max()].mean(), ends["shortfall"].max()
    logs = np.log(factors)
    found = {
        "factor": math.exp(logs.mean()),
        "spread": math.exp(logs.std(ddof=1) if len(logs) > 1 else 0.0),
        "low": factors.min(),
        "high": factors.max(),
        "last": last,
        "shortfall": shortfall,
    }
    if diverged.any() or last < LOOSE:
        return Held("loose", **found)
    constant = (logs - logs.mean()).abs().max() < SAME and shortfall < ON_FRONTIER
    return Held(("asked" if abs(logs.mean()) < SAME else "scaled") if constant else "drifts", **found)


def settled(rows: pd.DataFrame) -> pd.Series:
    """Tell which runs have settled; one for which nothing is predicted counts as settled."""
    if "predicted_kl" not in rows:
        return pd.Series(True, index=rows.index)
    there = rows.get("predicted_coefficient", pd.Series(np.nan, index=rows.index))
    return rows["predicted_kl"].isna() | ((rows["coefficient_by_kl"] / there - 1).abs() < SETTLED)


# Fixed points, and who reaches π*.

for _words, _names in (
    ("the true gradient ends at π*", ("k1-reward", "k2-loss-sequence")),
    ("token k2 and the exact next-token KL end at `ref·exp(Q_R/β)`", ("k2-loss", "full-loss")),
    ("token k3 ends at `β·ref/(β + V_R − Q_R)`", ("k3-loss",)),
    ("sequence k3 ends at `ref/(1 − (R − E R)/β)`", ("k3-loss-sequence",)),
    ("k1 in the loss ends where no penalty does", ("k1-loss",)),
):

    @claims.measure(
        FORMS, "nats: ascent converges linearly and got this far", claim=_words, kl_to_it=below(1e-8), estimators=_names
    )
    def _ends_there(rows: pd.DataFrame, estimators: tuple[str, ...]) -> Measured:
        return {"kl_to_it": _all_of(need(rows, "fixed-points"), estimators)["kl_to_predicted"]}


def _all_of(rows: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """The rows of these estimators, one a draw of the environment; Missing unless all are there."""
    require(set(names) <= set(rows["estimator"]))
    return rows.set_index("estimator").loc[list(names)]


SMALL = f"`V = 5, L = 4, β = {OPTIMUM['beta']:g}`: {{estimators}}"
REACHED = f"{SMALL} reach π*: KL(π‖π*) below {{kl_to_optimum}}"
MISSED = f"{SMALL} do not: KL(π‖π*) above {{kl_to_optimum}}"


@claims.measure(
    ANTONIADIS,
    "nats left after the steps made",
    claim=REACHED,
    kl_to_optimum=below(1e-6),
    estimators=("k1-reward", "k2-loss-sequence"),
)
def _reached(rows: pd.DataFrame, estimators: tuple[str, ...]) -> Measured:
    found = _all_of(need(rows, "optimum"), estimators)
    return {"kl_to_optimum": found["kl_to_optimum"], "draws": found["seed"].nunique()}


@claims.measure(
    ANTONIADIS,
    "1000 times further than what reaches it",
    claim=MISSED,
    kl_to_optimum=above(1e-3),
    estimators=("k3-loss", "k3-loss-sequence", "k1-loss"),
)
def _missed(rows: pd.DataFrame, estimators: tuple[str, ...]) -> Measured:
    return _reached(rows, estimators)


@claims.measure(OWN, "rare contexts are slow", share=below(0.01), beta=at_least(CERTAIN))
def _ends_as_predicted(rows: pd.DataFrame, beta: Bound) -> Measured:
    """exact training ends at the predicted fixed point, in every environment, for every β from {beta} on: KL(π‖it) is
    below {share:.0%} of KL(it‖ref)"""
    ends = known(need(rows, "exact", beta=beta).dropna(subset=["kl_to_predicted"]))
    share = ends["kl_to_predicted"] / ends["predicted_kl"]
    worst = ends.loc[share.idxmax()]
    return {"share": share, "the_worst": f"{worst['estimator']} in {worst['environment']}", "draws": _draws(ends)}


def _draws(rows: pd.DataFrame) -> int:
    """Return the number of environments, draws counted."""
    return len(rows.drop_duplicates(["environment", "seed"]))


# The coefficient at which each holds the policy.
def _kinds(rows: pd.DataFrame, names: Iterable[str], environments: Iterable[str]) -> dict[tuple[str, str], Held]:
    """The hold of each; Missing unless β goes from well below the rewards to well above them."""
    betas = need(rows, "exact")["beta"]
    found = {(name, environment): held(rows, environment, name) for name in names for environment in environments}
    require(betas.min() <= 0.1 and betas.max() >= 300 and all(found.values()))
    return {which: one for which, one in found.items() if one is not None}


def _ratios(found: Iterable[Held]) -> list[float]:
    """β'/β at its extremes."""
    return [one for each in found for one in (each.low, each.high)]


for _words, _names, _where in (
    (
        ", ".join(name for name in EXACT if name != CENTRED) + " regularise as asked",
        [name for name in EXACT if name != CENTRED],
        ENVIRONMENTS,
    ),
    ("on one step every loss whose weight is u does so", [*LOCAL, "last-token", "length-normalised"], ["bandit"]),
):

    @claims.measure(
        AS_ASKED,
        f"{SETTLING}; where β is below {CERTAIN:g} only what has settled counts",
        claim=f"{_words}, for every environment and β: on the frontier, less than {{shortfall:.1%}} of the reward "
        "missing, within {coefficient_over_β:±.0%} of β' = β",
        as_asked=EVERY,
        coefficient_over_β=near(1, SAME),
        shortfall=below(ON_FRONTIER),
        estimators=_names,
        environments=_where,
    )
    def _as_asked(rows: pd.DataFrame, estimators: list[str], environments: Sequence[str]) -> Measured:
        found = _kinds(rows, estimators, environments).values()
        return {
            "as_asked": [one.kind == "asked" for one in found],
            "coefficient_over_β": _ratios(found),
            "shortfall": [one.shortfall for one in found],
            "draws": _draws(need(rows, "exact", environment=tuple(environments))),
        }


@claims.measure(OWN, SETTLING, three_times_the_coefficient_over_β=near(1, SAME), shortfall=below(ON_FRONTIER))
def _by_length(rows: pd.DataFrame) -> Measured:
    """a penalty divided by the length `T = 3` is on the frontier, within {three_times_the_coefficient_over_β:±.0%} of
    `β/3`"""
    found = _kinds(rows, ["length-normalised"], ENVIRONMENTS[1:]).values()
    return {
        "three_times_the_coefficient_over_β": 3 * np.array(_ratios(found)),
        "shortfall": [one.shortfall for one in found],
    }


@claims.measure(OWN, "as far as training has settled a coefficient is known to this", change=above(SAME))
def _drift(rows: pd.DataFrame) -> Measured:
    """token k2, the exact next-token KL, token and sequence k3 have no one coefficient on sequences: with β and the
    environment β'/β changes by more than {change:.0%}"""
    found = _kinds(rows, WRONG_IN_LOSS, ENVIRONMENTS[1:])
    cells = {name: one for (name, environment), one in found.items() if environment == "mdp"}
    return {
        "change": [one.high / one.low - 1 for one in found.values()],
        "in_the_MDP": [f"{name} {one.low:.2f} to {one.high:.2f}" for name, one in cells.items()],
    }


@claims.measure(OWN, "of the order of reward/β, and as far as training has settled", coefficient_over_β=near(1, SAME))
def _in_the_end(rows: pd.DataFrame) -> Measured:
    """but all of them regularise as asked at the largest β, within {coefficient_over_β:±.0%}"""
    found = _kinds(rows, WRONG_IN_LOSS, ENVIRONMENTS[1:])
    return {"coefficient_over_β": [one.last for one in found.values()], "β": need(rows, "exact")["beta"].max()}


@claims.measure(
    OWN,
    "medians over draws of the environment; single draws are reported",
    tight=above(1.5),
    loose=below(0.95),
    low=at_most(0.3),
    middle=within(2.9, 3.3),
)
def _hyperbolic(rows: pd.DataFrame, low: Bound, middle: Bound) -> Measured:
    """k3 in the loss, on the bandit, holds too tight in the median over draws for β up to {low}, β'/β above {tight},
    and too loose for β of {middle}, below {loose}"""
    _kinds(rows, (), ())
    found = need(rows, "exact", estimator="k3-loss", environment="bandit").dropna(subset=["coefficient_by_kl"])
    ratio = (found["coefficient_by_kl"] / found["beta"]).astype(float).groupby(found["beta"])
    by, extremes_by = ratio.median(), ratio.agg(["min", "max"])
    return {
        "tight": by[low(by.index)],
        "loose": by[middle(by.index)],
        "draws_where_tight": extremes_by[low(by.index)],
        "draws_where_loose": extremes_by[middle(by.index)],
    }


@claims.measure(OWN, "terms of the order of 1/log(1/β) are left", over_law=near(1, 0.02), beta=below(1e-250))
def _law(rows: pd.DataFrame, beta: Bound) -> Measured:
    """as `β → 0` β'/β of k3 in the loss grows without bound: for β below {beta} it is within {over_law:±.0%} of
    `Δ/(β·log(1/β))`, Δ the gap between the best and the next arm, or rollout"""
    found = need(rows, "limit", beta=beta)
    return {"over_law": found["coefficient_by_kl"] / found["law"]}


# What the fixed point of a token-level term lacks.
def _bounds(rows: pd.DataFrame, **selected: Any) -> pd.DataFrame:
    """Rows of the part bound, with the share of the reward beyond the reference's that is missing at the same KL."""
    found = need(rows, "bound", **selected)
    return found.assign(lost=found["at_same_kl"] / (found["at_same_kl"] + found["earned"]))


def _cases(found: pd.DataFrame) -> Row:
    return {"environments": found["environment"].nunique(), "draws": _draws(found), "cases": len(found)}


@claims.measure(
    OWN,
    "an order of magnitude: a bound that is farther off says nothing of a gap of some percent",
    over_the_gap=within(1 - 1e-9, 10),
)
def _not_vacuous(rows: pd.DataFrame) -> Measured:
    """Bennett's bound on what the fixed point of a token-level term lacks, from the variance of K and its least value,
    is for every β {over_the_gap} times what it lacks"""
    found = _bounds(rows)
    times = found["bennett"] / found["objective"]
    return {"over_the_gap": times, "medians": times.groupby(found["beta"]).median().iloc[:3], **_cases(found)}


@claims.measure(
    OWN, "the third cumulant is of the order of reward/β beside the second", over_half=near(1, 0.1), beta=at_least(3)
)
def _half_the_variance(rows: pd.DataFrame, beta: Bound) -> Measured:
    """for β from {beta} on, where β is large beside the spread of returns, it lacks `β·Var(K)/2` within
    {over_half:±.0%}"""
    found = _bounds(rows, beta=beta)
    return {"over_half": found["objective"] / found["second_order"], **_cases(found)}


@claims.measure(OWN, "a quarter of the reward would be called much", lost=below(0.25))
def _mostly_another_stopping_point(rows: pd.DataFrame) -> Measured:
    """at the same KL(π‖ref) the fixed point of a token-level term lacks less than {lost:.0%} of the reward beyond the
    reference's, at every β, also where its objective is below that of the reference itself"""
    found = _bounds(rows)
    over = found["objective"] / found["gain"]
    return {"lost": found["lost"], "below_the_reference": int((over > 1).sum()), **_cases(found)}


@claims.measure(OWN, "a twentieth would not be called much", lost=below(0.05), missed=below(0.2))
def _by_share(rows: pd.DataFrame, missed: Bound) -> Measured:
    """where a token-level term misses a share of ∇KL(π‖ref) below {missed:.0%} at its fixed point, that lacks less than
    {lost:.0%} of the reward beyond the reference's that can be had at its KL"""
    found = _bounds(rows)
    few = missed(found["missed"])
    return {"lost": found[few]["lost"], "lost_beyond": found[~few]["lost"].max(), **_cases(found[few])}


# Collapse.
@claims.measure(OWN, "a tenth of what was asked; π* is at 1", coefficient_over_β_or_0_diverged=below(LOOSE))
def _loose(rows: pd.DataFrame) -> Measured:
    """k2 and k3 in the reward, and the last token's k2 on sequences, hold the policy at no coefficient: at the largest
    β β'/β is below {coefficient_over_β_or_0_diverged}, or training diverges"""
    _kinds(rows, (), ())
    last = {}
    for name, environment in product(("k2-reward", "k3-reward", "last-token"), ENVIRONMENTS):
        mine = select(rows, "exact", estimator=name, environment=environment)
        if len(mine) and (name, environment) != ("last-token", "bandit"):
            diverged, found = mine["diverged"].astype(bool).any(), held(rows, environment, name)
            last[name, environment] = 0.0 if diverged or found is None or found.last != found.last else found.last
    return {"coefficient_over_β_or_0_diverged": list(last.values())}


@claims.measure(OWN, "its push is β·ref however rare the answer", collapsed=EVERY, beta=at_most(3))
def _collapses(rows: pd.DataFrame, beta: Bound) -> Measured:
    """k3 in the reward collapses under exact gradients, at every β up to {beta}"""
    return {"collapsed": need(rows, "exact", estimator="k3-reward", beta=beta)["collapsed"]}


@claims.measure(
    OWN,
    "a run this near π* is on its way, and π* itself is almost sure there",
    diverged=exactly(0),
    collapsed_farther=exactly(0),
    nats=0.1,
)
def _never_collapses(rows: pd.DataFrame, nats: float) -> Measured:
    """what follows ∇KL, the local gradient or forward KL never diverges under exact gradients, and what has collapsed
    is within {nats} nats of π*"""
    found = need(rows, "exact")
    others = ("k1-loss", "k2-reward", "k3-reward", "last-token", "none", "length-normalised")
    found = known(found[~found["estimator"].isin(others)])
    collapsed = found["collapsed"].astype(bool)
    farther = found.get("kl_to_optimum", pd.Series(np.inf, index=found.index)) >= nats
    return {
        "diverged": int(found["diverged"].sum()),
        "collapsed_farther": int((collapsed & farther).sum()),
        "collapsed": int(collapsed.sum()),
        "runs": len(found),
    }


@claims.measure(OWN, "two orders of magnitude", times=above(100), beta=at_least(1000))
def _worse_than_nothing(rows: pd.DataFrame, beta: Bound) -> Measured:
    """sampled, k1 in the loss is worse than nothing: at the largest β, {beta} or more, its noise carries the policy
    more than {times} times as far in KL as no penalty does"""
    found = need(rows, "sampled", beta=beta)
    found = found[found["beta"] == found["beta"].max()]
    free, noisy = (need(found, estimator=name)["kl"].to_numpy() for name in ("none", "k1-loss"))
    require(len(free) == len(noisy))
    return {"times": noisy / free}


# Noise.
def _budget(rows: pd.DataFrame, names: tuple[str, ...], batch_size: Bound) -> pd.DataFrame:
    """Runs in batches of these sizes, with KL(π‖π*) as foreseen."""
    found = need(rows, "budget", estimator=names, batch_size=batch_size)
    return found.assign(foreseen=foreseen(found))


def foreseen(row: Any) -> Any:
    """Return the predicted KL(π‖π*): that of the fixed point, and η·tr Cov/(4βB) of noise; β = 1."""
    return row["predicted_bias"] + row["learning_rate"] * row["noise"] / (4 * row["batch_size"])


ANY = at_least(0)


def _beside(rows: pd.DataFrame, one: str, other: str, batch_size: Bound = ANY) -> pd.DataFrame:
    """Ratio of the distances from π* of the other and the one, by draw and batch size; found and foreseen."""
    where, what = ["seed", "batch_size"], ["kl_to_optimum", "foreseen"]
    mine, others = (_budget(rows, (name,), batch_size).set_index(where)[what] for name in (one, other))
    return known((others / mine).dropna().reindex(mine.index.intersection(others.index)))


BY_FORMULA = at_least(16)


def _excess(rows: pd.DataFrame, batch_size: Bound = BY_FORMULA) -> pd.Series:
    """Distance from π* over the foreseen one, by estimator, batch size and draw."""
    found = _budget(rows, NOISY, batch_size).set_index(["estimator", "batch_size", "seed"])
    return (found["kl_to_optimum"] / found["foreseen"]).astype(float)


def _medians(excess: pd.Series) -> pd.Series:
    return excess.groupby(level=["estimator", "batch_size"]).median()


@claims.measure(
    OWN,
    "first order in η: a mode of curvature λ has 1/(1 − ηβλ/2) of it, at most 1.33 here; 10 % of sampling",
    found_over_foreseen=within(0.9, 1.35),
    batch_size=BY_FORMULA,
)
def _noise_formula(rows: pd.DataFrame, batch_size: Bound) -> Measured:
    """where noisy training settles is known: for B from {batch_size} on it is, in the median over draws of the
    environment, {found_over_foreseen} times `KL(π‖π*) = η·tr Cov/(4βB)`, Cov of the whole update at π*"""
    ratio = _excess(rows, batch_size)
    return {
        "found_over_foreseen": _medians(ratio),
        "of_single_draws": ratio,
        "draws": ratio.index.get_level_values("seed").nunique(),
    }


@claims.measure(
    OWN,
    "rounding squared; what rare contexts still lack",
    noise=below(1e-20),
    kl_at_end=below(2e-4),
    batch_size=at_least(8),
)
def _no_noise(rows: pd.DataFrame, batch_size: Bound) -> Measured:
    """with reward and KL both less the others' mean the noise at π* is zero, since R − β·Σu is the same there for every
    rollout of tokens: for B from {batch_size} on training at a constant learning rate ends at KL(π‖π*) below
    {kl_at_end}"""
    found = _budget(rows, (CENTRED,), batch_size)
    return {"noise": found["noise"], "kl_at_end": found["at_end"], "draws": found["seed"].nunique()}


AN_ORDER = "an order; standard errors are a few percent"


@claims.measure(OWN, AN_ORDER, times_as_far=above(1), other="rao-blackwell", batch_size=ANY)
def _further(rows: pd.DataFrame, other: str, batch_size: Bound) -> Measured:
    """the Rao–Blackwellised KL ends further from π* than k1 in the reward, at every batch size and in every draw: what
    cancels the reward's noise is gone"""
    return {"times_as_far": _beside(rows, "k1-reward", other, batch_size)["kl_to_optimum"]}


@claims.measure(OWN, AN_ORDER, times_as_far=above(1), other="k2-loss", batch_size=at_least(4))
def _token_k2_further(rows: pd.DataFrame, other: str, batch_size: Bound) -> Measured:
    """token k2 ends further from π* than k1 in the reward, for batches of {batch_size} and more and in every draw"""
    return _further(rows, other, batch_size)


@claims.measure(OWN, "the formula is of first order in η", as_foreseen=EVERY, times=1.3, batch_size=BY_FORMULA)
def _nearer(rows: pd.DataFrame, times: float, batch_size: Bound) -> Measured:
    """biased estimators end nearer to π* than unbiased ones where batches are small, and only there: for B from
    {batch_size} on, who is nearer is as fixed points and noise formula say, wherever these differ by a factor of
    {times}"""
    pairs = []
    for names in PAIRS:
        try:
            pairs.append(_beside(rows, *names))
        except Missing:
            continue
    require(pairs)
    found = pd.concat(pairs)
    clear = found[np.log(found["foreseen"]).abs() > math.log(times)] > 1
    large = batch_size(clear.index.get_level_values("batch_size"))
    require(clear[large]["foreseen"].nunique() >= 2)
    right = clear["kl_to_optimum"] == clear["foreseen"]
    return {"as_foreseen": right[large], "in_smaller_batches": f"{right[~large].sum()} of {(~large).sum()}"}


def crossing(rows: Rows, biased: str, unbiased: str, seed: int = 0) -> tuple[float, float] | None:
    """The batch size from which on the unbiased one ends nearer to π*: as found, and as foreseen; None without one."""
    try:
        times = _beside(frame(rows), biased, unbiased).xs(seed, level="seed").sort_index()
    except (Missing, KeyError):
        return None
    found = []
    for column in ("kl_to_optimum", "foreseen"):
        gaps = list(zip(np.log(times.index), np.log(times[column]), strict=True))
        signs = [(one, other) for one, other in pairwise(gaps) if one[1] > 0 >= other[1]]
        if len(signs) != 1:
            return None
        (low, above), (high, below) = signs[0]
        found.append(math.exp(low + (high - low) * above / (above - below)))
    return found[0], found[1]


def tables(rows: Rows) -> dict[str, list[Row]]:
    """The hold of each estimator in each environment."""
    exact = select(rows, "exact")
    names = list(exact["estimator"].unique()) if len(exact) else []
    cells = {name: {environment: held(rows, environment, name) for environment in ENVIRONMENTS} for name in names}
    rank = {name: max(list(KINDS).index(one.kind) for one in cells[name].values() if one) for name in names}
    lines = []
    for name in sorted(names, key=lambda name: (rank[name], name)):
        line: Row = {"estimator": name}
        for environment, found in cells[name].items():
            line["MDP" if environment == "mdp" else environment] = "" if found is None else _cell(found)
        collapsed, drawn = need(exact, estimator=name)["collapsed"], select(rows, "sampled", estimator=name)
        of_drawn = [0, 0] if drawn.empty else drawn[["collapsed", "runs"]].sum().astype(int)
        line["collapsed, exact"] = f"{collapsed.sum()} of {len(collapsed)}"
        line["collapsed, sampled"] = "{} of {}".format(*of_drawn)
        lines.append(line)
    return {"coefficients-table": lines}


def _cell(found: Held) -> str:
    if found.kind in ("none", "loose") or found.factor != found.factor:
        return "none" if found.kind == "loose" else "no penalty"
    if found.kind in ("asked", "scaled"):
        return f"{found.factor:.2f}"
    return f"{found.low:.2f}–{found.high:.2f}; {found.factor:.2f} ×÷ {found.spread:.2f}"


@numbers.add
def _of_exact_training(rows: pd.DataFrame) -> Cited:
    runs = need(rows, "exact")
    for name in runs["estimator"].unique():
        for environment in ENVIRONMENTS:
            found = held(rows, environment, name)
            if found is not None and found.factor == found.factor:
                for what in ("low", "high"):
                    yield number(what, getattr(found, what), estimator=name, environment=environment)


@numbers.add
def _of_bounds(rows: pd.DataFrame) -> Cited:
    found = _bounds(rows)
    yield number("cases of the bound", len(found))
    yield number("largest bound over gap", (found["bennett"] / found["objective"]).max())
    few, much = found["missed"] < 0.2, found["missed"] > 0.5
    yield number("largest loss below a fifth", found[few]["lost"].max())
    yield number("largest loss above a half", found[much]["lost"].max())
