"""Which estimators regularise as asked, at another coefficient, or not at all: claims, tables and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kltest.reproduce import Claim

from .ends import EXACT, LOCAL
from .settings import CENTRED, PARTS

Row = dict[str, Any]
NAME = "coefficients"
WORLDS = ("bandit", "sequence", "mdp")
WRONG_IN_LOSS = (*LOCAL, "k3-loss", "k3-loss-sequence")
OURS = "this work"

# Six figures of each number are kept: more than any claim needs, and rows stay small.
FIGURES = 6
DROPPED = ("steps", "learning_rate", "entropy", "reward", "predicted_reward")
# Training has settled where its β' is that of the predicted fixed point, to 1 %; from this β on it has to have.
SETTLED, CERTAIN = 0.01, 3.0
# An end is on the frontier where less than 0.5 % of what could be earned at its KL is missing; a coefficient is one
# number where no β and no world differs from it by more than 2 %: both are as far as training has settled.
ON_FRONTIER, SAME = 5e-3, 0.02
# A penalty that at the largest β of all leaves the policy where the optimum of a β ten times smaller would be.
LOOSE = 0.1
# KL(π‖π*), nats, of a run that is on its way to π* and no longer lost.
NEAR = 0.1


def tidy(rows: Sequence[Row]) -> list[Row]:
    """In the order of parts and settings; what does not apply is left out."""
    parts = list(PARTS)

    def place(row: Row) -> tuple[Any, ...]:
        words, sizes = ("world", "estimator"), ("beta", "batch_size", "seed")
        return parts.index(row["part"]), *(row.get(name, "") for name in words), *(row.get(name, 0) for name in sizes)

    found = sorted(rows, key=place)
    return [
        {
            name: _short(value)
            for name, value in row.items()
            if value is not None and not (row["part"] in ("exact", "sampled") and name in DROPPED)
        }
        for row in found
    ]


def _short(value: Any) -> Any:
    return float(f"{value:.{FIGURES - 1}e}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Held:
    """How one estimator holds the policy in one world: the coefficients β' of optima as far from the reference.

    `factor` is the geometric mean of β'/β over the ends that have settled, `spread` the factor that one standard
    deviation is, `low` and `high` the extremes, `last` that at the largest β; `by_reward` is the geometric mean of β'/β
    for the optima with the same reward instead. `kind` says what it comes to.
    """

    kind: str
    factor: float | None = None
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    last: float | None = None
    shortfall: float | None = None
    by_reward: float | None = None


KINDS = {
    "asked": "as asked",
    "scaled": "at another coefficient",
    "drifts": "at a coefficient that changes with β",
    "loose": "not: no coefficient holds it",
    "none": "not at all: as without a penalty",
    "astray": "somewhere else than predicted",
}


def held(rows: Sequence[Row], world: str, estimator: str) -> Held | None:
    """None without rows of exact training."""
    mine = _of(rows, part="exact", world=world, estimator=estimator)
    free = {(row["beta"], row["seed"]): row for row in _of(rows, part="exact", world=world, estimator="none")}
    if not mine:
        return None
    pairs = [(row, free[row["beta"], row["seed"]]) for row in mine if (row["beta"], row["seed"]) in free]
    if estimator == "none" or (pairs and all(_same(row, other) for row, other in pairs)):
        return Held("none")
    if any(row["beta"] >= CERTAIN and not settled(row) for row in mine):
        return Held("astray")
    # For what no fixed point is predicted nothing says that training is over; it may diverge, and that counts.
    ends = [row for row in mine if settled(row) and "coefficient_by_kl" in row and not row["diverged"]]
    if not ends:
        return Held("loose")
    factors = [row["coefficient_by_kl"] / row["beta"] for row in ends]
    mean, deviation = _logarithmic(factors)
    most = max(row["beta"] for row in ends)
    last = [factor for factor, row in zip(factors, ends, strict=True) if row["beta"] == most]
    by_reward = [row["coefficient_by_reward"] / row["beta"] for row in ends if "coefficient_by_reward" in row]
    numbers = {
        "factor": math.exp(mean),
        "spread": math.exp(deviation),
        "low": min(factors),
        "high": max(factors),
        "last": sum(last) / len(last),
        "shortfall": max(row["shortfall"] for row in ends),
        "by_reward": math.exp(_logarithmic(by_reward)[0]) if by_reward else None,
    }
    if any(row["diverged"] for row in mine) or sum(last) / len(last) < LOOSE:
        return Held("loose", **numbers)
    constant = all(abs(math.log(factor) - mean) < SAME for factor in factors)
    constant = constant and max(row["shortfall"] for row in ends) < ON_FRONTIER
    return Held(("asked" if abs(mean) < SAME else "scaled") if constant else "drifts", **numbers)


def _logarithmic(factors: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the logarithms."""
    logs = [math.log(factor) for factor in factors]
    mean = sum(logs) / len(logs)
    return mean, math.sqrt(sum((log - mean) ** 2 for log in logs) / max(1, len(logs) - 1))


def settled(row: Row) -> bool:
    """Also said of an end for which nothing is predicted."""
    if "predicted_kl" not in row:
        return True
    there, here = row.get("predicted_coefficient"), row.get("coefficient_by_kl")
    return there is not None and here is not None and abs(here / there - 1) < SETTLED


def _same(row: Row, other: Row) -> bool:
    return abs(row["kl"] - other["kl"]) <= 1e-6 * other["kl"] and abs(row["gain"] - other["gain"]) <= 1e-6


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [*_of_theory(rows), *_of_ends(rows), *_of_coefficients(rows), *_of_collapse(rows), *_of_noise(rows)]


def _of_theory(rows: Sequence[Row]) -> list[Claim]:
    ends = {row["estimator"]: row["kl_to_predicted"] for row in _of(rows, part="fixed-points")}
    points = {
        "the true gradient ends at π*": ("k1-reward", "k2-loss-sequence"),
        "token k2 and the exact next-token KL end at ref·exp(Q_R/β)": ("k2-loss", "full-loss"),
        "token k3 ends at β·ref/(β + V_R − Q_R)": ("k3-loss",),
        "sequence k3 ends at ref/(1 − (R − E R)/β)": ("k3-loss-sequence",),
        "k1 in the loss ends where no penalty does": ("k1-loss",),
    }
    found = [
        _claim(
            words,
            "theory",
            "KL(π‖predicted) < 1e-8",
            None if any(name not in ends for name in names) else max(ends[name] for name in names),
            lambda worst: f"{worst:.1e}",
            lambda worst: worst < 1e-8,
            "1e-8: ascent converges linearly, and has",
        )
        for words, names in points.items()
    ]
    reached = {row["estimator"]: row["kl_to_optimum"] for row in _of(rows, part="optimum")}

    def those(*names: str) -> dict[str, float] | None:
        return {name: reached[name] for name in names} if all(name in reached for name in names) else None

    def listed(kls: dict[str, float]) -> str:
        return ", ".join(f"{kl:.1e}" for kl in kls.values())

    right, wrong = ("k1-reward", "k2-loss-sequence"), ("k3-loss", "k3-loss-sequence", "k1-loss")
    return [
        *found,
        _claim(
            f"V = 5, L = 4, β = .5: {', '.join(right)} reach π*",
            "theory",
            "KL(π‖π*) < 1e-6",
            those(*right),
            listed,
            lambda kls: all(kl < 1e-6 for kl in kls.values()),
            "1e-6: theory's own",
        ),
        _claim(
            f"V = 5, L = 4, β = .5: {', '.join(wrong)} do not reach π*",
            "theory",
            "KL(π‖π*) > 1e-3",
            those(*wrong),
            listed,
            lambda kls: all(kl > 1e-3 for kl in kls.values()),
            "1e-3: a thousand times further than what reaches it",
        ),
    ]


def _of_ends(rows: Sequence[Row]) -> list[Claim]:
    ends = [row for row in _of(rows, part="exact") if "kl_to_predicted" in row and row["beta"] >= CERTAIN]
    worst = max(ends, key=lambda row: row["kl_to_predicted"] / row["predicted_kl"], default=None)
    return [
        _claim(
            "exact training ends at the predicted fixed point, in every world, for every β from 3 on",
            "theory",
            "KL(π‖predicted) < 1 % of KL(predicted‖ref)",
            worst,
            lambda row: (
                f"{row['kl_to_predicted'] / row['predicted_kl']:.1e} at most, {row['estimator']} in {row['world']}"
            ),
            lambda row: row["kl_to_predicted"] < 0.01 * row["predicted_kl"],
            "1 %: rare contexts are slow",
        )
    ]


def _of_coefficients(rows: Sequence[Row]) -> list[Claim]:
    def kinds(names: Iterable[str], worlds: Iterable[str]) -> dict[tuple[str, str], Held] | None:
        if not _swept(rows):
            return None
        found = {(name, world): held(rows, world, name) for name in names for world in worlds}
        return None if any(one is None for one in found.values()) else found  # type: ignore[return-value]

    def all_of(kind: str) -> Callable[[Any], bool]:
        return lambda found: all(one.kind == kind for one in found.values())

    def said(found: dict[tuple[str, str], Held]) -> str:
        different = dict.fromkeys(KINDS[one.kind] for one in found.values())
        return "; ".join(different) + f" ({len(found)} cells)"

    right = [name for name in EXACT if name != CENTRED]
    scaled = kinds(["length-normalised"], WORLDS[1:])
    drifting = kinds(WRONG_IN_LOSS, WORLDS[1:])
    hyperbolic = kinds(["k3-loss"], ["bandit"])
    return [
        _claim(
            f"{', '.join(right)} regularise as asked in every world",
            "theory",
            "on the frontier, at β' = β",
            kinds(right, WORLDS),
            said,
            all_of("asked"),
            f"{SAME:.0%} in β', {ON_FRONTIER:.1%} of the reward: as far as training has settled",
        ),
        _claim(
            "on one step every loss whose weight is u does so",
            "theory",
            "on the frontier, at β' = β",
            kinds([*LOCAL, "last-token", "length-normalised"], ["bandit"]),
            said,
            all_of("asked"),
            f"{SAME:.0%} in β'",
        ),
        _claim(
            "a penalty divided by the length T = 3 is on the frontier, at a third of the coefficient",
            "theory",
            "β'/β = 1/3",
            scaled,
            lambda found: ", ".join(f"{one.factor:.4f}" for one in found.values()),
            lambda found: all(one.kind == "scaled" and abs(3 * one.factor - 1) < SAME for one in found.values()),
            f"{SAME:.0%}: as far as training has settled",
        ),
        _claim(
            "k1 in the loss regularises not at all",
            "Tang & Munos 2025; theory",
            "the same end as without a penalty",
            kinds(["k1-loss"], WORLDS),
            said,
            all_of("none"),
            "1e-6 of the KL: the same gradient, added up in another order",
        ),
        _claim(
            "token k2, the exact next-token KL, token and sequence k3 have no one coefficient on sequences",
            OURS,
            "β'/β changes with β",
            drifting,
            lambda found: ", ".join(_range(name, one) for (name, world), one in found.items() if world == "mdp"),
            all_of("drifts"),
            f"more than {SAME:.0%} of change",
        ),
        _claim(
            "but all of them come to regularise as asked as β grows",
            OURS,
            "β'/β → 1",
            drifting,
            lambda found: f"{_largest(found):.1e} from 1 at the largest β",
            lambda found: _largest(found) < 2 * SAME,
            "2 %: of the order of reward/β at the largest β, and as far as training has settled",
        ),
        _claim(
            "k3 in the loss, on the bandit, holds too tight below β = .3 and too loose around β = 3",
            OURS,
            "β'/β > 1.5 at one end, < 0.95 in between",
            hyperbolic,
            lambda found: ", ".join(f"{one.low:.2f} to {one.high:.2f}" for one in found.values()),
            lambda found: all(one.high > 1.5 and one.low < 0.95 for one in found.values()),
            "the whole range of β and of worlds",
        ),
    ]  # fmt: skip


def _swept(rows: Sequence[Row]) -> bool:
    """Whether β goes from well below the rewards to well above them, as what is said of a sweep supposes."""
    betas = [row["beta"] for row in _of(rows, part="exact")]
    return bool(betas) and min(betas) <= 0.1 and max(betas) >= 300


def _range(name: str, one: Held) -> str:
    return f"{name} {one.low:.2f}–{one.high:.2f}" if one.low is not None else name


def _largest(found: dict[Any, Held]) -> float:
    return max(abs((one.last or 0.0) - 1) for one in found.values())


def _lost(row: Row) -> bool:
    """Whether a run collapsed. Where π* is almost sure itself, a run that is nearly there may have less entropy."""
    return bool(row["collapsed"] and (row["diverged"] or not row.get("kl_to_optimum", math.inf) < NEAR))


def _of_collapse(rows: Sequence[Row]) -> list[Claim]:
    exact, drawn = _of(rows, part="exact"), _of(rows, part="sampled")
    names = {"k1-loss", "k2-reward", "k3-reward", "last-token", "none"}
    rest = [row for row in exact if row["estimator"] not in (*names, "length-normalised")]
    loose = {
        (name, world): found
        for name in ("k2-reward", "k3-reward", "last-token")
        for world in WORLDS
        if (found := held(rows, world, name)) is not None and not (name == "last-token" and world == "bandit")
    }
    most = max((row["beta"] for row in drawn), default=0.0)
    moved = {
        name: [row["kl"] for row in drawn if row["estimator"] == name and row["beta"] == most]
        for name in ("none", "k1-loss")
    }
    diverged = [row for row in exact if row["estimator"] == "k3-reward" and row["beta"] <= 3]
    return [
        _claim(
            "k2 and k3 in the reward, and the last token's k2 on sequences, hold the policy at no coefficient",
            OURS,
            f"β'/β < {LOOSE:g} at the largest β, or divergence",
            loose if loose and _swept(rows) else None,
            lambda found: "; ".join(dict.fromkeys(KINDS[one.kind] for one in found.values())),
            lambda found: all(one.kind == "loose" for one in found.values()),
            "a tenth of what was asked; π* is at 1",
        ),
        _claim(
            "k3 in the reward collapses: exact training drives an answer to probability 0, at every β up to 3",
            OURS,
            "every run",
            diverged or None,
            lambda found: f"{sum(row['collapsed'] for row in found)} of {len(found)} runs",
            lambda found: all(row["collapsed"] for row in found),
            "none: its push is β·ref however rare the answer",
        ),
        _claim(
            "what follows ∇KL, the local gradient or forward KL never collapses under exact gradients",
            OURS,
            "no run",
            rest or None,
            lambda found: f"{sum(map(_lost, found))} of {len(found)} runs",
            lambda found: not any(map(_lost, found)),
            f"less than a tenth of the entropy of π* and {NEAR:g} nats from it, or divergence",
        ),
        _claim(
            "sampled, k1 in the loss is worse than nothing: β times its noise carries the policy away",
            OURS,
            "KL(π‖ref) at the largest β over a hundred times that without a penalty",
            moved if moved["none"] and len(moved["none"]) == len(moved["k1-loss"]) and most >= 1000 else None,
            lambda kls: f"{min(_ratios(kls)):.0f} times or more, by the medians in each world",
            lambda kls: min(_ratios(kls)) > 100,
            "two orders of magnitude; there are thousands",
        ),
    ]


def _ratios(kls: dict[str, list[float]]) -> list[float]:
    return [noisy / free for noisy, free in zip(kls["k1-loss"], kls["none"], strict=True)]


def _of_noise(rows: Sequence[Row]) -> list[Claim]:
    budget = _of(rows, part="budget")
    unbiased = [row for row in budget if row["estimator"] in NOISY and row["batch_size"] >= 16]
    centred = [row for row in budget if row["estimator"] == CENTRED and row["batch_size"] >= 8]
    both = _beside(budget, "k1-reward", "rao-blackwell")
    local = [pair for pair in _beside(budget, "k1-reward", "k2-loss") if pair[0]["batch_size"] >= 4]
    clear = [
        pair for names in PAIRS for pair in _beside(budget, *names) if abs(math.log(_foreseen_times(*pair))) > CLEAR
    ]
    ways = {_foreseen_times(*pair) > 1 for pair in clear}
    return [
        _claim(
            "where noisy training settles is known: KL(π‖π*) = η·tr Cov/(4βB), of the whole update at π*",
            OURS,
            "found/predicted between 1 and 1.35 for B ≥ 16",
            unbiased or None,
            lambda found: "{:.2f} to {:.2f}".format(*_extremes(excess(row) for row in found)),
            lambda found: all(0.9 < excess(row) < 1.35 for row in found),
            "first order in η: a mode of curvature λ has 1/(1 − ηβλ/2) of it, at most 1.33 here; 10 % of sampling",
        ),
        _claim(
            "with reward and KL both less the others' mean the noise at π* is zero: training ends at π* itself",
            OURS,
            "the noise at π* is 0, and KL(π‖π*) < 2e-4 at a constant learning rate",
            centred or None,
            lambda found: f"{max(row['noise'] for row in found):.0e}, and {max(row['at_end'] for row in found):.0e}",
            lambda found: all(row["noise"] < 1e-20 and row["at_end"] < 2e-4 for row in found),
            "at π* R − β·Σu is the same for every rollout of tokens; 2e-4 is what rare contexts still lack",
        ),
        _claim(
            "Rao–Blackwellised KL ends further from π* than k1 in the reward: what cancels the reward's noise is gone",
            OURS,
            "further, at every batch size",
            both or None,
            lambda found: "{:.1f} to {:.1f} times as far".format(*_extremes(_times(*pair) for pair in found)),
            lambda found: all(_times(*pair) > 1 for pair in found),
            "none; standard errors are a few percent",
        ),
        _claim(
            "biased estimators end nearer to π* than unbiased ones where batches are small, and only there",
            OURS,
            "who is nearer is as fixed points and noise formula say, wherever they differ by 30 %",
            clear if len(ways) == 2 else None,
            lambda found: f"{sum(map(_as_foreseen, found))} of {len(found)} pairs of ends",
            lambda found: all(map(_as_foreseen, found)),
            "30 %: the formula is of first order in η",
        ),
        _claim(
            "token k2 never ends nearer than k1 in the reward, for batches of 4 and more",
            OURS,
            "further, at every batch size",
            local or None,
            lambda found: "{:.1f} to {:.1f} times as far".format(*_extremes(_times(*pair) for pair in found)),
            lambda found: all(_times(*pair) > 1 for pair in found),
            "none; standard errors are a few percent",
        ),
    ]  # fmt: skip


NOISY = ("k1-reward", "k1-both", "rao-blackwell")
# A biased estimator, and an unbiased one that is noisier.
PAIRS = (("k2-loss", "rao-blackwell"), ("k2-loss", "k1-both"), ("k3-loss", "k1-both"))


# Foreseen distances that differ by 30 % are told apart.
CLEAR = math.log(1.3)


def _beside(rows: Sequence[Row], one: str, other: str) -> list[tuple[Row, Row]]:
    """The rows of two estimators at the same batch size in the same draw of the world."""
    others = {(row["seed"], row["batch_size"]): row for row in _of(rows, part="budget", estimator=other)}
    mine = {(row["seed"], row["batch_size"]): row for row in _of(rows, part="budget", estimator=one)}
    return [(mine[place], others[place]) for place in mine if place in others]


def _foreseen_times(one: Row, other: Row) -> float:
    return foreseen(other) / foreseen(one)


def _as_foreseen(pair: tuple[Row, Row]) -> bool:
    return (_times(*pair) > 1) == (_foreseen_times(*pair) > 1)


def _times(one: Row, other: Row) -> float:
    return other["kl_to_optimum"] / one["kl_to_optimum"]


def foreseen(row: Row) -> float:
    """KL(π‖π*) by theory: that of the fixed point, and η·tr Cov/(4βB) of noise; β = 1."""
    return row["predicted_bias"] + row["learning_rate"] * row["noise"] / (4 * row["batch_size"])


def excess(row: Row) -> float:
    return row["kl_to_optimum"] / foreseen(row)


def crossing(rows: Sequence[Row], biased: str, unbiased: str, seed: int = 0) -> tuple[float, float] | None:
    """The batch size from which on the unbiased one ends nearer to π*: as found, and as foreseen; None without one."""
    found = []
    for measure in (lambda row: row["kl_to_optimum"], foreseen):
        curves = [
            {row["batch_size"]: math.log(measure(row)) for row in _of(rows, part="budget", estimator=name, seed=seed)}
            for name in (biased, unbiased)
        ]
        gaps = [(math.log(size), curves[1][size] - curves[0][size]) for size in sorted(curves[0]) if size in curves[1]]
        signs = [(one, other) for one, other in pairwise(gaps) if one[1] > 0 >= other[1]]
        if len(signs) != 1:
            return None
        (low, above), (high, below) = signs[0]
        found.append(math.exp(low + (high - low) * above / (above - below)))
    return found[0], found[1]


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = list(dict.fromkeys(row["estimator"] for row in _of(rows, part="exact")))
    lines = [line for name in sorted(names, key=lambda name: _rank(rows, name)) if (line := _line(rows, name))]
    budget = [
        {
            "estimator": row["estimator"],
            "draw": row["seed"],
            "rollouts per update": row["batch_size"],
            "KL(π‖π*)": f"{row['kl_to_optimum']:.4f} ± {row['standard_error']:.4f}",
            "of the fixed point": f"{row['predicted_bias']:.4f}",
            "foreseen": f"{foreseen(row):.4f}",
        }
        for row in _of(rows, part="budget")
    ]
    return {"coefficients-table": lines, "budget": budget}


def _rank(rows: Sequence[Row], name: str) -> tuple[int, str]:
    found = [held(rows, world, name) for world in WORLDS]
    return max(list(KINDS).index(one.kind) for one in found if one is not None), name


def _line(rows: Sequence[Row], name: str) -> Row:
    cells: Row = {"estimator": name}
    for world in WORLDS:
        found = held(rows, world, name)
        cells["MDP" if world == "mdp" else world] = "" if found is None else _cell(found)
    exact = [row["collapsed"] for row in _of(rows, part="exact", estimator=name)]
    drawn = _of(rows, part="sampled", estimator=name)
    cells["collapsed, exact"] = f"{sum(exact)} of {len(exact)}"
    cells["collapsed, sampled"] = f"{sum(r['collapsed'] for r in drawn)} of {sum(r['runs'] for r in drawn)}"
    return cells


def _cell(found: Held) -> str:
    if found.kind in ("none", "loose") or found.factor is None:
        return "none" if found.kind == "loose" else "no penalty"
    if found.kind in ("asked", "scaled"):
        return f"{found.factor:.2f}"
    return f"{found.low:.2f}–{found.high:.2f}; {found.factor:.2f} ×÷ {found.spread:.2f}"


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    runs = _of(rows, part="exact")
    result: dict[str, float | int | str | None] = {
        "exact runs": len(runs),
        "estimators": len({row["estimator"] for row in runs} - {"none"}),
        "coefficients": len({row["beta"] for row in runs}),
    }
    for name in dict.fromkeys(row["estimator"] for row in rows if "estimator" in row):
        for world in WORLDS:
            found = held(rows, world, name)
            if found is not None and found.factor is not None:
                for what in ("factor", "spread", "low", "high", "last", "shortfall", "by_reward"):
                    result[f"{what} of {name}, {world}"] = getattr(found, what)
        exact = _of(rows, part="exact", estimator=name)
        if exact:
            result[f"collapsed, {name}"] = sum(row["collapsed"] for row in exact)
            result[f"runs of {name}"] = len(exact)
    for row in _of(rows, part="optimum"):
        result[f"KL to π*, {row['estimator']}, theory"] = row["kl_to_optimum"]
    for row in _of(rows, part="fixed-points"):
        result[f"KL to its fixed point, {row['estimator']}"] = row["kl_to_predicted"]
    for row in _of(rows, part="sampled"):
        result[f"sampled KL, {row['estimator']}, {row['world']}, β = {row['beta']:g}"] = row["kl"]
    for row in _of(rows, part="budget", seed=0):
        result[f"KL to π*, {row['estimator']}, B = {row['batch_size']}"] = row["kl_to_optimum"]
        result[f"noise of {row['estimator']}, B = {row['batch_size']}"] = row["noise"]
        result[f"bias of {row['estimator']}"] = row["predicted_bias"]
    for pair in PAIRS:
        draws = sorted({row["seed"] for row in _of(rows, part="budget")})
        known = [sizes for seed in draws if (sizes := crossing(rows, *pair, seed)) is not None]
        for what, place in (("crossing", 0), ("foreseen crossing", 1)):
            batches = [sizes[place] for sizes in known]
            result[f"{what}s of {' and '.join(pair)}"] = len(batches)
            result[f"smallest {what} of {' and '.join(pair)}"] = min(batches, default=None)
            result[f"largest {what} of {' and '.join(pair)}"] = max(batches, default=None)
    pairs = _beside(rows, "k1-reward", "rao-blackwell")
    result["least of rao-blackwell over k1-reward"] = min((_times(*pair) for pair in pairs), default=None)
    result["most of rao-blackwell over k1-reward"] = max((_times(*pair) for pair in pairs), default=None)
    noisy = [row for row in _of(rows, part="budget") if row["estimator"] in NOISY and row["batch_size"] >= 16]
    ratios = [excess(row) for row in noisy]
    result["largest excess over the noise formula"] = max(ratios, default=None)
    result["smallest excess over the noise formula"] = min(ratios, default=None)
    return result


def _extremes(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    return min(known), max(known)


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def _claim(
    words: str,
    source: str,
    expected: str,
    found: Any,
    said: Callable[[Any], str],
    holds: Callable[[Any], bool],
    tolerance: str,
) -> Claim:
    """Not run where `found` is None."""
    if found is None:
        return Claim(NAME, words, source, expected, "not run", None, tolerance)
    return Claim(NAME, words, source, expected, said(found), holds(found), tolerance)
