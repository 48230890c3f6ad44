"""A language model trained under each KL term: claims, tables and the numbers that the paper cites.

Findings are asked of the committed sweep, and of a sweep made now where there is a whole one; runs made now are
compared with the committed ones one by one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from kltest.reproduce.claims import OWN, Answer, Claim, Claims
from kltest.reproduce.frames import Missing, Row, Rows, frame, known, need, records, require, select
from kltest.reproduce.numbers import Cited, Numbers, number

from .optimum import ROLLOUTS
from .settings import BETA_OF_GRADIENTS, COMMITTED, OPTIMUM, PARTS, RUN, SAME, VARIANTS
from .spread import Interval, geometric, interval, paired

TANG_MUNOS = "Tang & Munos 2025"
THEORY = "the atlas, exact"
# On-policy terms that are meant to hold the policy back.
PENALTIES = ("k1-reward", "k2-loss", "k3-loss")
# Two KLs are about the same within this factor.
ALIKE = 1.5
# A policy has collapsed when it earns less than this share of what its reference earned.
COLLAPSED = 0.5
# A run made elsewhere may round differently, and then goes its own way: as far as another seed would, this often.
ELSEWHERE = 0.99
MEASURES = ("kl", "reward_held_out")
ELSEWHERE_KL = "kl_out_of_distribution"
SLOW, CENTRED = "slow:k1-reward", "leave-one-out"
RUN_KEY = ["variant", "beta", "seed"]
SEEDS = "95 % intervals over seeds, Student's t"

findings, of_now, numbers = Claims("finetune"), Claims("finetune"), Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Runs made now, then committed ones, each in the order of the sweep."""
    parts, variants = list(PARTS), list(VARIANTS)
    place = lambda r: (parts.index(r["part"]), variants.index(r["variant"]), r["beta"], r["seed"], r["update"])  # noqa: E731
    return frame(sorted(rows, key=place))


def runs(rows: Rows, part: str) -> dict[tuple[str, float, int], list[Row]]:
    """Return the rows of each run, by variant, coefficient and seed."""
    found = select(rows, part)
    return {key: records(own) for key, own in found.groupby(RUN_KEY, sort=False)} if len(found) else {}


class Sweep:
    """The runs of a part; what is asked of runs that are not there raises Missing."""

    def __init__(self, rows: Rows, part: str) -> None:
        self.rows = select(rows, part)

    @cached_property
    def ended(self) -> pd.DataFrame:
        """The last row of each run, with the reward gained, the objective E[R] − β·KL and what it has lost."""
        by = known(self.rows).groupby(RUN_KEY, sort=False)
        first, last = by.head(1).set_index(RUN_KEY), by.tail(1).set_index(RUN_KEY)
        start, end = first["reward_held_out"], last["reward_held_out"]
        paid, gain = last.index.get_level_values("beta") * last["kl"], end - start
        return last.assign(gain=gain, objective=end - paid, lost=paid - gain, start=start)

    @cached_property
    def settings(self) -> dict[tuple[str, float], pd.DataFrame]:
        """Ended runs, by variant and coefficient: a row a seed."""
        by = self.ended.reset_index().groupby(["variant", "beta"], sort=False)
        return {setting: found.set_index("seed") for setting, found in by}

    def betas(self, variant: str) -> list[float]:
        return sorted(select(self.rows, variant=variant)["beta"].unique()) if len(self.rows) else []

    def largest(self, variant: str) -> float:
        return max(self.betas(variant), default=math.nan)

    def ends(self, variant: str, beta: float, name: str = "kl") -> dict[int, float]:
        """Return a metric when training ended, by seed."""
        found = self.settings.get((variant, beta))
        return {} if found is None or name not in found else found[name].dropna().to_dict()

    def spread(self, variant: str, beta: float, name: str) -> Interval:
        """Return the interval of a metric at the end."""
        return _interval(self.ends(variant, beta, name).values())

    def against_none(self, variant: str, beta: float | None = None, level: float = 0.95, name: str = "kl") -> Interval:
        """Return KL at the end over that of the unpenalised run of the same seed."""
        none = "stale:none" if VARIANTS[variant].get("inner_epochs", 1) > 1 else "none"
        at = self.largest(variant) if beta is None else beta
        return _paired(self.ends(variant, at, name), self.ends(none, 0.0, name), level)

    def gradients(self, variant: str, name: str) -> Interval:
        """Return a measurement of the variant's gradient along its runs: over seeds, after a mean within each.

        Plain means: errors grow with lengths and shrink towards a cosine of 1, so that weights would choose the answer.
        """
        size = f"{name.rpartition('_')[0]}_size_low"
        found = need(self.rows, variant=variant)
        require(name in found and size in found)
        found = found[found[name].notna() & (found[size] > 0)]
        return _interval(found.groupby("seed", sort=False)[name].mean())

    def vanishing(self, variant: str, which: str = "kl") -> tuple[int, int]:
        """In how many measurements the term's expected gradient was not told from 0, and of how many."""
        size, cosine = f"{which}_gradient_size_low", f"{which}_gradient_cosine"
        found = select(self.rows, variant=variant)
        if size not in found:
            return 0, 0
        measured = found[found[size].notna()]
        without = measured[cosine].isna() if cosine in measured else True
        return int(((measured[size] <= 0) | without).sum()), len(measured)

    def over_k1_in_reward(self, variant: str) -> Interval:
        """Return KL at the end over that of k1 in the reward with the same seed and β, after a mean over β."""
        logs: dict[int, list[float]] = {}
        for beta in self.betas(variant):
            ones, others = self.ends(variant, beta), self.ends("k1-reward", beta)
            for seed in ones.keys() & others.keys():
                logs.setdefault(seed, []).append(math.log(ones[seed] / others[seed]))
        return _interval(float(np.mean(each)) for each in logs.values()).mapped(math.exp)

    def gained(self) -> Interval:
        """Return the reward gained under the three penalties and the smaller coefficients, after a mean by seed."""
        index = self.ended.index
        mine = index.get_level_values("variant").isin(PENALTIES) & (index.get_level_values("beta") < 1)
        return _interval(self.ended[mine]["gain"].groupby("seed", sort=False).mean())

    def slope(self, variant: str) -> Interval:
        """Return the slope of log KL against log β, over seeds."""
        betas = self.betas(variant)
        ended = [self.ends(variant, beta) for beta in betas]
        require(len(betas) >= 3)
        x = np.log(betas)
        return _interval(
            float(np.polyfit(x, np.log([one[seed] for one in ended]), 1)[0])
            for seed in sorted(set.intersection(*map(set, ended)))
        )

    def shortfall(self, variant: str, beta: float) -> Interval:
        """Return by how much a run's objective E[R] − β·KL is below that of π*, over seeds."""
        best, ended = (self.ends(one, beta, "objective") for one in (OPTIMUM, variant))
        return _interval(best[seed] - ended[seed] for seed in sorted(best.keys() & ended.keys()))


def _interval(values: Iterable[float]) -> Interval:
    found = list(values)
    require(len(found) >= 2)
    return interval(found)


def _paired(ones: Mapping[int, float], others: Mapping[int, float], level: float = 0.95) -> Interval:
    found = paired(ones, others, level)
    require(found is not None)
    return found


def _each(found: Mapping[str, Interval]) -> str:
    return "; ".join(f"{name}: {one.text()}" for name, one in found.items())


# Findings: of the rows of one part.
@findings.add(OWN, "a KL beyond half a nat", SEEDS)
def _leaves(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """without a KL term the policy leaves its reference"""
    kl = geometric(list(sweep.ends("none", 0.0).values())) if len(sweep.ends("none", 0.0)) > 1 else None
    require(kl is not None)
    return f"{kl.text()} nats", kl.low > 0.5


@findings.add(OWN, "above 0, over three penalties", SEEDS)
def _rises(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """with a penalty of β below 1 held-out rewards rise"""
    found = sweep.gained()
    return f"up by {found.text()}", found.low > 0


def _holds(rows: pd.DataFrame, sweep: Sweep, variants: tuple[str, ...] = PENALTIES, name: str = "kl") -> Answer:
    found = {variant: sweep.against_none(variant, name=name) for variant in variants}
    return _each(found), all(one.high < 1 for one in found.values())


findings.add(TANG_MUNOS, "KL below that of no term with the same seed", SEEDS,
    claim="k1 in the reward, k2 and k3 in the loss hold the policy back at the largest β")(_holds)  # fmt: skip


@findings.add(THEORY, "log KL falls with log β", SEEDS)
def _falls(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """they hold it back the more the larger β is"""
    found = {variant: sweep.slope(variant) for variant in PENALTIES}
    return _each(found), all(one.high < 0 for one in found.values())


@findings.add(THEORY, f"KL within a factor of {ALIKE:g} of that of k1 in the reward", SEEDS)
def _alike(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """they buy about the same KL with the same β, so near the reference"""
    found = {variant: sweep.over_k1_in_reward(variant) for variant in ("k2-loss", "k3-loss")}
    return _each(found), all(one.low > 1 / ALIKE and one.high < ALIKE for one in found.values())


def _unregularised(rows: pd.DataFrame, sweep: Sweep, name: str = "kl") -> Answer:
    """At no β below none; all of them asked at once, so each at a higher level."""
    betas, ratios = sweep.betas("k1-loss"), {}
    for beta in betas:
        try:
            ratios[f"β {beta:g}"] = sweep.against_none("k1-loss", beta, 1 - 0.05 / len(betas), name)
        except Missing:
            continue
    require(len(ratios) >= 2)
    return _each(ratios), all(one.high >= 1 for one in ratios.values())


findings.add(f"{TANG_MUNOS}; {THEORY}", "KL over that of no term: at no β below 1", f"{SEEDS}, Bonferroni over β",
    claim="k1 in the loss does not regularise")(_unregularised)  # fmt: skip


@findings.add("coefficients", "at the largest β the KL is above that of no term", SEEDS)
def _carries_off(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """its noise carries the policy off"""
    found = sweep.against_none("k1-loss")
    return f"{found.text(1)} times, β {sweep.largest('k1-loss'):g}", found.low > 1


@findings.add(THEORY, "in at least 80 % of its measurements, of k1 in the reward in less than half",
    "two jackknife errors")  # fmt: skip
def _vanishes(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """the expected gradient of k1 in the loss is not told from zero where that of k1 in the reward is"""
    (zero, measured), (missed, of) = (sweep.vanishing(variant) for variant in ("k1-loss", "k1-reward"))
    require(measured and of)
    said = f"{zero} of {measured}; of k1 in the reward {missed} of {of}"
    return said, zero >= 0.8 * measured and missed < 0.5 * of


def _cosine(
    rows: pd.DataFrame, sweep: Sweep, variant: str, low: float, high: float = 1.05, name: str = "kl_gradient_cosine", *,
    reaches_one: bool = False,
) -> Answer:  # fmt: skip
    """Judge if the whole interval of the cosine lies between two bounds, or above the lower one and around 1."""
    found = sweep.gradients(variant, name)
    return found.text(3), low < found.low and (found.low < 1 < found.high if reaches_one else found.high < high)


STALE = "stale_gradient_cosine"
for _claim, _source, _expected, _judge in (
    ("k1 in the reward follows ∇KL(π‖ref)", THEORY, "cosine within 0.05 of 1",
     partial(_cosine, variant="k1-reward", low=0.95)),
    ("what k2 in the loss misses through later tokens is hardly anything here", OWN, "cosine within 0.05 of 1",
     partial(_cosine, variant="k2-loss", low=0.95)),
    ("that k3 in the loss follows another direction is not told here", OWN, "cosine above 0.8, its interval reaches 1",
     partial(_cosine, variant="k3-loss", low=0.8, reaches_one=True)),
    ("k3 with its ratio follows the same direction as k2 in the loss", THEORY, "cosine within 0.05 of 1",
     partial(_cosine, variant="stale:k3-ratio", low=0.95)),
    ("on stale rollouts k3 with its ratio is not told from this direction", THEORY,
     "cosine above 0.9, its interval reaches 1",
     partial(_cosine, variant="stale:k3-ratio", low=0.9, name=STALE, reaches_one=True)),
    ("k2 in the loss, without a ratio, turns away there", THEORY, "cosine on stale rollouts below 1",
     partial(_cosine, variant="stale:k2-loss", low=-1.0, high=1.0, name=STALE)),
    ("k3 with its ratio holds the policy back with a stale sampler", "DeepSeek-V3.2", "KL below that of no term",
     partial(_holds, variants=("stale:k3-ratio",))),
    ("where it was never trained, on longer numbers, the penalties hold the policy back as well", OWN,
     "KL there below that of no term, largest β", partial(_holds, name=ELSEWHERE_KL)),
):  # fmt: skip
    findings.add(_source, _expected, SEEDS, claim=_claim)(_judge)

findings.add(OWN, "KL there over that of no term: at no β below 1", f"{SEEDS}, Bonferroni over β",
    claim="k1 in the loss does not hold it back there")(partial(_unregularised, name=ELSEWHERE_KL))  # fmt: skip


@findings.add("theory", "E[R] − β·KL of π* less that of the run: not below 0", SEEDS)
def _below_optimum(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """no run does better than π* of its coefficient"""
    betas = sweep.betas(OPTIMUM)
    found = {f"{variant}, β {beta:g}": sweep.shortfall(variant, beta) for variant in PENALTIES for beta in betas}
    require(found)
    return _each(found), all(one.high > 0 for one in found.values())


@findings.add(OWN, "E[R] − β·KL of the reference less that of the run: above 0", SEEDS)
def _loses(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """at the largest β training ends with a smaller objective than its reference has"""
    found = {variant: sweep.spread(variant, sweep.largest(PENALTIES[0]), "lost") for variant in PENALTIES}
    return _each(found), all(one.low > 0 for one in found.values())


@findings.add(OWN, "intervals do not overlap", SEEDS)
def _slow(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """with an eighth of the learning rate k1 in the reward loses less"""
    slow, fast = (sweep.spread(variant, sweep.largest(SLOW), "lost") for variant in (SLOW, SLOW.partition(":")[2]))
    return f"{slow.text(3)}, at the full rate {fast.text(3)}", slow.high < fast.low


@findings.add(OWN, "what it loses is above 0", SEEDS)
def _with_baseline(rows: pd.DataFrame, sweep: Sweep) -> Answer:
    """with a baseline on the penalty it loses, too"""
    found = sweep.spread(CENTRED, sweep.largest(CENTRED), "lost")
    return found.text(3), found.low > 0


def claims(rows: Rows) -> list[Claim]:
    """Judge if runs made now are as the committed ones, then the findings."""
    date = f", {COMMITTED['date']}" if COMMITTED else ""
    found = of_now(rows) + findings(rows, Sweep(rows, "committed"), suffix=f" (committed results{date})")
    # Whether the sweep was run again as it was committed.
    if set(runs(rows, "committed")) <= set(runs(rows, "run")) != set():
        found += findings(rows, Sweep(rows, "run"), suffix=" (run again)")
    return found


@of_now.add(OWN, "the same, or no farther from the committed ones than another seed",
    f"{ELSEWHERE:.0%} prediction interval of the committed seeds, KL and reward")  # fmt: skip
def _as_committed(rows: pd.DataFrame) -> Answer:
    """runs made now end where the committed runs of their settings did"""
    committed, now, sweep = runs(rows, "committed"), runs(rows, "run"), Sweep(rows, "committed")
    same, outside, off = 0, [], []
    for (variant, beta, seed), own in now.items():
        before = committed.get((variant, beta, seed))
        # By the same settings, which rows carry with them.
        if before is None or any(before[-1][name] != own[-1][name] for name in PARTS["run"]):
            continue
        off.append(abs(own[-1]["kl"] / before[-1]["kl"] - 1))
        if all(one.get(name) == other.get(name) for one, other in zip(own, before, strict=False) for name in MEASURES):
            same += 1
        elif not all(_near(own[-1][name], list(sweep.ends(variant, beta, name).values())) for name in MEASURES):
            outside.append(f"{variant}, β {beta:g}, seed {seed}")
    require(off)
    said = f"{same} of {len(off)} identical, KLs at most {max(off):.1%} apart"
    return said + (f"; outside: {'; '.join(outside)}" if outside else ""), len(outside) <= 0.02 * len(off)


def _near(value: float, others: Sequence[float]) -> bool:
    reach = t.ppf((1 + ELSEWHERE) / 2, len(others) - 1) * np.std(others, ddof=1) * math.sqrt(1 + 1 / len(others))
    return bool(abs(value - np.mean(others)) <= reach)


@of_now.add(TANG_MUNOS, "KL of k1 in the reward below those of no term and of k1 in the loss",
    "95 % intervals over rollouts do not overlap")  # fmt: skip
def _now(rows: pd.DataFrame) -> Answer:
    """in runs made now k1 in the reward holds the policy back and k1 in the loss does not"""
    # Of the smallest seed and the largest β that there are.
    ended = Sweep(rows, "run").ended.reset_index()
    ended = need(ended, seed=ended["seed"].min()).sort_values("beta").groupby("variant").tail(1).set_index("variant")
    names = ("none", "k1-reward", "k1-loss")
    require(set(names) <= set(ended.index))
    low = ended["kl_low"]
    said = ", ".join(f"{name} {ended['kl'][name]:.2f}" for name in names)
    return said, ended["kl_high"]["k1-reward"] < min(low["none"], low["k1-loss"])


def tables(rows: Rows) -> dict[str, list[Row]]:
    """Runs made now as sweep.csv keeps them; KL and reward by coefficient; gradients by term."""
    usual = {"part": "run", **SAME}
    made = [{name: it for name, it in row.items() if usual.get(name) != it} for row in records(select(rows, "run"))]
    sweep, at_ends, followed = Sweep(rows, "committed"), [], []
    columns = sorted(sweep.rows.loc[sweep.rows["beta"] > 0, "beta"].unique()) if len(sweep.rows) else []
    for variant in VARIANTS if columns else ():
        line: Row = {"KL term": variant}
        for beta in columns:
            at = 0.0 if VARIANTS[variant].get("kl") == "none" else beta
            kls = list(sweep.ends(variant, at).values())
            repeated = at != beta and beta != columns[0]
            line[f"β = {beta:g}"] = "" if repeated or not kls else geometric(kls).text()
        at_ends.append(line)
        (zero, measured), lost = sweep.vanishing(variant), sweep.vanishing(variant, "stale")
        if not measured:
            continue
        told = zero <= measured / 2
        stale = _text(sweep, variant, STALE, 3)
        followed.append(
            {
                "KL term": variant,
                "cosine": _text(sweep, variant, "kl_gradient_cosine", 3) if told else "",
                "length": _text(sweep, variant, "kl_gradient_size", 2) if told else "",
                "not told from 0": f"{zero} of {measured}",
                "cosine, stale": stale,
                "not told, stale": "{} of {}".format(*lost) if stale else "",
                "noise": f"{_noise(sweep, variant):.1f}",
            }
        )
    return {name: table for name, table in (("sweep", made), ("ends", at_ends), ("gradients", followed)) if table}


def _text(sweep: Sweep, variant: str, name: str, digits: int) -> str:
    try:
        return sweep.gradients(variant, name).text(digits)
    except Missing:
        return ""


def _noise(sweep: Sweep, variant: str) -> float:
    """Median over measurements."""
    return float(need(sweep.rows, variant=variant)["kl_gradient_noise"].median())


def _with_bounds(quantity: str, found: Interval, **where: Any) -> Cited:
    """Yield a mean, and the ends of its interval as the same quantity with a bound."""
    yield number(quantity, found.mean, **where)
    for bound, value in (("low", found.low), ("high", found.high)):
        yield number(quantity, value if math.isfinite(value) else None, **where, bound=bound)


def _perhaps(quantity: str, of: Callable[[], Interval], **where: Any) -> Cited:
    """Yield an interval with its bounds; nothing if its runs are not there."""
    try:
        yield from _with_bounds(quantity, of(), **where)
    except Missing:
        return


@numbers.add
def _of_the_sweep(rows: pd.DataFrame) -> Cited:
    ended = Sweep(rows, "committed").ended.reset_index()
    stale = ended[ended["variant"].str.startswith("stale:")]
    fell = ended[ended["reward_held_out"] < COLLAPSED * ended["start"]]["variant"]
    for name, value in COMMITTED.items():
        yield number(name, value)
    yield number("runs", (ended["variant"] != OPTIMUM).sum())
    yield number("seeds", ended["seed"].nunique())
    yield number("rollouts of a chance", ROLLOUTS)
    yield number("longest", RUN["max_norm"])
    yield number("warm-up", RUN["warmup"])
    yield number("collapsed", len(fell))
    yield number("collapsed", (fell == "k1-loss").sum(), variant="k1-loss")
    yield number("collapsed, stale", fell.str.startswith("stale:").sum())
    yield number("stale runs", len(stale))
    yield number("stale runs that fell", (stale["gain"] < 0).sum())
    yield number("betas", ", ".join(f"{beta:g}" for beta in sorted(ended["beta"].unique()) if beta))
    yield number("beta of gradients", BETA_OF_GRADIENTS)


@numbers.add
def _of_ends(rows: pd.DataFrame) -> Cited:
    sweep = Sweep(rows, "committed")
    for variant, beta in sweep.settings:
        where = {"variant": variant, "beta": beta}
        for name, label in (("kl", "kl"), ("reward_held_out", "reward"), (ELSEWHERE_KL, "kl elsewhere")):
            if values := list(sweep.ends(variant, beta, name).values()):
                yield from _with_bounds(label, (interval if label == "reward" else geometric)(values), **where)
        yield from _with_bounds("gain", interval(list(sweep.ends(variant, beta, "gain").values())), **where)
        if VARIANTS[variant].get("kl", "none") == "none":
            continue
        for label, of in (
            ("kl over none", partial(sweep.against_none, variant, beta)),
            ("kl elsewhere over none", partial(sweep.against_none, variant, beta, name=ELSEWHERE_KL)),
            ("shortfall", partial(sweep.shortfall, variant, beta)),
            ("loss", partial(sweep.spread, variant, beta, "lost")),
            ("kl over optimum", partial(_paired, sweep.ends(variant, beta), sweep.ends(OPTIMUM, beta))),
        ):
            yield from _perhaps(label, of, **where)


@numbers.add
def _of_gradients(rows: pd.DataFrame) -> Cited:
    sweep = Sweep(rows, "committed")
    for variant in VARIANTS:
        zero, measured = sweep.vanishing(variant)
        if measured:
            yield number("told", measured - zero, variant=variant)
            yield number("measured", measured, variant=variant)
        for quantity, name in (("cosine", "kl_gradient_cosine"), ("size", "kl_gradient_size"), ("stale cosine", STALE)):
            yield from _perhaps(quantity, partial(sweep.gradients, variant, name), variant=variant)


@numbers.add
def _of_comparisons(rows: pd.DataFrame) -> Cited:
    sweep = Sweep(rows, "committed")
    yield from _with_bounds("gain of small penalties", sweep.gained())
    yield from _with_bounds("slope", sweep.slope("k1-reward"), variant="k1-reward")
    fall = interval([-gain for gain in sweep.ends("stale:none", 0.0, "gain").values()])
    yield from _with_bounds("fall", fall, variant="stale:none", beta=0.0)
    for variant in ("k2-loss", "k3-loss"):
        yield from _with_bounds("kl over k1-reward", sweep.over_k1_in_reward(variant), variant=variant)
    yield from _with_bounds("reward of the reference", sweep.spread("none", 0.0, "start"))
