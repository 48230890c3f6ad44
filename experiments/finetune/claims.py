"""A language model trained under each KL term: claims, tables and the numbers that the paper cites.

What was predicted stands in PLAN.md. Predictions are judged by the recorded runs, of as many whole seeds as there are:
those that the runs show are claims; those that they do not show are listed beside them in the table `predictions`. Runs
made now are compared with the recorded ones of the same settings.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import pandas as pd

from kltest.reproduce.bounds import above, below, within
from kltest.reproduce.claims import OWN, Claim, Claims, Measured
from kltest.reproduce.frames import Missing, Row, Rows, frame, known, need, require, select
from kltest.reproduce.numbers import Cited, Numbers, number

from ..spread import LEVEL, Interval, geometric, interval
from . import audited
from .experiment import TABLES
from .matched import at_kl, given
from .settings import BETA, BETAS, COMMITTED, FEWEST, FRESH, JOINT, LOCAL, PARTS, STALE, TASKS, UNBIASED
from .task import EXAMPLES

TANG_MUNOS = "Tang & Munos 2025"
THEORY = "the atlas, exact"
PREFIX = STALE[0]
KEY = ["task", "variant", "beta", "seed"]
OVER_SEEDS = "95 % intervals over seeds, Student's t, paired by seed"
TOGETHER = f"{OVER_SEEDS}, Bonferroni"
PLANNED = f"{TOGETHER}; margin and statistic were chosen before the runs"
# What a run is measured by; lengths are equal where they are fixed.
MEASURED = {"reward": "reward_held_out", "gold": "gold_held_out", "length": "length_held_out"}
# What may explain a difference in the gold score beside the term.
CAUSES = {"length": ("length_held_out",), "kl": ("kl",), "length and kl": ("length_held_out", "kl")}

findings, not_shown, of_now, later = (Claims("finetune") for _ in range(4))
numbers = Numbers(list(audited.numbers.sources))


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Runs made now, then recorded ones, each in the order of the sweep; then what stands in other tables."""
    parts, tasks, variants = list(PARTS), list(TASKS), [*FRESH, *STALE, JOINT]

    def place(row: Row) -> tuple[Any, ...]:
        at = (tasks.index(row["task"]), variants.index(row["variant"]))
        return (parts.index(row["part"]), *at, row["beta"], row["seed"], row["update"])

    runs = sorted((row for row in rows if row["part"] not in TABLES), key=place)
    return frame([*runs, *(row for row in rows if row["part"] in TABLES)])


class Sweep:
    """The runs of a part, of one task or of both; what is asked of runs that are not there raises Missing."""

    def __init__(self, rows: Rows, part: str = "committed", **wanted: Any) -> None:
        self.rows = select(rows, part, **wanted)

    @cached_property
    def ended(self) -> pd.DataFrame:
        """The last row of each run, with its objective, and with reward and gold score of its start."""
        by = known(self.rows).groupby(KEY, sort=False)
        first, last = by.head(1).set_index(KEY), by.tail(1).set_index(KEY)
        objective = last["reward_held_out"] - last.index.get_level_values("beta") * last["kl"]
        before = {f"{name}_before": first[name] for name in ("gold_held_out", "reward_held_out")}
        return last.assign(objective=objective, **before).reset_index()

    @property
    def ends(self) -> pd.DataFrame:
        """The end points of terms with a coefficient and fresh rollouts."""
        return need(self.ended, variant=FRESH[1:])

    def at(self, variant: str, beta: float, name: str) -> pd.Series:
        """Return a metric at the end, by seed."""
        return need(self.ended, variant=variant, beta=beta).set_index("seed")[name]

    def gain(self, variant: str, beta: float, name: str) -> Interval:
        """Return by how much a metric of held-out prompts is larger at the end than at the start."""
        return _interval(self.at(variant, beta, name) - self.at(variant, beta, f"{name}_before"))

    def difference(self, name: str, one: str, other: str, beta: float, level: float = LEVEL) -> Interval:
        """Return one variant's metric at the end less another's, of the same seed and coefficient."""
        return _interval(self.at(one, beta, name) - self.at(other, beta, name), level)

    def over_none(self, variant: str, beta: float, level: float = LEVEL) -> Interval:
        """Return KL at the end over that of the run of the same seed without a KL term."""
        found = (self.at(variant, beta, "kl") / self.at("none", 0.0, "kl")).dropna()
        require(len(found) >= 2)
        return geometric(list(found), level)


def _interval(values: pd.Series, level: float = LEVEL) -> Interval:
    found = values.dropna()
    require(len(found) >= 2)
    return interval(list(found), level)


def _each(found: Mapping[str, Interval], digits: int = 2) -> str:
    return "; ".join(f"{name}: {one.text(digits)}" for name, one in found.items())


def _ends_of(found: Mapping[str, Interval]) -> list[float]:
    return [end for one in found.values() for end in (one.low, one.high)]


def _of_several(count: int) -> float:
    """The level of each interval with which `count` of them hold at once, 19 times in 20 (Bonferroni)."""
    return 1 - 0.05 / count


def _matched(rows: Rows, task: str, name: str) -> dict[str, Interval]:
    """Difference of k2 and k3 in the loss from k1 in the reward at equal KL."""
    ends = Sweep(rows, task=task).ends
    return {term: _interval(at_kl(ends, MEASURED[name], term), _of_several(len(LOCAL))) for term in LOCAL}


# Predictions: each is asked of the recorded runs.

for _task, _shown in (("free", not_shown), ("fixed", findings)):

    @not_shown.measure(TANG_MUNOS, TOGETHER, high_end_of_share_of_kl=below(1), task=_task, betas=BETAS)
    def _holds(rows: pd.DataFrame, task: str, betas: tuple[float, ...]) -> Measured:
        """{task} length: k1 in the reward holds the policy back, at β = {betas}: KL below that of no term"""
        sweep, level = Sweep(rows, task=task), _of_several(len(betas))
        found = {f"β {beta:g}": sweep.over_none(UNBIASED, beta, level) for beta in betas}
        return {"high_end_of_share_of_kl": [one.high for one in found.values()], "intervals": _each(found)}

    @_shown.measure(f"{TANG_MUNOS}; {THEORY}", PLANNED, low_end_of_share_of_kl=above(0.5), task=_task, beta=BETA)
    def _unregularised(rows: pd.DataFrame, task: str, beta: float) -> Measured:
        """{task} length: k1 in the loss does not hold it back, at β = {beta:g}: KL above {low_end_of_share_of_kl} of
        that of no term"""
        found = Sweep(rows, task=task).over_none("k1-loss", beta)
        return {"low_end_of_share_of_kl": found.low, "interval": found.text()}


@not_shown.measure(OWN, OVER_SEEDS, low_end_of_reward_gain=above(0), high_end_of_gold_gain=below(0))
def _over_optimised(rows: pd.DataFrame) -> Measured:
    """free length: without a KL term the reward is over-optimised: it rises, and the gold score falls below the
    reference's"""
    reward, gold = (Sweep(rows, task="free").gain("none", 0.0, MEASURED[name]) for name in ("reward", "gold"))
    return {
        "low_end_of_reward_gain": reward.low,
        "high_end_of_gold_gain": gold.high,
        "intervals": f"reward {reward.text()}, gold {gold.text()}",
    }


for _name, _shown in (("reward", not_shown), ("gold", findings)):

    @_shown.measure(OWN, PLANNED, ends_of_difference=within(-0.05, 0.05), name=_name)
    def _one_frontier(rows: pd.DataFrame, name: str) -> Measured:
        """fixed length: at equal KL the {name} under k2 and k3 in the loss is that under k1 in the reward, with
        intervals from {ends_of_difference}"""
        found = _matched(rows, "fixed", name)
        return {"ends_of_difference": _ends_of(found), "intervals": _each(found, 3)}

    @findings.measure(OWN, PLANNED, high_end_of_difference=below(0), name=_name)
    def _gap(rows: pd.DataFrame, name: str) -> Measured:
        """free length: at equal KL the {name} under k2 and k3 in the loss is below that under k1 in the reward"""
        found = _matched(rows, "free", name)
        return {"high_end_of_difference": [one.high for one in found.values()], "intervals": _each(found, 3)}


@findings.measure(OWN, PLANNED, low_end_of_difference=above(0))
def _longer(rows: pd.DataFrame) -> Measured:
    """free length: at equal KL lines are longer under k2 and k3 in the loss than under k1 in the reward"""
    found = _matched(rows, "free", "length")
    return {"low_end_of_difference": [one.low for one in found.values()], "intervals": _each(found)}


@not_shown.measure(OWN, PLANNED, ends_of_difference=within(-0.1, 0.1))
def _same_at_length(rows: pd.DataFrame) -> Measured:
    """free length: given mean length alone, the gold score under k2 and k3 in the loss is that under k1 in the reward,
    with intervals from {ends_of_difference}"""
    left = given(Sweep(rows, task="free").ends, "gold_held_out", CAUSES["length"])
    found = {term: _interval(left[term], _of_several(len(LOCAL))) for term in LOCAL}
    return {"ends_of_difference": _ends_of(found), "intervals": _each(found, 3)}


@findings.measure(OWN, PLANNED, low_end_of_remainder=above(0), share=0.5)
def _explained(rows: pd.DataFrame, share: float) -> Measured:
    """free length: given mean length and KL, less than {share:g} of the gap in the gold score at equal KL remains"""
    ends = Sweep(rows, task="free").ends
    left = given(ends, "gold_held_out", CAUSES["length and kl"])
    gaps = {term: at_kl(ends, "gold_held_out", term) for term in LOCAL}
    found = {term: _interval(left[term] - share * gap, _of_several(len(LOCAL))) for term, gap in gaps.items()}
    return {
        "low_end_of_remainder": [one.low for one in found.values()],
        "remains": _each({term: _interval(left[term]) for term in LOCAL}, 3),
        "of": _each({term: _interval(gap) for term, gap in gaps.items()}, 3),
    }


@findings.measure(OWN, PLANNED, low_end_of_difference=above(0), beta=BETA)
def _stale(rows: pd.DataFrame, beta: float) -> Measured:
    """free length: with a stale sampler k1 in the reward, with prefix ratios, reaches a better objective than with the
    ratio of the sequence and than terms of tokens, at β = {beta:g}"""
    sweep, others = Sweep(rows, task="free"), STALE[1:]
    found = {one: sweep.difference("objective", PREFIX, one, beta, _of_several(len(others))) for one in others}
    return {"low_end_of_difference": [one.low for one in found.values()], "intervals": _each(found)}


def _lacking(rows: Rows, task: str) -> pd.DataFrame:
    """Final policies of k2 in the loss, with the reward that they lack at equal KL by the theorem, to second order."""
    found = need(rows, "lacking", task=task)
    unexplained = found["kl_variance"] - found["covariance"] ** 2 / found["reward_variance"]
    return found.assign(gap=found["beta"] / 2 * unexplained)


def _by_seed(rows: Rows, task: str, name: str) -> pd.Series:
    """What final policies lack, by seed, in the mean over the coefficients at which it was measured."""
    return _lacking(rows, task).dropna(subset=[name]).groupby("seed")[name].mean()


@not_shown.measure(OWN, PLANNED, high_end_of_predicted_gap=below(0.05))
def _little_lacks(rows: pd.DataFrame) -> Measured:
    """fixed length: the reward that k2 in the loss lacks at equal KL, as the theorem predicts it from K and R of final
    policies, is below {high_end_of_predicted_gap}"""
    found = _interval(_by_seed(rows, "fixed", "gap"))
    return {"high_end_of_predicted_gap": found.high, "interval": found.text(3)}


@findings.measure(OWN, PLANNED, low_end_of_difference=above(0))
def _more_lacks(rows: pd.DataFrame) -> Measured:
    """free length: the reward that k2 in the loss lacks at equal KL, as the theorem predicts it from K and R of final
    policies, is larger than at fixed length"""
    found = _interval(_by_seed(rows, "free", "gap") - _by_seed(rows, "fixed", "gap"))
    return {"low_end_of_difference": found.low, "interval": found.text(3)}


@findings.measure(OWN, PLANNED, low_end_of_difference=above(0), beta=BETA)
def _more_is_missed(rows: pd.DataFrame, beta: float) -> Measured:
    """free length: a larger share of ∇KL(π‖ref) is missed than at fixed length where k2 in the loss ends, at
    β = {beta:g}"""
    found = _interval(_by_seed(rows, "free", "missed") - _by_seed(rows, "fixed", "missed"))
    return {"low_end_of_difference": found.low, "interval": found.text()}


@later.measure(
    OWN,
    f"{TOGETHER}; run after the planned ones, and so no prediction",
    low_end_of_difference=above(0),
    beta=BETA,
)
def _joint(rows: pd.DataFrame, beta: float) -> Measured:
    """with a stale sampler, one ratio in front of the return less its baseline reaches a better objective than each
    other stale variant at fixed length, and than each but prefix ratios at free length, at β = {beta:g}"""
    # That of prefix ratios at free length counts among the comparisons, and does not exclude zero.
    level = _of_several(len(TASKS) * len(STALE))
    found = {
        f"{task}, {one}": Sweep(rows, task=task).difference("objective", JOINT, one, beta, level)
        for task in TASKS
        for one in STALE
    }
    shown = {name: one for name, one in found.items() if name != f"free, {PREFIX}"}
    return {"low_end_of_difference": [one.low for one in shown.values()], "intervals": _each(found)}


def claims(rows: Rows) -> list[Claim]:
    """Judge the runs made now, then what the recorded runs show, predicted or not, then the audits."""
    return of_now(rows) + _judged(findings, rows) + _judged(later, rows) + audited.claims(rows)


def _judged(predictions: Claims, rows: Rows) -> list[Claim]:
    sweep = Sweep(rows)
    seeds = sweep.rows["seed"].nunique() if len(sweep.rows) else 0
    return predictions(rows if seeds >= FEWEST else [], suffix=f" ({seeds} seeds, {COMMITTED['date']})")


@of_now.measure(
    OWN,
    "another processor rounds otherwise, and a run amplifies it; then an evaluation is of other rollouts: four of its "
    "standard errors",
    ratio_of_kl=within(0.7, 1.43),
    difference_in_reward=within(-0.15, 0.15),
    difference_in_gold=within(-0.15, 0.15),
)
def _as_recorded(rows: pd.DataFrame) -> Measured:
    """runs made again end as the recorded ones: KL {ratio_of_kl} times, reward and gold score within
    {difference_in_gold}"""
    # By the same settings, which rows carry with them.
    now, before = (Sweep(frame(rows), part).ended for part in ("run", "committed"))
    both = known(now.merge(before, on=list(PARTS["run"]), suffixes=("", "_recorded")))
    return {
        "ratio_of_kl": both["kl"] / both["kl_recorded"],
        "difference_in_reward": both["reward_held_out"] - both["reward_held_out_recorded"],
        "difference_in_gold": both["gold_held_out"] - both["gold_held_out_recorded"],
        "to_the_bit": f"{(both['kl'] == both['kl_recorded']).sum()} of {len(both)}",
    }


def tables(rows: Rows) -> dict[str, list[Row]]:
    """What the recorded runs ended with, by task, variant and β; the predictions, shown or not; and the audits."""
    at_ends, predicted = [], []
    sweep = Sweep(rows)
    if len(sweep.rows):
        for one in (*_judged(findings, rows), *_judged(not_shown, rows)):
            # Without the seeds, which are those of all, and with the intervals alone.
            words, _, _ = one.claim.rpartition(" (")
            found = re.split(r"intervals?: |remains: ", one.found, maxsplit=1)[-1]
            predicted.append({"prediction": words, "shown": one.verdict.lower(), "found": found})
        for (task, variant, beta), own in sweep.ended.groupby(KEY[:3], sort=False):
            line = {"length": task, "KL term": variant, "β": f"{beta:g}" if beta else ""}
            line["KL"] = geometric(list(own["kl"])).text(1)
            for title, name in {**MEASURED, "objective": "objective"}.items():
                line["tokens" if title == "length" else title] = interval(list(own[name])).text(
                    1 if title == "length" else 2
                )
            at_ends.append(line)
    found = {"ends": at_ends, "predictions": predicted, "audits": audited.table(rows)}
    found |= {"matched": _matched_table(rows), "objectives": _objectives(rows), "lacking": _lacking_table(rows)}
    return {name: table for name, table in found.items() if table}


def _matched_table(rows: Rows) -> list[Row]:
    """Differences of k2 and k3 in the loss from k1 in the reward: at equal KL, and of gold given length and KL."""
    found: dict[tuple[str, str], Any] = {}
    try:
        for task in TASKS:
            ends = Sweep(rows, task=task).ends
            for name, column in MEASURED.items():
                # Where lengths are fixed they cannot differ.
                if (task, name) != ("fixed", "length"):
                    found[task, f"{name} at equal KL"] = {term: at_kl(ends, column, term) for term in LOCAL}
            if task == "free":
                found[task, "gold at equal length and KL"] = given(ends, "gold_held_out", CAUSES["length and kl"])
    except Missing:
        return []
    shown = {term: f"{term[:2]} in the loss" for term in LOCAL}
    return [
        {"length": task, "difference in": words} | {shown[term]: _interval(by[term]).text(2) for term in LOCAL}
        for (task, words), by in found.items()
    ]


def _objectives(rows: Rows) -> list[Row]:
    """What k2 and k3 in the loss end with of E[R] − β·KL, less what k1 in the reward does, by β."""
    found = []
    for task in TASKS:
        sweep = Sweep(rows, task=task)
        with suppress(Missing):
            for term in LOCAL:
                by = {f"β = {beta:g}": sweep.difference("objective", term, UNBIASED, beta).text(2) for beta in BETAS}
                found.append({"length": task, "objective of": f"{term[:2]} in the loss", **by})
    return found


def _lacking_table(rows: Rows) -> list[Row]:
    """Final policies of k2 in the loss: the variance of K, what it predicts, and the share that is missed."""
    found = []
    for task in TASKS:
        with suppress(Missing):
            for beta, own in _lacking(rows, task).groupby("beta"):
                line = {"length": task, "β": f"{beta:g}", "KL": geometric(list(own["kl"])).text(1)}
                line["Var K"] = geometric(list(own["kl_variance"])).text(1)
                line["reward lacking, predicted"] = interval(list(own["gap"])).text(3)
                missed = list(own["missed"].dropna())
                found.append({**line, "share missed": interval(missed).text() if missed else "–"})
    return found


@numbers.add
def _of_final_policies(rows: pd.DataFrame) -> Cited:
    for task in TASKS:
        for name, quantity in (("predicted gap", "gap"), ("missed", "missed")):
            found = _interval(_by_seed(rows, task, quantity))
            for bound, value in (("", found.mean), ("low", found.low), ("high", found.high)):
                yield number(name, value, task=task, **({"bound": bound} if bound else {}))


@numbers.add
def _of_the_sweep(rows: pd.DataFrame) -> Cited:
    ended = Sweep(rows).ended
    for name in ("date", "torch"):
        yield number(name, COMMITTED[name])
    yield number("runs", len(ended))
    yield number("seeds", ended["seed"].nunique())
    yield number("labelled completions", EXAMPLES)
    judged = [*_judged(findings, rows), *_judged(not_shown, rows)]
    yield number("predictions", len(judged))
    yield number("predictions shown", sum(one.agrees is True for one in judged))
    for (task, variant, beta), own in ended.groupby(KEY[:3], sort=False):
        where = {"task": task, "variant": variant, "beta": beta}
        yield number("length", own["length_held_out"].mean(), **where)
        best = PREFIX if variant.startswith("stale:") else UNBIASED
        if beta and variant != best:
            lost = Sweep(rows, task=task).difference("objective", best, variant, beta)
            yield number("objective lost", lost.mean, **where)


@numbers.add
def _of_comparisons(rows: pd.DataFrame) -> Cited:
    for task in TASKS:
        sweep = Sweep(rows, task=task)
        ahead = [sweep.difference("objective", JOINT, one, BETA).mean for one in STALE]
        yield number("joint step ahead of the next", min(ahead), task=task)
    ends = Sweep(rows, task="free").ends
    for term in LOCAL:
        yield number("gold lost at equal KL", -at_kl(ends, "gold_held_out", term).mean(), term=term)
        yield number("tokens more at equal KL", at_kl(ends, "length_held_out", term).mean(), term=term)
    ends = need(ends, variant=(UNBIASED, *LOCAL))
    yield number("correlation of gold and length", ends["gold_held_out"].corr(ends["length_held_out"]))
