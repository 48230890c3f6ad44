"""What became of a language model under each KL term: claims, tables and the numbers that the paper cites.

Findings are asked of the committed sweep, and of a sweep made now where there is a whole one; runs made now are
compared with the committed ones one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import t

from kltest.reproduce import Claim

from ..judging import Answer, Question, answers
from .optimum import ROLLOUTS
from .settings import ARMS, BETA_OF_GRADIENTS, COMMITTED, OPTIMUM, PARTS, RUN
from .spread import Interval, geometric, interval, paired

Row = dict[str, Any]
NAME = "finetune"
OWN = "this work"
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


def tidy(rows: Sequence[Row]) -> list[Row]:
    """Runs made now, then committed ones, each in the order of the sweep."""
    parts, arms = list(PARTS), list(ARMS)
    return sorted(rows, key=lambda r: (parts.index(r["part"]), arms.index(r["arm"]), r["beta"], r["seed"], r["update"]))


def runs(rows: Sequence[Row], part: str) -> dict[tuple[str, float, int], list[Row]]:
    """The rows of each run, by arm, coefficient and seed."""
    found: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault((row["arm"], row["beta"], row["seed"]), []).append(row)
    return found


def ends(rows: Sequence[Row], part: str, arm: str, beta: float, name: str = "kl") -> dict[int, float]:
    """By seed: a metric when training ended."""
    found = runs(rows, part)
    return {
        seed: own[-1][name] for (one, at, seed), own in found.items() if (one, at) == (arm, beta) and name in own[-1]
    }


def gains(rows: Sequence[Row], part: str, arm: str, beta: float) -> dict[int, float]:
    """By seed: held-out reward at the end less that of the reference."""
    name = "reward_held_out"
    return {
        seed: own[-1][name] - own[0][name]
        for (one, at, seed), own in runs(rows, part).items()
        if (one, at) == (arm, beta)
    }


def betas(rows: Sequence[Row], part: str, arm: str) -> list[float]:
    return sorted({row["beta"] for row in rows if (row["part"], row["arm"]) == (part, arm)})


def gradients(rows: Sequence[Row], part: str, arm: str, name: str) -> Interval | None:
    """A measurement of the arm's gradient along its runs: over seeds, after a mean within each.

    Plain means: errors grow with lengths and shrink towards a cosine of 1, so that weights would choose the answer.
    """
    by_seed: dict[int, list[float]] = {}
    size = f"{name.rpartition('_')[0]}_size_low"
    for row in rows:
        if (row["part"], row["arm"]) == (part, arm) and name in row and row.get(size, 0) > 0:
            by_seed.setdefault(row["seed"], []).append(row[name])
    return interval([float(np.mean(each)) for each in by_seed.values()]) if len(by_seed) > 1 else None


# Findings: of the rows of one part.


def _leaves(part: str, rows: Sequence[Row]) -> Answer:
    ended = list(ends(rows, part, "none", 0.0).values())
    if len(ended) < 2:
        return None
    kl = geometric(ended)
    return f"{kl.text()} nats", kl.low > 0.5


def _gained(part: str, rows: Sequence[Row]) -> Interval | None:
    """Reward gained under the three penalties and the smaller coefficients, over seeds after a mean for each."""
    by_seed: dict[int, list[float]] = {}
    for arm in PENALTIES:
        for beta in betas(rows, part, arm):
            if beta < 1:
                for seed, gain in gains(rows, part, arm, beta).items():
                    by_seed.setdefault(seed, []).append(gain)
    return interval([float(np.mean(each)) for each in by_seed.values()]) if len(by_seed) > 1 else None


def _rises(part: str, rows: Sequence[Row]) -> Answer:
    found = _gained(part, rows)
    return (f"up by {found.text()}", found.low > 0) if found else None


def over_k1_in_reward(rows: Sequence[Row], part: str, arm: str) -> Interval | None:
    """KL at the end over that of k1 in the reward with the same seed and β; over seeds, after a mean over β."""
    logs: dict[int, list[float]] = {}
    for beta in betas(rows, part, arm):
        ones, others = ends(rows, part, arm, beta), ends(rows, part, "k1-reward", beta)
        for seed in ones.keys() & others.keys():
            logs.setdefault(seed, []).append(math.log(ones[seed] / others[seed]))
    return interval([float(np.mean(each)) for each in logs.values()]).mapped(math.exp) if len(logs) > 1 else None


def _alike(part: str, rows: Sequence[Row]) -> Answer:
    found = {arm: over_k1_in_reward(rows, part, arm) for arm in ("k2-loss", "k3-loss")}
    known = {arm: one for arm, one in found.items() if one is not None}
    if len(known) < len(found):
        return None
    return _each(known), all(one.low > 1 / ALIKE and one.high < ALIKE for one in known.values())


def _against_none(
    part: str, rows: Sequence[Row], arm: str, beta: float | None = None, level: float = 0.95, name: str = "kl"
) -> Interval | None:
    """KL at the end over that of the unpenalised run of the same seed."""
    known = betas(rows, part, arm)
    if not known:
        return None
    none = "stale:none" if ARMS[arm].get("inner_epochs", 1) > 1 else "none"
    at = known[-1] if beta is None else beta
    return paired(ends(rows, part, arm, at, name), ends(rows, part, none, 0.0, name), level)


def _holds(part: str, rows: Sequence[Row], arms: Sequence[str], name: str = "kl") -> Answer:
    found = {arm: _against_none(part, rows, arm, name=name) for arm in arms}
    if any(one is None for one in found.values()):
        return None
    known = {arm: one for arm, one in found.items() if one is not None}
    return _each(known), all(one.high < 1 for one in known.values())


def _slope(part: str, rows: Sequence[Row], arm: str) -> Interval | None:
    """Of log KL against log β, over seeds."""
    known = betas(rows, part, arm)
    ended = [ends(rows, part, arm, beta) for beta in known]
    seeds = set.intersection(*(set(one) for one in ended)) if ended else set()
    if len(known) < 3 or len(seeds) < 2:
        return None
    x = np.log(known)
    return interval([float(np.polyfit(x, np.log([one[seed] for one in ended]), 1)[0]) for seed in sorted(seeds)])


def _falls(part: str, rows: Sequence[Row], arms: Sequence[str]) -> Answer:
    found = {arm: _slope(part, rows, arm) for arm in arms}
    known = {arm: one for arm, one in found.items() if one is not None}
    if len(known) < len(arms):
        return None
    return _each(known), all(one.high < 0 for one in known.values())


def _unregularised(part: str, rows: Sequence[Row], name: str = "kl") -> Answer:
    """At no β below none; all of them asked at once, so each at a higher level."""
    known = betas(rows, part, "k1-loss")
    level = 1 - 0.05 / max(len(known), 1)
    found = {f"β {beta:g}": _against_none(part, rows, "k1-loss", beta, level, name) for beta in known}
    ratios = {name: one for name, one in found.items() if one is not None}
    if len(ratios) < 2:
        return None
    return _each(ratios), all(one.high >= 1 for one in ratios.values())


def _carries_off(part: str, rows: Sequence[Row]) -> Answer:
    known = betas(rows, part, "k1-loss")
    found = _against_none(part, rows, "k1-loss") if known else None
    return (f"{found.text(1)} times, β {known[-1]:g}", found.low > 1) if found else None


def _reaches_one(part: str, rows: Sequence[Row], arm: str, low: float, name: str) -> Answer:
    found = gradients(rows, part, arm, name)
    return (found.text(3), low < found.low < 1 < found.high) if found else None


def objectives(rows: Sequence[Row], part: str, arm: str, beta: float) -> dict[int, float]:
    """By seed: E[R] − β·KL when training ended."""
    kl = ends(rows, part, arm, beta)
    return {seed: reward - beta * kl[seed] for seed, reward in ends(rows, part, arm, beta, "reward_held_out").items()}


def shortfall(rows: Sequence[Row], part: str, arm: str, beta: float) -> Interval | None:
    """By how much a run's objective E[R] − β·KL is below that of π*, over seeds."""
    best, ended = (objectives(rows, part, one, beta) for one in (OPTIMUM, arm))
    common = sorted(best.keys() & ended.keys())
    return interval([best[seed] - ended[seed] for seed in common]) if len(common) > 1 else None


def lost(rows: Sequence[Row], part: str, arm: str, beta: float) -> Interval | None:
    """The objective E[R] − β·KL of the reference less that of a run at its end, over seeds."""
    kl = ends(rows, part, arm, beta)
    found = [beta * kl[seed] - gain for seed, gain in gains(rows, part, arm, beta).items()]
    return interval(found) if len(found) > 1 else None


def _loses(part: str, rows: Sequence[Row]) -> Answer:
    """At the largest β."""
    known = betas(rows, part, PENALTIES[0])
    found = {arm: lost(rows, part, arm, known[-1]) for arm in PENALTIES if known}
    told = {arm: one for arm, one in found.items() if one is not None}
    return (_each(told), all(one.low > 0 for one in told.values())) if len(told) == len(PENALTIES) else None


def _slow(part: str, rows: Sequence[Row]) -> Answer:
    known = betas(rows, part, SLOW)
    slow, fast = (lost(rows, part, arm, known[-1]) if known else None for arm in (SLOW, SLOW.partition(":")[2]))
    if slow is None or fast is None:
        return None
    return f"{slow.text(3)}, at the full rate {fast.text(3)}", slow.high < fast.low


def _with_baseline(part: str, rows: Sequence[Row]) -> Answer:
    known = betas(rows, part, CENTRED)
    found = lost(rows, part, CENTRED, known[-1]) if known else None
    return (found.text(3), found.low > 0) if found else None


def _below_optimum(part: str, rows: Sequence[Row]) -> Answer:
    found = {
        f"{arm}, β {beta:g}": shortfall(rows, part, arm, beta)
        for arm in PENALTIES
        for beta in betas(rows, part, OPTIMUM)
    }
    known = {name: one for name, one in found.items() if one is not None}
    if len(known) < len(found) or not known:
        return None
    return _each(known), all(one.high > 0 for one in known.values())


def _within(
    part: str, rows: Sequence[Row], arm: str, low: float, high: float, name: str = "kl_gradient_cosine"
) -> Answer:
    """Whether the whole interval of the cosine lies between two bounds."""
    found = gradients(rows, part, arm, name)
    return (found.text(3), low < found.low and found.high < high) if found else None


def vanishing(rows: Sequence[Row], part: str, arm: str, which: str = "kl") -> tuple[int, int]:
    """In how many measurements the term's expected gradient was not told from 0, and of how many."""
    name = f"{which}_gradient"
    measured = [row for row in rows if (row["part"], row["arm"]) == (part, arm) and f"{name}_size" in row]
    return sum(row[f"{name}_size_low"] <= 0 or f"{name}_cosine" not in row for row in measured), len(measured)


def _vanishes(part: str, rows: Sequence[Row]) -> Answer:
    zero, measured = vanishing(rows, part, "k1-loss")
    told = vanishing(rows, part, "k1-reward")
    if not measured or not told[1]:
        return None
    words = f"{zero} of {measured}; of k1 in the reward {told[0]} of {told[1]}"
    return words, zero >= 0.8 * measured and told[0] < 0.5 * told[1]


def _each(found: Mapping[str, Interval]) -> str:
    return "; ".join(f"{name}: {one.text()}" for name, one in found.items())


SEEDS = "95 % intervals over seeds, Student's t"
Finding = tuple[str, str, str, Callable[[str, Sequence[Row]], Answer], str]
FINDINGS: tuple[Finding, ...] = (
    ("without a KL term the policy leaves its reference", OWN, "a KL beyond half a nat", _leaves, SEEDS),
    ("with a penalty of β below 1 held-out rewards rise", OWN, "above 0, over three penalties", _rises, SEEDS),
    ("k1 in the reward, k2 and k3 in the loss hold the policy back at the largest β", TANG_MUNOS,
     "KL below that of no term with the same seed", partial(_holds, arms=PENALTIES), SEEDS),
    ("they hold it back the more the larger β is", THEORY, "log KL falls with log β", partial(_falls, arms=PENALTIES),
     SEEDS),
    ("they buy about the same KL with the same β, so near the reference", THEORY,
     f"KL within a factor of {ALIKE:g} of that of k1 in the reward", _alike, SEEDS),
    ("k1 in the loss does not regularise", f"{TANG_MUNOS}; {THEORY}", "KL over that of no term: at no β below 1",
     _unregularised, f"{SEEDS}, Bonferroni over β"),
    ("its noise carries the policy off", "coefficients", "at the largest β the KL is above that of no term",
     _carries_off, SEEDS),
    ("the expected gradient of k1 in the loss is not told from zero where that of k1 in the reward is", THEORY,
     "in at least 80 % of its measurements, of k1 in the reward in less than half", _vanishes,
     "two jackknife errors"),
    ("k1 in the reward follows ∇KL(π‖ref)", THEORY, "cosine within 0.05 of 1",
     partial(_within, arm="k1-reward", low=0.95, high=1.05), SEEDS),
    ("what k2 in the loss misses through later tokens is hardly anything here", OWN, "cosine within 0.05 of 1",
     partial(_within, arm="k2-loss", low=0.95, high=1.05), SEEDS),
    ("that k3 in the loss follows another direction is not told here", OWN, "cosine above 0.8, its interval reaches 1",
     partial(_reaches_one, arm="k3-loss", low=0.8, name="kl_gradient_cosine"), SEEDS),
    ("k3 with its ratio follows the same direction as k2 in the loss", THEORY, "cosine within 0.05 of 1",
     partial(_within, arm="stale:k3-ratio", low=0.95, high=1.05), SEEDS),
    ("on stale rollouts k3 with its ratio is not told from this direction", THEORY,
     "cosine above 0.9, its interval reaches 1",
     partial(_reaches_one, arm="stale:k3-ratio", low=0.9, name="stale_gradient_cosine"), SEEDS),
    ("k2 in the loss, without a ratio, turns away there", THEORY, "cosine on stale rollouts below 1",
     partial(_within, arm="stale:k2-loss", low=-1.0, high=1.0, name="stale_gradient_cosine"), SEEDS),
    ("k3 with its ratio holds the policy back with a stale sampler", "DeepSeek-V3.2", "KL below that of no term",
     partial(_holds, arms=("stale:k3-ratio",)), SEEDS),
    ("where it was never trained, on longer numbers, the penalties hold the policy back as well", OWN,
     "KL there below that of no term, largest β", partial(_holds, arms=PENALTIES, name=ELSEWHERE_KL), SEEDS),
    ("k1 in the loss does not hold it back there", OWN, "KL there over that of no term: at no β below 1",
     partial(_unregularised, name=ELSEWHERE_KL), f"{SEEDS}, Bonferroni over β"),
    ("no run does better than π* of its coefficient", "theory", "E[R] − β·KL of π* less that of the run: not below 0",
     _below_optimum, SEEDS),
    ("at the largest β training ends with a smaller objective than its reference has", OWN,
     "E[R] − β·KL of the reference less that of the run: above 0", _loses, SEEDS),
    ("with an eighth of the learning rate k1 in the reward loses less", OWN, "intervals do not overlap", _slow, SEEDS),
    ("with a baseline on the penalty it loses, too", OWN, "what it loses is above 0", _with_baseline, SEEDS),
)  # fmt: skip


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Whether runs made now are as the committed ones, then the findings."""
    questions = [
        Question("runs made now end where the committed runs of their settings did", OWN,
                 "the same, or no farther from the committed ones than another seed",
                 _as_committed, f"{ELSEWHERE:.0%} prediction interval of the committed seeds, KL and reward"),
        Question("in runs made now k1 in the reward holds the policy back and k1 in the loss does not", TANG_MUNOS,
                 "KL of k1 in the reward below those of no term and of k1 in the loss", _now,
                 "95 % intervals over rollouts do not overlap"),
    ]  # fmt: skip
    for part, where in (("committed", _made()), ("run", "run again")):
        if part == "run" and not _whole(rows):
            continue
        for claim, source, expected, judge, tolerance in FINDINGS:
            questions.append(Question(f"{claim} ({where})", source, expected, partial(judge, part), tolerance))
    return answers(NAME, questions, rows)


def _made() -> str:
    return f"committed results, {COMMITTED['date']}" if COMMITTED else "committed results"


def _whole(rows: Sequence[Row]) -> bool:
    """Whether the sweep was run again as it was committed."""
    return set(runs(rows, "committed")) <= set(runs(rows, "run")) != set()


def _as_committed(rows: Sequence[Row]) -> Answer:
    """By the same settings, which rows carry with them."""
    committed, now = runs(rows, "committed"), runs(rows, "run")
    same, outside, compared, off = 0, [], 0, [0.0]
    for (arm, beta, seed), own in now.items():
        before = committed.get((arm, beta, seed))
        if before is None or _settings(before[-1]) != _settings(own[-1]):
            continue
        compared += 1
        off.append(abs(own[-1]["kl"] / before[-1]["kl"] - 1))
        if all(one.get(name) == other.get(name) for one, other in zip(own, before, strict=False) for name in MEASURES):
            same += 1
        elif not all(
            _near(own[-1][name], list(ends(rows, "committed", arm, beta, name).values())) for name in MEASURES
        ):
            outside.append(f"{arm}, β {beta:g}, seed {seed}")
    if not compared:
        return None
    words = f"{same} of {compared} identical, KLs at most {max(off):.1%} apart" + (
        f"; outside: {'; '.join(outside)}" if outside else ""
    )
    return words, len(outside) <= 0.02 * compared


def _near(value: float, others: Sequence[float]) -> bool:
    reach = t.ppf((1 + ELSEWHERE) / 2, len(others) - 1) * np.std(others, ddof=1) * math.sqrt(1 + 1 / len(others))
    return bool(abs(value - np.mean(others)) <= reach)


def _settings(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in PARTS["run"]}


def _now(rows: Sequence[Row]) -> Answer:
    """Of the smallest seed and the largest β that there are."""
    found = runs(rows, "run")
    last: dict[str, Row] = {}
    for (arm, _, seed), own in sorted(found.items(), key=lambda item: item[0][1]):
        if seed == min(one for *_, one in found):
            last[arm] = own[-1]
    if not {"none", "k1-reward", "k1-loss"} <= last.keys():
        return None
    words = ", ".join(f"{name} {last[name]['kl']:.2f}" for name in ("none", "k1-reward", "k1-loss"))
    return words, last["k1-reward"]["kl_high"] < min(last["none"]["kl_low"], last["k1-loss"]["kl_low"])


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Runs made now as sweep.csv keeps them; KL and reward by coefficient; gradients by term."""
    made = [{name: value for name, value in row.items() if name != "part"} for row in rows if row["part"] == "run"]
    part = "committed"
    columns = sorted({row["beta"] for row in rows if row["part"] == part and row["beta"] > 0})
    at_ends, followed = [], []
    for arm in ARMS if columns else ():
        line: Row = {"KL term": arm}
        for beta in columns:
            at = 0.0 if ARMS[arm].get("kl") == "none" else beta
            kls = list(ends(rows, part, arm, at).values())
            repeated = at != beta and beta != columns[0]
            line[f"β = {beta:g}"] = "" if repeated or not kls else geometric(kls).text()
        at_ends.append(line)
        cosine, size = (gradients(rows, part, arm, f"kl_gradient_{name}") for name in ("cosine", "size"))
        stale = gradients(rows, part, arm, "stale_gradient_cosine")
        zero, measured = vanishing(rows, part, arm)
        if measured:
            followed.append(
                {
                    "KL term": arm,
                    "cosine": "" if cosine is None or zero > measured / 2 else cosine.text(3),
                    "length": "" if size is None or zero > measured / 2 else size.text(),
                    "not told from 0": f"{zero} of {measured}",
                    "cosine, stale": "" if stale is None else stale.text(3),
                    "not told, stale": "" if stale is None else "{} of {}".format(*vanishing(rows, part, arm, "stale")),
                    "noise": f"{_noise(rows, part, arm):.1f}",
                }
            )
    return {name: table for name, table in (("sweep", made), ("ends", at_ends), ("gradients", followed)) if table}


def _noise(rows: Sequence[Row], part: str, arm: str) -> float:
    """Median over measurements."""
    return float(
        np.median(
            [row["kl_gradient_noise"] for row in rows if (row["part"], row["arm"]) == (part, arm) and
             "kl_gradient_noise" in row]
        )
    )  # fmt: skip


def collapsed(rows: Sequence[Row], part: str) -> list[tuple[str, float, int]]:
    """The runs that ended with less than half of their reference's reward."""
    return [
        one for one, own in runs(rows, part).items()
        if own[-1]["reward_held_out"] < COLLAPSED * own[0]["reward_held_out"]
    ]  # fmt: skip


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """Of the committed sweep; with `low` and `high` the ends of 95 % intervals over seeds."""
    part = "committed"
    found = runs(rows, part)
    stale = [
        gain
        for arm in ARMS
        if arm.startswith("stale:")
        for beta in betas(rows, part, arm)
        for gain in gains(rows, part, arm, beta).values()
    ]
    lowest = [arm for arm, *_ in collapsed(rows, part)]
    result: dict[str, float | int | str | None] = {
        **COMMITTED,
        "runs": sum(arm != OPTIMUM for arm, *_ in found) or None,
        "seeds": len({seed for *_, seed in found}) or None,
        "runs made now": len(runs(rows, "run")),
        "rollouts of a chance": ROLLOUTS,
        "longest": RUN["max_norm"],
        "warm-up": RUN["warmup"],
        "collapsed": len(lowest),
        "collapsed of k1-loss": lowest.count("k1-loss"),
        "collapsed, stale": sum(arm.startswith("stale:") for arm in lowest),
        "stale runs": len(stale) or None,
        "stale runs that fell": sum(gain < 0 for gain in stale),
        "betas": ", ".join(f"{beta:g}" for beta in sorted({beta for _, beta, _ in found if beta})) or None,
        "beta of gradients": BETA_OF_GRADIENTS,
    }
    for arm in ARMS:
        for beta in betas(rows, part, arm):
            for name, label in (("kl", "kl"), ("reward_held_out", "reward"), (ELSEWHERE_KL, "kl elsewhere")):
                values = list(ends(rows, part, arm, beta, name).values())
                if values:
                    mean = interval if label == "reward" else geometric
                    _put(result, f"{label} of {arm}, beta {beta:g}", mean(values))
            _put(result, f"gain of {arm}, beta {beta:g}", interval(list(gains(rows, part, arm, beta).values())))
            spread = list(ends(rows, part, arm, beta).values())
            result[f"spread of {arm}, beta {beta:g}"] = (
                float(np.std(np.log(spread), ddof=1)) if len(spread) > 1 else None
            )
            if ARMS[arm].get("kl", "none") == "none":
                continue
            for name, label in (("kl", "kl"), (ELSEWHERE_KL, "kl elsewhere")):
                if ratio := _against_none(part, rows, arm, beta, name=name):
                    _put(result, f"{label} over none of {arm}, beta {beta:g}", ratio)
            more = {
                "shortfall": shortfall(rows, part, arm, beta),
                "loss": lost(rows, part, arm, beta),
                "kl over optimum": paired(ends(rows, part, arm, beta), ends(rows, part, OPTIMUM, beta)),
            }
            for label, value in more.items():
                if value:
                    _put(result, f"{label} of {arm}, beta {beta:g}", value)
        for name in ("cosine", "size"):
            for which, label in (("kl", ""), ("stale", "stale ")):
                if measured := gradients(rows, part, arm, f"{which}_gradient_{name}"):
                    _put(result, f"{label}{name} of {arm}", measured)
        zero, total = vanishing(rows, part, arm, "stale")
        if total:
            result |= {f"stale told of {arm}": total - zero, f"stale measured of {arm}": total}
        zero, total = vanishing(rows, part, arm)
        if total:
            result |= {
                f"told of {arm}": total - zero,
                f"measured of {arm}": total,
                f"noise of {arm}": _noise(rows, part, arm),
            }
    rising, slope = _gained(part, rows), _slope(part, rows, "k1-reward")
    if rising:
        _put(result, "gain of small penalties", rising)
    if slope:
        _put(result, "slope of k1-reward", slope)
    fallen = [-gain for gain in gains(rows, part, "stale:none", 0.0).values()]
    if fallen:
        _put(result, "fall of stale:none, beta 0", interval(fallen))
    for arm in ("k2-loss", "k3-loss"):
        if ratio := over_k1_in_reward(rows, part, arm):
            _put(result, f"kl over k1-reward of {arm}", ratio)
    starts = {seed: own[0]["reward_held_out"] for (arm, _, seed), own in found.items() if arm == "none"}
    if len(starts) > 1:
        _put(result, "reward of the reference", interval(list(starts.values())))
    return result


def _put(result: dict[str, Any], name: str, found: Interval) -> None:
    bounds = {"low": found.low, "high": found.high}
    result |= {
        name: found.mean,
        **{f"{end} {name}": value if math.isfinite(value) else None for end, value in bounds.items()},
    }
