"""A language model trained under each KL term: claims, tables and the numbers that the paper cites.

Findings are asked of the committed sweep, and of a sweep made now where there is a whole one. What each run is judged
by is what it was asked for, the objective E[reward] − β·KL(π‖ref), beside the gold score that it never saw.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import pandas as pd
from scipy.stats import t

from kltest.reproduce.bounds import above, below
from kltest.reproduce.claims import OWN, Claim, Claims, Measured
from kltest.reproduce.frames import Row, Rows, frame, known, need, records, require, select
from kltest.reproduce.numbers import Cited, Numbers, number

from ..spread import Interval, geometric, interval
from . import audited
from .settings import BETA, BETAS, COMMITTED, METRICS, PARTS, PILOT_DEVIATION, SAME, SEEDS, VARIANTS
from .task import EXAMPLES

TANG_MUNOS = "Tang & Munos 2025"
THEORY = "the atlas, exact"
UNBIASED = "k1-reward"
PREFIX, SEQUENCE = "stale:k1-reward-to-go-prefix-ratio", "stale:k1-reward-sequence-ratio"
# In the loss, and so without the effect of a token on those after it.
LOCAL = ("k2-loss", "k3-loss")
KEY = ["variant", "beta", "seed"]
OVER_SEEDS = f"95 % intervals over {SEEDS} seeds, Student's t"
PAIRED = f"{OVER_SEEDS}, paired by seed"

findings, of_now, numbers = Claims("finetune"), Claims("finetune"), Numbers(list(audited.numbers.sources))


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Runs made now, then committed ones, each in the order of the sweep; then audits."""
    parts, variants = list(PARTS), list(VARIANTS)
    place = lambda r: (parts.index(r["part"]), variants.index(r["variant"]), r["beta"], r["seed"], r["update"])  # noqa: E731
    runs = sorted((row for row in rows if row["part"] != "audits"), key=place)
    return frame([*runs, *(row for row in rows if row["part"] == "audits")])


class Sweep:
    """The runs of a part; what is asked of runs that are not there raises Missing."""

    def __init__(self, rows: Rows, part: str = "committed") -> None:
        self.rows = select(rows, part)

    @cached_property
    def ended(self) -> pd.DataFrame:
        """The last row of each run, with its objective, and the gold score of its start."""
        by = known(self.rows).groupby(KEY, sort=False)
        first, last = by.head(1).set_index(KEY), by.tail(1).set_index(KEY)
        objective = last["reward_held_out"] - last.index.get_level_values("beta") * last["kl"]
        return last.assign(objective=objective, gold_before=first["gold_held_out"], before=first["reward_held_out"])

    def at(self, variant: str, beta: float, name: str) -> pd.Series:
        """A metric at the end, by seed."""
        ended = need(self.ended.reset_index(), variant=variant, beta=beta).set_index("seed")
        return ended[name]

    def difference(self, name: str, one: str, other: str, beta: float, level: float = 0.95) -> Interval:
        """Of a metric at the end: one variant's less another's, of the same seed and coefficient."""
        return _interval(self.at(one, beta, name) - self.at(other, beta, name), level)

    def over_none(self, variant: str, beta: float, level: float = 0.95) -> Interval:
        """KL at the end over that of the run of the same seed without a KL term."""
        found = (self.at(variant, beta, "kl") / self.at("none", 0.0, "kl")).dropna()
        require(len(found) >= 2)
        return geometric(list(found), level)


def _interval(values: pd.Series, level: float = 0.95) -> Interval:
    found = values.dropna()
    require(len(found) >= 2)
    return interval(list(found), level)


def _each(found: Mapping[str, Interval], digits: int = 2) -> str:
    return "; ".join(f"{name}: {one.text(digits)}" for name, one in found.items())


def _name(variant: str, beta: float) -> str:
    return f"{variant}, β {beta:g}"


def _of_several(count: int) -> float:
    """The level of each interval with which `count` of them hold at once, 19 times in 20 (Bonferroni)."""
    return 1 - 0.05 / count


# Findings: each is asked of the rows of one part.


@findings.measure(OWN, PAIRED, low_end_of_reward_gain=above(0), high_end_of_gold_gain=below(0))
def _over_optimised(rows: pd.DataFrame) -> Measured:
    """without a KL term the reward is over-optimised: it rises, and the gold score falls below the reference's"""
    sweep = Sweep(rows)
    ends = {name: sweep.at("none", 0.0, name) for name in ("reward_held_out", "before", "gold_held_out", "gold_before")}
    reward = _interval(ends["reward_held_out"] - ends["before"])
    gold = _interval(ends["gold_held_out"] - ends["gold_before"])
    return {
        "low_end_of_reward_gain": reward.low,
        "high_end_of_gold_gain": gold.high,
        "intervals": f"reward {reward.text()}, gold {gold.text()}",
    }


@findings.measure(TANG_MUNOS, f"{PAIRED}, Bonferroni", high_end_of_share_of_kl=below(1), betas=BETAS)
def _holds(rows: pd.DataFrame, betas: tuple[float, ...]) -> Measured:
    """k1 in the reward holds the policy back, at β = {betas}: KL below that of no term"""
    found = {_name(UNBIASED, beta): Sweep(rows).over_none(UNBIASED, beta, _of_several(len(betas))) for beta in betas}
    return {"high_end_of_share_of_kl": [one.high for one in found.values()], "intervals": _each(found)}


@findings.measure(
    f"{TANG_MUNOS}; {THEORY}",
    f"{PAIRED}, Bonferroni; the margin was chosen before any run of the sweep",
    low_end_of_share_of_kl=above(0.5),
    betas=BETAS,
)
def _unregularised(rows: pd.DataFrame, betas: tuple[float, ...]) -> Measured:
    """k1 in the loss does not hold it back, at β = {betas}: KL above {low_end_of_share_of_kl} of that of no term"""
    found = {_name("k1-loss", beta): Sweep(rows).over_none("k1-loss", beta, _of_several(len(betas))) for beta in betas}
    return {"low_end_of_share_of_kl": [one.low for one in found.values()], "intervals": _each(found)}


for _claim, _name_of, _one, _others in (
    ("k1 in the reward reaches a better objective than k2 and k3 in the loss", "objective", UNBIASED, LOCAL),
    ("k1 in the reward keeps a better gold score than k2 and k3 in the loss", "gold_held_out", UNBIASED, LOCAL),
    ("a baseline on the penalty improves the objective of k1 in the reward", "objective", "leave-one-out", (UNBIASED,)),
    (
        "with a stale sampler k1 in the reward, with prefix ratios, reaches a better objective than terms of tokens",
        "objective",
        PREFIX,
        ("stale:k2-loss", "stale:k3-ratio"),
    ),
    ("and than k1 in the reward with the ratio of the sequence, which is noisier", "objective", PREFIX, (SEQUENCE,)),
):

    @findings.measure(
        OWN,
        PAIRED + ", Bonferroni" * (len(_others) > 1),
        claim=f"{_claim}, at β = {{beta:g}}",
        low_end_of_difference=above(0),
        name=_name_of,
        one=_one,
        others=_others,
        beta=BETA,
    )
    def _better(rows: pd.DataFrame, name: str, one: str, others: Sequence[str], beta: float) -> Measured:
        level = _of_several(len(others))
        found = {other: Sweep(rows).difference(name, one, other, beta, level) for other in others}
        return {"low_end_of_difference": [each.low for each in found.values()], "intervals": _each(found)}


def claims(rows: Rows) -> list[Claim]:
    """Judge the runs made now, then the findings."""
    date = f", {COMMITTED['date']}" if COMMITTED else ""
    found = of_now(rows) + findings(rows, suffix=f" (committed results{date})")
    # True if the sweep was run again as it was committed.
    if _runs(rows, "committed") <= _runs(rows, "run") != set():
        again = frame(rows)
        found += findings(again[again["part"] == "run"].assign(part="committed"), suffix=" (run again)")
    return found + audited.claims(rows)


def _runs(rows: Rows, part: str) -> set[tuple[Any, ...]]:
    found = select(rows, part)
    return set(found[KEY].itertuples(index=False, name=None)) if len(found) else set()


@of_now.measure(TANG_MUNOS, "95 % intervals over rollouts do not overlap", share_of_the_kl=below(1))
def _now(rows: pd.DataFrame) -> Measured:
    """runs made now are held back by k1 in the reward: its KL is below that of no term"""
    # Of the smallest seed and the largest β that there are.
    now = Sweep(rows, "run").ended.reset_index()
    ended = need(now, seed=now["seed"].min()).sort_values("beta").groupby("variant").tail(1).set_index("variant")
    require({"none", UNBIASED} <= set(ended.index))
    return {
        "share_of_the_kl": ended["kl_high"][UNBIASED] / ended["kl_low"]["none"],
        "kl": [f"{name} {ended['kl'][name]:.2f}" for name in ("none", UNBIASED)],
        "runs_as_committed": _as_committed(rows, now),
    }


def _as_committed(rows: pd.DataFrame, now: pd.DataFrame) -> str:
    """Say how many runs made now end to the bit where the committed ones of their settings did: elsewhere rounding may
    differ."""
    if select(rows, "committed").empty:
        return "none to compare"
    # By the same settings, which rows carry with them.
    both = now.merge(Sweep(rows).ended.reset_index(), on=list(PARTS["run"]), suffixes=("", "_before"))
    same = (both["kl"] == both["kl_before"]) & (both["reward_held_out"] == both["reward_held_out_before"])
    return f"{same.sum()} of {len(both)}"


def tables(rows: Rows) -> dict[str, list[Row]]:
    """Runs made now as sweep.csv keeps them, a line a run; what the committed ones ended with, by variant and β."""
    made, usual = [], {"part": "run", **SAME}
    now = select(rows, "run")
    for _, own in now.groupby(KEY, sort=False) if len(now) else ():
        every = records(own)
        line = {name: it for name, it in every[0].items() if usual.get(name) != it and name not in METRICS}
        made.append({**line, **{name: [row[name] for row in every] for name in ("update", *METRICS)}})
    at_ends = []
    if len(select(rows, "committed")):
        sweep = Sweep(rows, "committed")
        for (variant, beta), own in sweep.ended.reset_index().groupby(["variant", "beta"], sort=False):
            line = {"KL term": variant, "β": f"{beta:g}" if beta else "", "KL": geometric(list(own["kl"])).text(1)}
            for title, name in (("reward", "reward_held_out"), ("gold", "gold_held_out"), ("objective", "objective")):
                line[title] = interval(list(own[name])).text()
            at_ends.append(line)
    found = {"sweep": made, "ends": at_ends, "audits": audited.table(rows)}
    return {name: table for name, table in found.items() if table}


def _with_bounds(quantity: str, found: Interval, **where: Any) -> Cited:
    """Yield a mean, and the ends of its interval as the same quantity with a bound."""
    yield number(quantity, found.mean, **where)
    for bound, value in (("low", found.low), ("high", found.high)):
        yield number(quantity, value if math.isfinite(value) else None, **where, bound=bound)


@numbers.add
def _of_the_sweep(rows: pd.DataFrame) -> Cited:
    sweep = Sweep(rows, "committed")
    ended = sweep.ended.reset_index()
    for name in ("date", "torch"):
        yield number(name, COMMITTED[name])
    yield number("runs", len(ended))
    seeds = ended["seed"].nunique()
    yield number("seeds", seeds)
    yield number("labelled completions", EXAMPLES)
    # Told four times in five by one of two intervals: the quantiles of both, times the standard error of the mean.
    quantiles = t.ppf([(1 + _of_several(len(LOCAL))) / 2, 0.8], seeds - 1)
    yield number("difference told", quantiles.sum() * PILOT_DEVIATION / math.sqrt(seeds))
    for (variant, beta), own in ended.groupby(["variant", "beta"], sort=False):
        where = {"variant": variant, "beta": beta}
        yield from _with_bounds("kl", geometric(list(own["kl"])), **where)
        for quantity, name in (("reward", "reward_held_out"), ("gold", "gold_held_out"), ("length", "length_held_out")):
            yield from _with_bounds(quantity, interval(list(own[name])), **where)
        if beta:
            yield from _with_bounds("kl over none", sweep.over_none(variant, beta), **where)
            best = PREFIX if variant.startswith("stale:") else UNBIASED
            if variant != best:
                yield from _with_bounds("objective lost", sweep.difference("objective", best, variant, beta), **where)
                yield from _with_bounds("objective gained", sweep.difference("objective", variant, best, beta), **where)
