"""What the rows say: claims, the ladder as a table, and the numbers that the paper cites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kltest.reproduce import Claim

from ..judging import Answer, Question, answers, at_most, select
from .settings import EXACT, MEDIAN_TOLERANCE, PARTS, PUBLISHED, PUBLISHED_RATE

Row = dict[str, Any]

AMINI = "Amini, Vieira & Cotterell 2025 (arXiv 2504.10637): Rao–Blackwell's variance is never the larger one"
THEORY = "theory.md, section 5"
OWN = "this work"

# Of the published pair: KL, variance of the Monte Carlo and of the Rao–Blackwell value, as printed.
PAIR = {"kl": 2.39545, "monte_carlo": 3.31591, "rao_blackwell": 5.06974}
PRINTED = 5e-6
# Two independent numbers are further apart than this with probability below 1e-6.
ERRORS = 5.0
# Random worlds: up to the first logit noise nothing fails, from the second on something does.
NEAR, FAR = 0.3, 3.0
MILD = 1.0
# Fewer random worlds say nothing about what is rare.
MANY = 1000

# Published medians of the final KL; the two λ that are recomputed at every update are "value" and "gradient".
MEDIANS = {"1": 0.32, "value": 0.47, "gradient": 0.325, "0": 0.46}
STUDY, SEEDS = {"steps": 400, "batch_size": 16}, 32
START = 2.43
LATER_RATE, LAST_RATE, UNHARMED = 10.0, 20.0, (0.20, 0.35)

# From what needs least to what needs most.
SEES = {
    "return": "sampled log-probs",
    "k3 in both": "sampled log-probs",
    "to go": "sampled log-probs",
    "k3 in both, to go": "sampled log-probs",
    "to go, best λ": "sampled log-probs",
    "to go, one baseline": "sampled log-probs",
    "to go, baseline by prefix": "and a baseline for each prefix",
    "to go, critic": "and the expected KL to go",
    "rao-blackwell": "full next-token distributions",
    "rao-blackwell, one baseline": "full next-token distributions",
    "rao-blackwell, baseline by prefix": "and a baseline for each prefix",
    "rao-blackwell, critic": "and the expected KL to go",
}


def tidy(rows: Sequence[Row]) -> list[Row]:
    """As computed, part by part."""
    return sorted(rows, key=lambda row: list(PARTS).index(row["part"]))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """One for each question; not run where rows that it needs are not there."""
    return answers("variance", QUESTIONS, rows)


# ------------------------------------------------------------------------------------------------------ the inequality


def _published(rows: Sequence[Row]) -> Row | None:
    return next(iter(select(rows, "pair", reference=PUBLISHED)), None)


def _as_printed(rows: Sequence[Row]) -> Answer:
    row = _published(rows)
    if row is None:
        return None
    said = f"KL {row['kl']:.5f}, variance {row['monte_carlo']:.5f} and {row['rao_blackwell']:.5f}"
    return said, all(abs(row[name] - printed) <= PRINTED for name, printed in PAIR.items())


def _drawn(rows: Sequence[Row]) -> Answer:
    row = _published(rows)
    if row is None:
        return None
    names = ("monte_carlo", "rao_blackwell")
    off = [(row[f"{name}_drawn"] - row[name]) / row[f"{name}_error"] for name in names]
    said = " and ".join(f"{row[f'{name}_drawn']:.4f} ± {row[f'{name}_error']:.1g}" for name in names)
    return said, max(map(abs, off)) < ERRORS and row["monte_carlo_drawn"] < row["rao_blackwell_drawn"]


def _mixture(rows: Sequence[Row]) -> Answer:
    found = select(rows, "pair")
    if not found:
        return None
    best = [row["mixture"] / min(row["monte_carlo"], row["rao_blackwell"]) for row in found]
    return f"{min(best):.2f} to {max(best):.2f} times the better one", max(best) <= 1 + EXACT


def _fails(rows: Sequence[Row], column: str, **wanted: Any) -> tuple[int, int]:
    """How many worlds fail, and of how many."""
    found = select(rows, "rates", **wanted)
    return sum(row[f"{column}_fails"] for row in found), sum(row["worlds"] for row in found)


def _by_distance(rows: Sequence[Row]) -> Answer:
    near = [row for row in select(rows, "rates") if row["distance"] <= NEAR]
    far = [row for row in select(rows, "rates") if row["distance"] >= FAR]
    if sum(row["worlds"] for row in near) < MANY or sum(row["worlds"] for row in far) < MANY:
        return None
    counts = [(sum(row["value_fails"] for row in one), sum(row["worlds"] for row in one)) for one in (near, far)]
    said = "; ".join(
        f"{where}: {fails} of {count}" for where, (fails, count) in zip(("near", "far"), counts, strict=True)
    )
    return said, counts[0][0] == 0 and counts[1][0] > 0


def _ordered(
    name: str, more: Callable[[Any, Any], bool], spread: float = math.inf
) -> Callable[[Sequence[Row]], Answer]:
    """Whether failures become more, or fewer, from the smallest to the largest value of a setting, all else equal."""

    def judge(rows: Sequence[Row]) -> Answer:
        found = [row for row in select(rows, "rates") if row["distance"] >= FAR and row["spread"] <= spread]
        values = sorted({row[name] for row in found})
        cells: dict[tuple, dict[Any, Row]] = {}
        for row in found:
            key = tuple(row[other] for other in ("vocabulary", "length", "distance", "spread", "seed") if other != name)
            cells.setdefault(key, {})[row[name]] = row
        pairs = [(one[values[0]], one[values[-1]]) for one in cells.values() if {values[0], values[-1]} <= set(one)]
        if len(values) < 2 or sum(row["worlds"] for row, _ in pairs) < MANY:
            return None
        worlds = sum(row["worlds"] for row, _ in pairs)
        few, many = (sum(pair[at]["value_fails"] for pair in pairs) for at in (0, 1))
        said = f"{name} {values[0]:g}: {few / worlds:.1%}; {values[-1]:g}: {many / worlds:.1%} of {worlds}"
        return said, more(few, many)

    return judge


def _gradients(rows: Sequence[Row]) -> Answer:
    value, worlds = _fails(rows, "value")
    gradient, _ = _fails(rows, "gradient")
    if worlds < MANY or not value:
        return None
    said = f"value {value}, gradient {gradient} of {worlds}; at worst {_worst(rows, 'gradient'):.0f} times as noisy"
    return said, 0 < gradient < value


def _worst(rows: Sequence[Row], column: str) -> float:
    return max((row[f"{column}_worst"] for row in select(rows, "rates")), default=math.nan)


# -------------------------------------------------------------------------------------------------- what can be gained


def _steps(rows: Sequence[Row], *names: str) -> list[Row]:
    return [row for row in select(rows, "ladder") if row["estimator"] in names]


def _floor(rows: Sequence[Row]) -> Answer:
    found = select(rows, "ladder")
    least = min((row["least_over_floor"] for row in found), default=None)
    count = len({row["estimator"] for row in found})
    return None if least is None else (f"{least:.6f} times at least, of {count}", least >= 1 - EXACT)


def _near_floor(rows: Sequence[Row]) -> Answer:
    found = [row for row in _steps(rows, "rao-blackwell") if row["distance"] <= 0.1]
    most = max((row["over_floor"] for row in found), default=None)
    return None if most is None else (f"up to {most:.2f} times the floor", most < 1.2)


def _cells(rows: Sequence[Row]) -> list[dict[str, Row]]:
    cells: dict[tuple, dict[str, Row]] = {}
    for row in select(rows, "ladder"):
        cells.setdefault((row["length"], row["distance"], row["seed"]), {})[row["estimator"]] = row
    return list(cells.values())


def _far_floor(rows: Sequence[Row]) -> Answer:
    found = [row for row in _steps(rows, "rao-blackwell") if row["distance"] >= FAR and row["length"] >= 6]
    least = min((row["over_floor"] for row in found), default=None)
    critics = [row["over_floor"] for row in _steps(rows, "rao-blackwell, critic")]
    if least is None:
        return None
    return f"without, {least:.0f} times the floor and more; with, at most {max(critics):.2f}", (
        least > 5 and max(critics) < 2
    )


def _critic_or_exact(rows: Sequence[Row]) -> Answer:
    near = [cell for cell in _cells(rows) if cell["return"]["distance"] <= NEAR]
    far = [cell for cell in _cells(rows) if cell["return"]["distance"] >= FAR and cell["return"]["length"] >= 6]
    if not near or not far:
        return None

    def ratio(cell: dict[str, Row]) -> float:
        return cell["to go, critic"]["over_floor"] / cell["rao-blackwell, one baseline"]["over_floor"]

    below, above = min(map(ratio, near)), max(map(ratio, far))
    return (
        f"k1 with a critic over Rao–Blackwell with one number: near {below:.1f} and more, far {above:.1f} and less",
        (below > 1 > above),
    )


def _to_go(rows: Sequence[Row]) -> Answer:
    cells = _cells(rows)
    if not cells:
        return None
    ratios = [cell["return"]["over_floor"] / cell["to go"]["over_floor"] for cell in cells]
    exceptions = sum(cell["to go"]["noisier_than_return"] for cell in cells)
    worlds = sum(cell["to go"]["compared"] for cell in cells)
    said = f"medians {min(ratios):.2f} to {max(ratios):.2f} times; noisier in {exceptions} of {worlds} worlds"
    return said, min(ratios) > 1


def _prefix_return(rows: Sequence[Row]) -> Answer:
    found = [row for row in _steps(rows, "to go, baseline by prefix", "rao-blackwell, critic")]
    if not found:
        return None
    count = sum(row["noisier_than_return"] for row in found)
    return f"in {count} of {sum(row['compared'] for row in found)}", count == 0


def _mixtures(rows: Sequence[Row]) -> Answer:
    found = select(rows, "mixtures")
    if not found:
        return None
    sampled = min(row["sampled log-probs: over_floor"] for row in found)
    gains = [row["rao-blackwell, one baseline: over_floor"] / row["all: over_floor"] for row in found]
    weights = [row["weight of rao-blackwell"] for row in found]
    said = (
        f"sampled alone {sampled:.1f} times the floor and more; with Rao–Blackwell, weight {min(weights):.2f} to "
        f"{max(weights):.2f}, {max(gains):.2f} times less than it alone at most"
    )
    return said, sampled > 2 and max(gains) < 3 and min(weights) > 0.8


def _freedom(rows: Sequence[Row]) -> Answer:
    found = select(rows, "freedom")
    if not found:
        return None
    said = ", ".join(f"{row['dimension']} of {row['unknowns']}" for row in found)
    return said, all(row["dimension"] == row["predicted"] for row in found)


# ----------------------------------------------------------------------------------------------------------- the bandit


def _medians(rows: Sequence[Row], rate: float) -> dict[str, float]:
    """Median KL at the end by rule, where the study was run as stated, with as many seeds or more."""
    ends: dict[str, list[float]] = {}
    for row in select(rows, "bandit", what="end", rate=rate, **STUDY):
        if row["runs"] >= SEEDS:
            ends.setdefault(row["rule"], []).append(row["kl"])
    return {rule: median(found) for rule, found in ends.items()}


def _collapses(rows: Sequence[Row], rate: float, rule: str) -> int:
    return sum(row["kl"] > START for row in select(rows, "bandit", what="end", rate=rate, rule=rule))


def _as_published(rows: Sequence[Row]) -> Answer:
    found = _medians(rows, PUBLISHED_RATE)
    if set(found) != set(MEDIANS):
        return None
    return _said(found), all(abs(found[rule] - number) <= MEDIAN_TOLERANCE for rule, number in MEDIANS.items())


def _said(found: dict[str, float]) -> str:
    return ", ".join(f"λ = {_rule(rule)}: {found[rule]:.3f}" for rule in sorted(found))


def _rule(rule: str) -> str:
    return {"value": "λ_value", "gradient": "λ_grad"}.get(rule, rule)


def _start(rows: Sequence[Row]) -> Answer:
    found = select(rows, "bandit", what="path", step=0)
    return None if not found else (f"{found[0]['kl']:.4f}", abs(found[0]["kl"] - START) <= 0.005)


def _collapse(rate: float, harmed: Sequence[str], well: Sequence[str]) -> Callable[[Sequence[Row]], Answer]:
    def judge(rows: Sequence[Row]) -> Answer:
        found = _medians(rows, rate)
        if not set(harmed) | set(well) <= set(found):
            return None
        low, high = UNHARMED
        return _said(found), all(found[rule] > START for rule in harmed) and all(
            low <= found[rule] <= high for rule in well
        )

    return judge


def _formulas(rows: Sequence[Row]) -> Answer:
    """The parabolas through three of the enumerated variances are least where the formulas say."""
    found = sorted(select(rows, "noise"), key=lambda row: row["lam"])
    if len(found) < 3:
        return None
    three = (found[0], found[len(found) // 2], found[-1])
    off = []
    for column, formula in (("value_variance", "least_noisy_value"), ("gradient_variance", "least_noisy_gradient")):
        (x0, y0), (x1, y1), (x2, y2) = ((row["lam"], row[column]) for row in three)
        slope, bend = (y1 - y0) / (x1 - x0), ((y2 - y0) / (x2 - x0) - (y1 - y0) / (x1 - x0)) / (x2 - x1)
        off.append(abs((x0 + x1) / 2 - slope / (2 * bend) - found[0][formula]))
    said = f"λ_value {found[0]['least_noisy_value']:.4f}, λ_grad {found[0]['least_noisy_gradient']:.3f}"
    return f"{said}; off by at most {max(off):.0e}", max(off) < 1e-9


def _opposed(rows: Sequence[Row]) -> Answer:
    at = {row["lam"]: row for row in select(rows, "noise")}
    if not {0.0, 1.0} <= set(at):
        return None
    value, gradient = (at[1.0][name] / at[0.0][name] for name in ("value_variance", "gradient_variance"))
    return f"value {value:.0f} times as noisy, gradient {gradient:.2f} times", value > 1 > gradient


QUESTIONS = (
    Question(
        "Rao–Blackwell's value can be the noisier one: the inequality that was published fails for two tokens",
        AMINI,
        "KL 2.39545, variance 3.31591 (Monte Carlo) and 5.06974 (Rao–Blackwell)",
        _as_printed,
        f"{PRINTED:g}: printed digits",
    ),
    Question(
        "rollouts drawn from the pair have these variances",
        THEORY,
        "the enumerated ones",
        _drawn,
        f"{ERRORS:g} standard errors",
    ),
    Question(
        "the two variances differ by Σ E Var(u_t | s_t) + 2 Σ E Cov(u_t, KL ahead | s_t): Rao–Blackwell loses where "
        "costly tokens lead to cheaper prefixes",
        OWN,
        "equal in every random world",
        lambda rows: at_most(select(rows, "rates"), "off_identity", EXACT),
        f"{EXACT:g} of the variances: recursions in float64",
    ),
    Question(
        "the best mixture of both values is no noisier than either",
        "theory",
        "at most 1 times the better one",
        _mixture,
        "exact",
    ),
    Question(
        "at random the inequality never fails near the reference, and does far from it",
        OWN,
        f"none up to logit noise {NEAR:g}, some from {FAR:g} on",
        _by_distance,
        "exact for each world; counts",
    ),
    Question(
        "it fails more often where the policy is sure of its tokens",
        OWN,
        "more failures at the largest spread of logits than at the smallest",
        _ordered("spread", lambda few, many: few < many),
        "counts over the same cells",
    ),
    Question(
        "for mild policies it fails less often with more tokens to choose from",
        OWN,
        "fewer failures with the largest vocabulary than with the smallest",
        _ordered("vocabulary", lambda few, many: few > many, spread=MILD),
        "counts over the same cells",
    ),
    Question(
        "Rao–Blackwell's gradient, too, can be noisier than k1 to go, but less often than its value",
        OWN,
        "some worlds, fewer than for the value",
        _gradients,
        "exact for each world; counts",
    ),
    Question(
        "recursions over prefixes give what enumeration of the registered estimators does",
        OWN,
        "equal",
        lambda rows: at_most([*select(rows, "rates"), *select(rows, "ladder")], "off_again", EXACT),
        f"{EXACT:g} of the second moment",
    ),
    Question(
        "whatever an unbiased estimator knows, if it gives gradients to visited prefixes alone its variance is at "
        "least Σ d(1 − d)‖M‖²",
        OWN,
        "no estimator below 1 times that floor in any world",
        _floor,
        f"{EXACT:g}",
    ),
    Question(
        "unbiased estimators differ by terms z(prefix, token) of mean zero and, where the reference is seen at sampled "
        "tokens alone, by λ(prefix)·(w − 1); there are no others, and so no best one for all worlds",
        OWN,
        "as many independent differences as that gives",
        _freedom,
        "exact: ranks of integers' size",
    ),
    Question(
        "near the reference Rao–Blackwell alone has all but reached the floor",
        OWN,
        "below 1.2 times at logit noise 0.1",
        _near_floor,
        "medians over worlds",
    ),
    Question(
        "far from it Rao–Blackwell needs a critic: without one most of its variance is avoidable",
        OWN,
        "above 5 times the floor from six tokens on, below 2 with a critic",
        _far_floor,
        "medians over worlds",
    ),
    Question(
        "a critic is worth less than exact next-token terms near the reference, and more far from it",
        OWN,
        "k1 to go with a critic against Rao–Blackwell with one number: above 1 near, below 1 far at six tokens or more",
        _critic_or_exact,
        "medians over worlds",
    ),
    Question(
        "k1 to go is less noisy than k1 on the whole return",
        "Tang & Munos 2025 (arXiv 2506.09477)",
        "above 1 times at every length and distance",
        _to_go,
        "medians over worlds; single ones can differ",
    ),
    Question(
        "with its best baseline by prefix to go is never noisier than the whole return",
        "theory: a baseline by prefix takes the past out of the return as well",
        "in no world",
        _prefix_return,
        "exact",
    ),
    Question(
        "no mixture of sampled log-probs comes near the floor, and one with Rao–Blackwell is mostly that",
        OWN,
        "sampled alone above 2 times; with Rao–Blackwell it has weight above 0.8 and gains less than 3 times",
        _mixtures,
        "medians over worlds, weights best for each",
    ),
    Question(
        "the bandit of the baseline study starts at its KL",
        THEORY,
        f"{START:g}",
        _start,
        "0.005: printed digits",
    ),
    Question(
        "on the bandit at learning rate 5 λ_value is no better than λ = 0, and λ = 1 as good as λ_grad",
        THEORY,
        "medians λ = 0: .46, 1: .32, λ_grad: .32 to .33, λ_value: .47",
        _as_published,
        f"{MEDIAN_TOLERANCE:g}: as published",
    ),
    Question(
        "at rate 10 λ = 0 and λ_value have collapsed, λ = 1 and λ_grad have not",
        THEORY,
        f"medians above the start's KL; between {UNHARMED[0]:g} and {UNHARMED[1]:g}",
        _collapse(LATER_RATE, ("0", "value"), ("1", "gradient")),
        "medians over seeds",
    ),
    Question(
        "at rate 20 λ = 1 has collapsed as well, λ_grad has not",
        THEORY,
        f"median above the start's KL; between {UNHARMED[0]:g} and {UNHARMED[1]:g}",
        _collapse(LAST_RATE, ("0", "value", "1"), ("gradient",)),
        "medians over seeds",
    ),
    Question(
        "the λ of the least noisy value is −Cov(u, w)/Var w, that of the least noisy gradient 1 + E[u‖g‖²]/E‖g‖²",
        THEORY,
        "where the parabolas through enumerated variances are least",
        _formulas,
        "1e-9: differences of variances up to 1e4",
    ),
    Question(
        "k3's λ = 1 makes the bandit's value noisier and its gradient less noisy",
        OWN,
        "above 1 times; below 1 times",
        _opposed,
        "exact",
    ),
)


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The ladder at its longest: variances over the least possible one."""
    longest = max((row["length"] for row in select(rows, "ladder")), default=None)
    found = select(rows, "ladder", length=longest, seed=0)
    ladder = []
    for name, sees in SEES.items():
        mine = sorted((row for row in found if row["estimator"] == name), key=lambda row: row["distance"])
        if mine:
            cells = {f"KL {row['kl']:.2g}": _short(row["over_floor"]) for row in mine}
            ladder.append({"estimator": name, "it needs": sees, **cells})
    return {"ladder": ladder} if ladder else {}


def numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """What the paper cites; of the ladder, the first seed's."""
    result: dict[str, Any] = {}
    pair = _published(rows) or {}
    for name in ("kl", "monte_carlo", "rao_blackwell", "mixture", "share"):
        result[f"pair {name}"] = pair.get(name)
    for column in ("value", "gradient", "baselines"):
        for spread in sorted({row["spread"] for row in select(rows, "rates")}):
            for distance in sorted({row["distance"] for row in select(rows, "rates")}):
                fails, worlds = _fails(rows, column, spread=spread, distance=distance)
                result[f"{column} fails, spread {spread:g}, noise {distance:g}"] = fails / worlds
        fails, worlds = _fails(rows, column)
        result |= {f"{column} failures": fails, f"{column} worst": _worst(rows, column) if worlds else None}
    near = [row["worlds"] for row in select(rows, "rates") if row["distance"] <= NEAR]
    result |= {"random worlds": sum(row["worlds"] for row in select(rows, "rates")), "random worlds near": sum(near)}
    for one in select(rows, "ladder"):
        where = f"{one['estimator']}, T = {one['length']}, noise {one['distance']:g}"
        result.setdefault(f"over floor of {where}", one["over_floor"])
        result.setdefault(f"KL at T = {one['length']}, noise {one['distance']:g}", one["kl"])
    cells = _cells(rows)
    result |= {
        "to go noisier than return": sum(cell["to go"]["noisier_than_return"] for cell in cells),
        "ladder worlds": sum(cell["to go"]["compared"] for cell in cells),
        "longest": max((row["length"] for row in select(rows, "ladder")), default=None),
        "most of critic": max((row["over_floor"] for row in _steps(rows, "rao-blackwell, critic")), default=None),
    }
    mixed = select(rows, "mixtures")
    result |= {
        "least of sampled mixtures": min((row["sampled log-probs: over_floor"] for row in mixed), default=None),
        "largest gain of mixtures": max(
            (row["rao-blackwell, one baseline: over_floor"] / row["all: over_floor"] for row in mixed), default=None
        ),
    }
    for row in select(rows, "noise"):
        result |= {name.replace("_", " "): row[name] for name in ("least_noisy_value", "least_noisy_gradient")}
        for name in ("value", "gradient"):
            result[f"{name} variance, lambda {row['lam']:g}"] = row[f"{name}_variance"]
    k1, k3 = (result.get(f"value variance, lambda {lam}") for lam in (0, 1))
    result["value noise of lambda 1"] = k3 / k1 if k1 and k3 else None
    rates = sorted({row["rate"] for row in select(rows, "bandit")})
    for rate in rates:
        for rule in sorted({row["rule"] for row in select(rows, "bandit", rate=rate)}):
            ends = [row["kl"] for row in select(rows, "bandit", what="end", rate=rate, rule=rule)]
            result[f"KL of lambda {rule}, rate {rate:g}"] = median(ends)
            result[f"collapses of lambda {rule}, rate {rate:g}"] = _collapses(rows, rate, rule)
    start = select(rows, "bandit", what="path", step=0)
    result["bandit start"] = start[0]["kl"] if start else None
    return result


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:.0f}"
