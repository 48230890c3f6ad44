"""Estimators that regularise as asked, at another coefficient, or not at all: claims, tables and numbers."""

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Missing, Row, Rows, frame, known, need, require, select
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

from .ends import EXACT, LOCAL
from .settings import CENTRED, PARTS

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
# KL(π‖π*), nats, of a run that is on its way to π* and no longer lost.
NEAR = 0.1
# Foreseen distances that differ by 30 % are told apart.
CLEAR = math.log(1.3)
NOISY = ("k1-reward", "k1-both", "rao-blackwell")
# A biased estimator, and an unbiased one that is noisier.
PAIRS = (("k2-loss", "rao-blackwell"), ("k2-loss", "k1-both"), ("k3-loss", "k1-both"))
ON_TARGET = f"{SAME:.0%} in β'"

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
        return {name: _short(value) for name, value in row.items() if value is not None and name not in out}

    return frame([kept(row) for row in sorted(rows, key=place)])


def _short(value: Any) -> Any:
    return float(f"{value:.{FIGURES - 1}e}") if isinstance(value, float) else value


# Hold of one estimator on the policy in one environment: the coefficients β' of optima as far from the reference.
# `factor` is the geometric mean of β'/β over the ends that have settled, `spread` the factor that one standard
# deviation is, `low` and `high` the extremes, `last` that at the largest β; `by_reward` is the geometric mean of β'/β
# for the optima with the same reward instead. `kind` says what it comes to.
Held = namedtuple("Held", "kind factor spread low high last", defaults=[None] * 5)
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


# Theory: fixed points, and who reaches π*.

for _words, _names in (
    ("the true gradient ends at π*", ("k1-reward", "k2-loss-sequence")),
    ("token k2 and the exact next-token KL end at ref·exp(Q_R/β)", ("k2-loss", "full-loss")),
    ("token k3 ends at β·ref/(β + V_R − Q_R)", ("k3-loss",)),
    ("sequence k3 ends at ref/(1 − (R − E R)/β)", ("k3-loss-sequence",)),
    ("k1 in the loss ends where no penalty does", ("k1-loss",)),
):
    claims.between(_words, "theory", "KL(π‖predicted) < 1e-8", "1e-8: ascent converges linearly, and has", "{high:.1e}",
        lambda found, names=_names: _all_of(found, names)["kl_to_predicted"], "fixed-points", below=1e-8)  # fmt: skip


def _all_of(rows: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """The rows of these estimators, one a draw of the environment; Missing unless all are there."""
    require(set(names) <= set(rows["estimator"]))
    return rows.set_index("estimator").loc[list(names)]


RIGHT, WRONG = ("k1-reward", "k2-loss-sequence"), ("k3-loss", "k3-loss-sequence", "k1-loss")

SIZE = "V = 5, L = 4, β = .5"


def _reached(rows: pd.DataFrame, names: tuple[str, ...], worst: str, holds: Callable[[float], bool]) -> Answer:
    by = _all_of(need(rows, "optimum"), names)["kl_to_optimum"].groupby(level=0, sort=False)
    said = ", ".join(f"{one:.1e}" for one in by.agg(worst))
    return f"{said}; draws of the environment: {by.size().min()}", all(map(holds, by.agg(worst)))


claims.add("theory", "KL(π‖π*) < 1e-6", "1e-6: theory's own", claim=f"{SIZE}: {', '.join(RIGHT)} reach π*")(
    lambda rows: _reached(rows, RIGHT, "max", lambda kl: kl < 1e-6))  # fmt: skip
claims.add("theory", "KL(π‖π*) > 1e-3", "1e-3: a thousand times further than what reaches it",
    claim=f"{SIZE}: {', '.join(WRONG)} do not reach π*")(
    lambda rows: _reached(rows, WRONG, "min", lambda kl: kl > 1e-3))  # fmt: skip


@claims.add("theory", "KL(π‖predicted) < 1 % of KL(predicted‖ref)", "1 %: rare contexts are slow")
def _ends_as_predicted(rows: pd.DataFrame) -> Answer:
    """exact training ends at the predicted fixed point, in every environment, for every β from 3 on"""
    ends = known(need(rows, "exact", beta=lambda x: x >= CERTAIN).dropna(subset=["kl_to_predicted"]))
    share = ends["kl_to_predicted"] / ends["predicted_kl"]
    worst = ends.loc[share.idxmax()]
    return f"{share.max():.1e} at most, {worst['estimator']} in {worst['environment']}", share.max() < 0.01


# The coefficient at which each holds the policy.
def _kinds(rows: pd.DataFrame, names: Iterable[str], environments: Iterable[str]) -> dict[tuple[str, str], Held]:
    """The hold of each; Missing unless β goes from well below the rewards to well above them."""
    betas = need(rows, "exact")["beta"]
    found = {(name, environment): held(rows, environment, name) for name in names for environment in environments}
    require(betas.min() <= 0.1 and betas.max() >= 300 and all(found.values()))
    return {which: one for which, one in found.items() if one is not None}


def _all_are(found: dict[tuple[str, str], Held], kind: str) -> Answer:
    different = dict.fromkeys(KINDS[one.kind] for one in found.values())
    return "; ".join(different) + f" ({len(found)} cells)", all(one.kind == kind for one in found.values())


ASKED = [name for name in EXACT if name != CENTRED]


@claims.add("theory", "on the frontier, at β' = β",
    f"{SAME:.0%} in β', {ON_FRONTIER:.1%} of the reward: as far as training has settled",
    claim=f"{', '.join(ASKED)} regularise as asked in every environment")  # fmt: skip
def _as_asked(rows: pd.DataFrame) -> Answer:
    return _all_are(_kinds(rows, ASKED, ENVIRONMENTS), "asked")


@claims.add("theory", "on the frontier, at β' = β", ON_TARGET)
def _on_one_step(rows: pd.DataFrame) -> Answer:
    """on one step every loss whose weight is u does so"""
    return _all_are(_kinds(rows, [*LOCAL, "last-token", "length-normalised"], ["bandit"]), "asked")


@claims.add("theory", "β'/β = 1/3", f"{SAME:.0%}: as far as training has settled")
def _by_length(rows: pd.DataFrame) -> Answer:
    """a penalty divided by the length T = 3 is on the frontier, at a third of the coefficient"""
    found = _kinds(rows, ["length-normalised"], ENVIRONMENTS[1:]).values()
    thirds = all(one.kind == "scaled" and one.factor and abs(3 * one.factor - 1) < SAME for one in found)
    return ", ".join("none" if one.factor is None else f"{one.factor:.4f}" for one in found), thirds


@claims.add("Tang & Munos 2025; theory", "the same end as without a penalty",
    "1e-6 of the KL: the same gradient, added up in another order")  # fmt: skip
def _not_at_all(rows: pd.DataFrame) -> Answer:
    """k1 in the loss regularises not at all"""
    return _all_are(_kinds(rows, ["k1-loss"], ENVIRONMENTS), "none")


@claims.add(OWN, "β'/β changes with β", f"more than {SAME:.0%} of change")
def _drift(rows: pd.DataFrame) -> Answer:
    """token k2, the exact next-token KL, token and sequence k3 have no one coefficient on sequences"""
    found = _kinds(rows, WRONG_IN_LOSS, ENVIRONMENTS[1:])
    cells = {name: one for (name, environment), one in found.items() if environment == "mdp"}
    said = ", ".join(f"{n} {one.low:.2f}–{one.high:.2f}" if one.low is not None else n for n, one in cells.items())
    return said, all(one.kind == "drifts" for one in found.values())


@claims.add(OWN, "β'/β → 1", "2 %: of the order of reward/β at the largest β, and as far as training has settled")
def _in_the_end(rows: pd.DataFrame) -> Answer:
    """but all of them come to regularise as asked as β grows"""
    found = _kinds(rows, WRONG_IN_LOSS, ENVIRONMENTS[1:])
    off = max(abs((one.last or 0.0) - 1) for one in found.values())
    return f"{off:.1e} from 1 at the largest β", off < 2 * SAME


@claims.add(OWN, "β'/β > 1.5 at one end, < 0.95 in between", "the whole range of β and of environments")
def _hyperbolic(rows: pd.DataFrame) -> Answer:
    """k3 in the loss, on the bandit, holds too tight below β = .3 and too loose around β = 3"""
    (one,) = _kinds(rows, ["k3-loss"], ["bandit"]).values()
    if one.low is None or one.high is None:
        return one.kind, False
    return f"{one.low:.2f} to {one.high:.2f}", one.high > 1.5 and one.low < 0.95


claims.between("as β → 0 β'/β of k3 in the loss grows without bound, like Δ/(β·log(1/β)), Δ the gap between the two "
    "best arms, or rollouts", OWN, "1 times it", "2 % at β = 1e-256: terms of the order of 1/log(1/β) are left",
    "{low:.3f} to {high:.3f} times it, of {count} bandits and trees of tokens",
    lambda found: found["coefficient_by_kl"] / found["law"], "limit", beta=lambda x: x < 1e-250,
    above=0.98, below=1.02)  # fmt: skip


# Collapse.
@claims.add(OWN, f"β'/β < {LOOSE:g} at the largest β, or divergence", "a tenth of what was asked; π* is at 1")
def _loose(rows: pd.DataFrame) -> Answer:
    """k2 and k3 in the reward, and the last token's k2 on sequences, hold the policy at no coefficient"""
    cells = [(name, environment) for name in ("k2-reward", "k3-reward", "last-token") for environment in ENVIRONMENTS]
    cells.remove(("last-token", "bandit"))
    _kinds(rows, (), ())
    found = [one for name, environment in cells if (one := held(rows, environment, name)) is not None]
    require(found)
    return "; ".join(dict.fromkeys(KINDS[one.kind] for one in found)), all(one.kind == "loose" for one in found)


claims.between("k3 in the reward collapses: exact training drives an answer to probability 0, at every β up to 3", OWN,
    "every run", "none: its push is β·ref however rare the answer", "{total} of {count} runs", "collapsed", "exact",
    estimator="k3-reward", beta=lambda x: x <= 3, above=0.5)  # fmt: skip


@claims.add(OWN, "no run", f"less than a tenth of the entropy of π* and {NEAR:g} nats from it, or divergence")
def _never_collapses(rows: pd.DataFrame) -> Answer:
    """what follows ∇KL, the local gradient or forward KL never collapses under exact gradients"""
    found = need(rows, "exact")
    others = ("k1-loss", "k2-reward", "k3-reward", "last-token", "none", "length-normalised")
    found = known(found[~found["estimator"].isin(others)])
    # Where π* is almost sure itself, a run that is nearly there may have less entropy.
    near = found.get("kl_to_optimum", pd.Series(np.inf, index=found.index)) < NEAR
    lost = found["collapsed"].astype(bool) & (found["diverged"].astype(bool) | ~near)
    return f"{lost.sum()} of {len(found)} runs", not lost.any()


@claims.add(OWN, "KL(π‖ref) at the largest β over a hundred times that without a penalty",
    "two orders of magnitude")  # fmt: skip
def _worse_than_nothing(rows: pd.DataFrame) -> Answer:
    """sampled, k1 in the loss is worse than nothing: β times its noise carries the policy away"""
    found = need(rows, "sampled")
    most = found["beta"].max()
    free, noisy = (need(found, beta=most, estimator=name)["kl"].to_numpy() for name in ("none", "k1-loss"))
    require(most >= 1000 and len(free) == len(noisy))
    times = (noisy / free).min()
    return f"{times:.0f} times or more, by the medians in each of {len(noisy)} environments", times > 100


# Noise.
def _budget(rows: pd.DataFrame, names: tuple[str, ...], least: int) -> pd.DataFrame:
    """Runs in batches of this size or more, with KL(π‖π*) as foreseen."""
    found = need(rows, "budget", estimator=names, batch_size=lambda x: x >= least)
    return found.assign(foreseen=foreseen(found))


def foreseen(row: Any) -> Any:
    """Return KL(π‖π*) by theory: that of the fixed point, and η·tr Cov/(4βB) of noise; β = 1."""
    return row["predicted_bias"] + row["learning_rate"] * row["noise"] / (4 * row["batch_size"])


def _beside(rows: pd.DataFrame, one: str, other: str, least: int = 0) -> pd.DataFrame:
    """Ratio of the distances from π* of the other and the one, by draw and batch size; found and foreseen."""
    where, what = ["seed", "batch_size"], ["kl_to_optimum", "foreseen"]
    mine, others = (_budget(rows, (name,), least).set_index(where)[what] for name in (one, other))
    return known((others / mine).dropna().reindex(mine.index.intersection(others.index)))


def _excess(rows: pd.DataFrame) -> pd.Series:
    found = _budget(rows, NOISY, 16)
    return found["kl_to_optimum"] / found["foreseen"]


claims.between("where noisy training settles is known: KL(π‖π*) = η·tr Cov/(4βB), of the whole update at π*", OWN,
    "found/predicted between 1 and 1.35 for B ≥ 16",
    "first order in η: a mode of curvature λ has 1/(1 − ηβλ/2) of it, at most 1.33 here; 10 % of sampling",
    "{low:.2f} to {high:.2f}", _excess, above=0.9, below=1.35)  # fmt: skip


@claims.add(OWN, "the noise at π* is 0, and KL(π‖π*) < 2e-4 at a constant learning rate",
    "at π* R − β·Σu is the same for every rollout of tokens; 2e-4 is what rare contexts still lack")  # fmt: skip
def _no_noise(rows: pd.DataFrame) -> Answer:
    """with reward and KL both less the others' mean the noise at π* is zero: training ends at π* itself"""
    found = _budget(rows, (CENTRED,), 8)
    noise, end = found["noise"].max(), found["at_end"].max()
    return f"{noise:.0e}, and {end:.0e}", noise < 1e-20 and end < 2e-4


claims.between(
    "Rao–Blackwellised KL ends further from π* than k1 in the reward: what cancels the reward's noise is gone", OWN,
    "further, at every batch size", "none; standard errors are a few percent",
    "{low:.1f} to {high:.1f} times as far",
    lambda rows: _beside(rows, "k1-reward", "rao-blackwell")["kl_to_optimum"], above=1)  # fmt: skip


@claims.add(OWN, "who is nearer is as fixed points and noise formula say, wherever they differ by 30 %",
    "30 %: the formula is of first order in η")  # fmt: skip
def _nearer(rows: pd.DataFrame) -> Answer:
    """biased estimators end nearer to π* than unbiased ones where batches are small, and only there"""
    pairs = []
    for names in PAIRS:
        try:
            pairs.append(_beside(rows, *names))
        except Missing:
            continue
    found = pd.concat(pairs) if pairs else pd.DataFrame({"foreseen": [], "kl_to_optimum": []})
    clear = found[np.log(found["foreseen"]).abs() > CLEAR] > 1
    require(clear["foreseen"].nunique() >= 2)
    hits = (clear["kl_to_optimum"] == clear["foreseen"]).sum()
    return f"{hits} of {len(clear)} pairs of ends", hits == len(clear)


claims.between("token k2 never ends nearer than k1 in the reward, for batches of 4 and more", OWN,
    "further, at every batch size", "none; standard errors are a few percent", "{low:.1f} to {high:.1f} times as far",
    lambda rows: _beside(rows, "k1-reward", "k2-loss", 4)["kl_to_optimum"], above=1)  # fmt: skip


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
    if found.kind in ("none", "loose") or found.factor is None:
        return "none" if found.kind == "loose" else "no penalty"
    if found.kind in ("asked", "scaled"):
        return f"{found.factor:.2f}"
    return f"{found.low:.2f}–{found.high:.2f}; {found.factor:.2f} ×÷ {found.spread:.2f}"


@numbers.add
def _of_exact_training(rows: pd.DataFrame) -> Cited:
    runs = need(rows, "exact")
    yield number("estimators", len(set(runs["estimator"]) - {"none"}))
    yield number("coefficients", runs["beta"].nunique())
    for name, mine in runs.groupby("estimator", sort=False):
        yield number("collapsed", mine["collapsed"].sum(), estimator=name)
        yield number("runs", len(mine), estimator=name)
        for environment in ENVIRONMENTS:
            found = held(rows, environment, name)
            if found is not None and found.factor is not None:
                for what in ("low", "high"):
                    yield number(what, getattr(found, what), estimator=name, environment=environment)


numbers.melt("optimum", {"kl_to_optimum": "KL to π* in theory's part"}, ["estimator"], seed=0)

numbers.melt("sampled", {"kl": "sampled KL"}, ["estimator", "environment", "beta"], seed=0)


@numbers.add
def _of_budgets(rows: pd.DataFrame) -> Cited:
    draws = sorted(need(rows, "budget")["seed"].unique())
    for biased, unbiased in PAIRS:
        known_sizes = [sizes for seed in draws if (sizes := crossing(rows, biased, unbiased, seed)) is not None]
        for what, place in (("crossing", 0), ("foreseen crossing", 1)):
            yield from extremes(what, [sizes[place] for sizes in known_sizes], biased=biased, unbiased=unbiased)
    yield from extremes("excess over the noise formula", _excess(rows))
    yield from extremes("rao-blackwell over k1-reward", _beside(rows, "k1-reward", "rao-blackwell")["kl_to_optimum"])
