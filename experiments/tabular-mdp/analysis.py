"""What the rows say: claims, a table by world, horizon and slip, and the numbers that the paper cites."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from kltest.reproduce import Claim

from ..judging import Answer, Question, answers, select
from .settings import EXACT, PARTS

Row = dict[str, Any]

TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the partial gradient of a token-level loss"
OWN = "this work"
LOCAL = ("k2-loss", "full-loss", "k1-reward-immediate")
RIGHT = ("k1-reward", "k1-reward-to-go")
# An eigenvalue counts as complex from here on; those of symmetric matrices come out below 1e-7 of their size.
TURNS = 1e-3
# Rounding stays below EXACT; a part that is there may be small, but not as small as this.
VISIBLE = 1e-6


def tidy(rows: Sequence[Row]) -> list[Row]:
    """As computed, part by part."""
    return sorted(rows, key=lambda row: list(PARTS).index(row["part"]))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """One for each question; not run where rows that it needs are not there."""
    return answers("tabular-mdp", QUESTIONS, rows)


def _routes(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "worlds") if row["off_again"] is not None]
    if not chosen:
        return None
    off, dynamics = max(row["off_again"] for row in chosen), max(row["off_dynamics"] for row in chosen)
    text = f"{len(chosen)} worlds: gradients off by {off:.0e}; log-ratios with dynamics off by {dynamics:.0e}"
    return text, max(off, dynamics) < EXACT


def _followed(rows: Sequence[Row], names: Sequence[str], column: str) -> Answer:
    chosen = [row for row in select(rows, "estimators") if row["estimator"] in names]
    if not chosen:
        return None
    off, again = max(row[column] for row in chosen), max(max(row["off_again"], row["off_value"]) for row in chosen)
    who = ", ".join(dict.fromkeys(row["estimator"] for row in chosen))
    return f"{who}: off by {off:.0e}; by enumeration {again:.0e}", max(off, again) < EXACT


def _one_step(rows: Sequence[Row]) -> Answer:
    chosen = select(rows, "worlds")
    one = [row["missed"] for row in chosen if row["horizon"] == 1]
    several = [row["missed"] for row in chosen if row["horizon"] > 1 and row["slip"] < 1]
    if not (one and several):
        return None
    text = f"one step {max(one):.0e}; more {min(several):.2g} to {max(several):.2f}"
    return text, max(one) < EXACT and min(several) > VISIBLE


def _slip(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "worlds") if row["horizon"] > 1]
    without = [row for row in chosen if row["slip"] == 1]
    levels = sorted({row["slip"] for row in chosen})
    if not without or len(levels) < 2:
        return None
    none = max(max(row["missed"], row["asymmetry"]) for row in without)
    means = [_mean(row["missed"] for row in chosen if row["slip"] == level) for level in levels]
    falls = all(one > other for one, other in pairwise(means))
    text = ", ".join(f"{mean:.2f}" for mean in means)
    return f"means {text} at slip {', '.join(f'{one:g}' for one in levels)}; at 1 at most {none:.0e}", (
        falls and none < EXACT
    )


def _picture(rows: Sequence[Row]) -> Answer:
    cells = [row for row in select(rows, "picture") if row["kl"] < EXACT]
    if not cells:
        return None
    blind, steered = max(row["local_size"] for row in cells), sum(row["whole_size"] > 1e-6 for row in cells)
    text = f"{len(cells)} cells where π = ref: local at most {blind:.0e}; ∇KL acts in {steered}"
    return text, blind < 1e-14 and steered == len(cells)


def _ends(rows: Sequence[Row], followed: str) -> dict[tuple[float, float], list[Row]]:
    """The stable rest points for each reference and β that was looked at, the smallest chance first."""
    chosen = select(rows, "length")
    found: dict[tuple[float, float], list[Row]] = {(row["reference"], row["beta"]): [] for row in chosen}
    for row in chosen:
        if row["followed"] == followed and row["stable"]:
            found[row["reference"], row["beta"]].append(row)
    return found


def _several_ends(rows: Sequence[Row]) -> Answer:
    local, whole = _ends(rows, "local_reverse_kl"), _ends(rows, "reverse_kl")
    if len({beta for _, beta in local}) < 10:
        return None
    two = {key: ends for key, ends in local.items() if len(ends) == 2}
    apart = max((ends[1]["chance"] - ends[0]["chance"] for ends in two.values()), default=0.0)
    single = all(len(ends) == 1 for ends in whole.values())
    off = max(row["off_formula"] for row in select(rows, "length"))
    return (
        f"two ends for {len(two)} of {len(local)} settings, up to {apart:.2f} apart; ∇KL always one; "
        f"recursion off the closed form by {off:.0e}",
        bool(two) and single and all(len(ends) in (1, 2) for ends in local.values()) and off < EXACT,
    )


def _hysteresis(rows: Sequence[Row]) -> Answer:
    """With β lowered and raised again the end jumps at two different β."""
    if len({row["beta"] for row in select(rows, "length")}) < 10:
        return None
    bands = _bands(rows)
    if not bands:
        return "no such band", False
    text = "; ".join(f"ref {reference:g}: β from {low:g} to {high:g}" for reference, (low, high) in bands.items())
    whole = _ends(rows, "reverse_kl")
    return text, all(low < high for low, high in bands.values()) and all(len(ends) == 1 for ends in whole.values())


def _bands(rows: Sequence[Row]) -> dict[float, tuple[float, float]]:
    """For each reference the smallest and the largest β with two ends, where β both below and above has one."""
    local = _ends(rows, "local_reverse_kl")
    bands = {}
    for reference in sorted({reference for reference, _ in local}):
        counts = {beta: len(ends) for (ref, beta), ends in local.items() if ref == reference}
        two = [beta for beta, count in counts.items() if count == 2]
        if two and min(counts) < min(two) and max(counts) > max(two):
            bands[reference] = (min(two), max(two))
    return bands


def _spirals(rows: Sequence[Row]) -> Answer:
    local, whole = (select(rows, "rotation", followed=name) for name in ("local_reverse_kl", "reverse_kl"))
    if len(local) < 30:
        return None
    turning = sum(row["turn"] > TURNS for row in local)
    most, none = max(row["turn"] for row in local), max(row["turn"] for row in whole)
    rest = max(row["off_rest"] for row in [*local, *whole])
    return (
        f"{turning} of {len(local)} spiral, imaginary/real up to {most:.2f}; ∇KL: {none:.0e}; at rest to {rest:.0e}",
        turning > 0 and none < 1e-7 and rest < EXACT,
    )


QUESTIONS = (
    Question(
        "dynamics cancel in the log-ratio of trajectories, and two routes agree",
        "theory",
        "0",
        _routes,
        f"{EXACT:g}: sums of thousands of rollouts in float64",
    ),
    Question(
        "a token-level loss follows the local gradient, under stochastic dynamics too",
        TANG_MUNOS,
        "Σ_t E ∇KL_t, states held fixed",
        lambda rows: _followed(rows, LOCAL, "off_local"),
        f"{EXACT:g}: float64",
    ),
    Question(
        "k1 in the reward with credit for later steps follows ∇KL(π‖ref)",
        TANG_MUNOS,
        "∇KL(π‖ref)",
        lambda rows: _followed(rows, RIGHT, "bias"),
        f"{EXACT:g}: float64",
    ),
    Question(
        "the part of the state distribution is missed for more than one step",
        TANG_MUNOS,
        "0 for one step only",
        _one_step,
        f"zero: {EXACT:g}; not zero: above {VISIBLE:g}",
    ),
    Question(
        "what is missed falls as actions slip, and is nothing where they decide nothing",
        OWN,
        "falling means; 0 at slip 1, the Jacobian's asymmetry too",
        _slip,
        f"{EXACT:g} at slip 1; the order of the means",
    ),
    Question(
        "on a grid the token-level loss acts only where the policy differs from the reference",
        OWN,
        "local 0, ∇KL not, in every cell where π = ref",
        _picture,
        "1e-14 and 1e-6 of a unit of logit",
    ),
    Question(
        "where a state recurs, training with a token-level loss may have two ends",
        OWN,
        "two stable rest points for some β; one for ∇KL",
        _several_ends,
        f"changes of sign of a closed form; recursion to {EXACT:g}",
    ),
    Question(
        "lowering β and raising it again does not lead back",
        OWN,
        "a band of β with two ends, between bands with one",
        _hysteresis,
        "exact up to the grid of β",
    ),
    Question(
        "where states recur, training with a token-level loss may spiral into its rest point",
        OWN,
        "complex eigenvalues in some random processes; never for ∇KL",
        _spirals,
        f"complex: above {TURNS:g} of the real part; real: below 1e-7",
    ),
)


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What is missed, by world, horizon and slip: share and cosine, means over draws."""
    chosen = select(rows, "worlds")
    found = []
    for world in dict.fromkeys(row["world"] for row in chosen):
        for horizon in sorted({row["horizon"] for row in chosen} - {1}):
            line: Row = {"world": world, "steps": horizon}
            for slip in sorted({row["slip"] for row in chosen}):
                mine = select(chosen, "worlds", world=world, horizon=horizon, slip=slip)
                if not mine:
                    continue
                share, angle = _mean(row["missed"] for row in mine), _mean(row["cosine"] for row in mine)
                line[f"slip {slip:g}"] = f"{share:.2f} ({angle:.2f})" if share >= EXACT else "0 (1)"
            found.append(line)
    return {"table": found} if found else {}


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """By name; means over draws where there are several."""
    result: dict[str, float | int | str | None] = {}
    worlds = select(rows, "worlds")
    for world in ("chain", "grid", "random"):
        for slip in (0.0, 0.25, 0.5):
            mine = select(rows, "worlds", world=world, horizon=8, slip=slip)
            result[f"missed, {world}, slip {slip:g}"] = _mean(row["missed"] for row in mine)
    result["largest share missed"] = max((row["missed"] for row in worlds), default=None)
    result["largest asymmetry"] = max((row["asymmetry"] for row in worlds), default=None)
    off = [row["off_again"] for row in worlds if row["off_again"] is not None]
    result["routes apart"] = max(off, default=None)
    cells = select(rows, "picture")
    result["cells"] = len(cells)
    result["cells where π = ref"] = sum(row["kl"] < EXACT for row in cells)
    for reference in (0.02, 0.1):
        low, high = _bands(rows).get(reference, (None, None))
        result |= {f"band from, {reference:g}": low, f"band to, {reference:g}": high}
    for followed, name in (("local_reverse_kl", "token-level"), ("reverse_kl", "true")):
        ends = _ends(rows, followed).get((0.02, 0.7), [])
        result[f"lower end, {name}"] = ends[0]["chance"] if ends else None
        result[f"upper end, {name}"] = ends[-1]["chance"] if ends else None
    tipping = select(rows, "length", followed="local_reverse_kl", reference=0.02, beta=0.7, stable=False)
    result["tipping point"] = tipping[0]["chance"] if tipping else None
    local = select(rows, "rotation", followed="local_reverse_kl")
    result["processes"] = len(local)
    result["processes that spiral"] = sum(row["turn"] > TURNS for row in local)
    result["largest turn"] = max((row["turn"] for row in local), default=None)
    return result


def _mean(values: Iterable[float]) -> Any:
    known = list(values)
    return sum(known) / len(known) if known else None
