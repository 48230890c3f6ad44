"""Noise of unbiased gradients: claims, the ladder as a table, and the numbers that the paper cites."""

import math
from functools import partial

import numpy as np
import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Row, need, ordered, records, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .settings import EXACT, MEDIAN_TOLERANCE, PARTS, PUBLISHED, PUBLISHED_RATE

AMINI = "Amini, Vieira & Cotterell 2025 (arXiv 2504.10637): Rao–Blackwell's variance is never the larger one"
THEORY = "theory.md, section 5"

# Of the published pair: KL, variance of the Monte Carlo and of the Rao–Blackwell value, as printed.
PAIR = {"kl": 2.39545, "monte_carlo": 3.31591, "rao_blackwell": 5.06974}
PRINTED = 5e-6
# Two independent numbers are further apart than this with probability below 1e-6.
ERRORS = 5.0
# Random environments: up to the first logit noise nothing fails, from the second on something does.
NEAR, FAR, MILD = 0.3, 3.0, 1.0
# Fewer random environments say nothing about what is rare.
MANY = 1000

# Published medians of the final KL; the two λ that are recomputed at every update are "value" and "gradient".
MEDIANS = {"1": 0.32, "value": 0.47, "gradient": 0.325, "0": 0.46}
STUDY, SEEDS = {"steps": 400, "batch_size": 16}, 32
START = 2.43
LATER_RATE, LAST_RATE, UNHARMED = 10.0, 20.0, (0.20, 0.35)
BETWEEN = f"between {UNHARMED[0]:g} and {UNHARMED[1]:g}"

# From what needs least to what needs most.
SAMPLED, FULL = "sampled log-probs", "full next-token distributions"
BY_PREFIX, CRITIC = "and a baseline for each prefix", "and the expected KL to go"
SEES = {
    **dict.fromkeys(("return", "k3 in both", "to go", "k3 in both, to go", "to go, best λ"), SAMPLED),
    "to go, one baseline": SAMPLED,
    "to go, baseline by prefix": BY_PREFIX,
    "to go, critic": CRITIC,
    **dict.fromkeys(("rao-blackwell", "rao-blackwell, one baseline"), FULL),
    "rao-blackwell, baseline by prefix": BY_PREFIX,
    "rao-blackwell, critic": CRITIC,
}

claims = Claims("variance")
numbers = Numbers()
tidy = ordered(PARTS)


# ------------------------------------------------------------------------------------------------------ the inequality
def _published(rows: pd.DataFrame) -> pd.Series:
    return need(rows, "pair", reference=PUBLISHED).iloc[0]


@claims.add(AMINI, "KL 2.39545, variance 3.31591 (Monte Carlo) and 5.06974 (Rao–Blackwell)",
    f"{PRINTED:g}: printed digits")  # fmt: skip
def _as_printed(rows: pd.DataFrame) -> Answer:
    """Rao–Blackwell's value can be the noisier one: the inequality that was published fails for two tokens"""
    row = _published(rows)
    said = f"KL {row['kl']:.5f}, variance {row['monte_carlo']:.5f} and {row['rao_blackwell']:.5f}"
    return said, all(abs(row[name] - printed) <= PRINTED for name, printed in PAIR.items())


@claims.add(THEORY, "the enumerated ones", f"{ERRORS:g} standard errors")
def _drawn(rows: pd.DataFrame) -> Answer:
    """rollouts drawn from the pair have these variances"""
    row, names = _published(rows), ("monte_carlo", "rao_blackwell")
    off = [(row[f"{name}_drawn"] - row[name]) / row[f"{name}_error"] for name in names]
    said = " and ".join(f"{row[f'{name}_drawn']:.4f} ± {row[f'{name}_error']:.1g}" for name in names)
    return said, max(map(abs, off)) < ERRORS and row["monte_carlo_drawn"] < row["rao_blackwell_drawn"]


claims.bound(
    "the two variances differ by Σ E Var(u_t | s_t) + 2 Σ E Cov(u_t, KL ahead | s_t): Rao–Blackwell loses where "
    "costly tokens lead to cheaper prefixes",
    OWN, "equal in every random environment", f"{EXACT:g} of the variances: recursions in float64",
    "off_identity", EXACT, "rates")  # fmt: skip

claims.between("the best mixture of both values is no noisier than either", "theory", "at most 1 times the better one",
    "exact", "{low:.2f} to {high:.2f} times the better one",
    lambda found: found["mixture"] / found[["monte_carlo", "rao_blackwell"]].min(axis=1), "pair",
    below=1 + EXACT)  # fmt: skip


@claims.add(OWN, f"none up to logit noise {NEAR:g}, some from {FAR:g} on", "exact for each environment; counts")
def _by_distance(rows: pd.DataFrame) -> Answer:
    """at random the inequality never fails near the reference, and does far from it"""
    found = need(rows, "rates")
    near, far = (found[where] for where in (found["distance"] <= NEAR, found["distance"] >= FAR))
    require(near["environments"].sum() >= MANY and far["environments"].sum() >= MANY)
    (few, of), (many, of_far) = (one[["value_fails", "environments"]].sum() for one in (near, far))
    return f"near: {few} of {of}; far: {many} of {of_far}", few == 0 and many > 0


def _fails_by(rows: pd.DataFrame, name: str, spread: float = math.inf) -> tuple[str, int, int]:
    """The failures at the smallest and the largest value of a setting, all else equal."""
    found = need(rows, "rates", distance=lambda x: x >= FAR, spread=lambda x: x <= spread)
    others = [one for one in ("vocabulary", "length", "distance", "spread", "seed") if one != name]
    ends = sorted({found[name].min(), found[name].max()})
    cells = found.pivot_table(["value_fails", "environments"], others, name, aggfunc="last")
    cells = cells.dropna(subset=[(of, end) for of in ("value_fails", "environments") for end in ends]).astype("Int64")
    environments = cells["environments"][ends[0]].sum()
    require(len(ends) >= 2 and environments >= MANY)
    few, many = (cells["value_fails"][end].sum() for end in ends)
    return (
        f"{name} {ends[0]:g}: {few / environments:.1%}; {ends[1]:g}: {many / environments:.1%} of {environments}",
        few,
        many,
    )


@claims.add(OWN, "more failures at the largest spread of logits than at the smallest", "counts over the same cells")
def _sure(rows: pd.DataFrame) -> Answer:
    """it fails more often where the policy is sure of its tokens"""
    said, few, many = _fails_by(rows, "spread")
    return said, few < many


@claims.add(OWN, "fewer failures with the largest vocabulary than with the smallest", "counts over the same cells")
def _choice(rows: pd.DataFrame) -> Answer:
    """for mild policies it fails less often with more tokens to choose from"""
    said, few, many = _fails_by(rows, "vocabulary", spread=MILD)
    return said, few > many


@claims.add(OWN, "some environments, fewer than for the value", "exact for each environment; counts")
def _gradients(rows: pd.DataFrame) -> Answer:
    """Rao–Blackwell's gradient, too, can be noisier than k1 to go, but less often than its value"""
    found = need(rows, "rates")
    value, gradient, environments = found[["value_fails", "gradient_fails", "environments"]].sum()
    require(environments >= MANY and value)
    worst = found["gradient_worst"].max()
    said = f"value {value}, gradient {gradient} of {environments}; at worst {worst:.0f} times as noisy"
    return said, 0 < gradient < value


claims.bound("recursions over prefixes give what enumeration of the registered estimators does", OWN, "equal",
    f"{EXACT:g} of the second moment", "off_again", EXACT, ("rates", "ladder"))  # fmt: skip


# -------------------------------------------------------------------------------------------------- what can be gained
@claims.add(OWN, "no estimator below 1 times that floor in any environment", f"{EXACT:g}")
def _floor(rows: pd.DataFrame) -> Answer:
    """whatever an unbiased estimator knows, if it gives gradients to visited prefixes alone its variance is at least
    Σ d(1 − d)‖M‖²"""
    found = need(rows, "ladder")
    least = found["least_over_floor"].min()
    return f"{least:.6f} times at least, of {found['estimator'].nunique()}", least >= 1 - EXACT


@claims.add(OWN, "as many independent differences as that gives", "exact: ranks of integers' size")
def _freedom(rows: pd.DataFrame) -> Answer:
    """unbiased estimators differ by terms z(prefix, token) of mean zero and, where the reference is seen at sampled
    tokens alone, by λ(prefix)·(w − 1); there are no others, and so no best one for all environments"""
    found = need(rows, "freedom")
    said = ", ".join(f"{row['dimension']} of {row['unknowns']}" for row in records(found))
    return said, (found["dimension"] == found["predicted"]).all()


claims.between("near the reference Rao–Blackwell alone has all but reached the floor", OWN,
    "below 1.2 times at logit noise 0.1", "medians over environments", "up to {high:.2f} times the floor", "over_floor",
    "ladder", estimator="rao-blackwell", distance=lambda x: x <= 0.1, below=1.2)  # fmt: skip


@claims.add(OWN, "above 5 times the floor from six tokens on, below 2 with a critic", "medians over environments")
def _far_floor(rows: pd.DataFrame) -> Answer:
    """far from it Rao–Blackwell needs a critic: without one most of its variance is avoidable"""
    alone = need(rows, "ladder", estimator="rao-blackwell", distance=lambda x: x >= FAR, length=lambda x: x >= 6)
    least = alone["over_floor"].min()
    most = need(rows, "ladder", estimator="rao-blackwell, critic")["over_floor"].max()
    return f"without, {least:.0f} times the floor and more; with, at most {most:.2f}", least > 5 and most < 2


def _cells(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A row for each length, distance and seed, a column for each estimator."""
    return need(rows, "ladder").pivot_table(column, ["length", "distance", "seed"], "estimator", aggfunc="last")


@claims.add(OWN,
    "k1 to go with a critic against Rao–Blackwell with one number: above 1 near, below 1 far at six tokens or more",
    "medians over environments")  # fmt: skip
def _critic_or_exact(rows: pd.DataFrame) -> Answer:
    """a critic is worth less than exact next-token terms near the reference, and more far from it"""
    over = _cells(rows, "over_floor")
    ratio = (over["to go, critic"] / over["rao-blackwell, one baseline"]).reset_index(name="ratio")
    near = need(ratio, distance=lambda x: x <= NEAR)["ratio"].min()
    far = need(ratio, distance=lambda x: x >= FAR, length=lambda x: x >= 6)["ratio"].max()
    said = f"k1 with a critic over Rao–Blackwell with one number: near {near:.1f} and more, far {far:.1f} and less"
    return said, near > 1 > far


@claims.add("Tang & Munos 2025 (arXiv 2506.09477)", "above 1 times at every length and distance",
    "medians over environments; single ones can differ")  # fmt: skip
def _to_go(rows: pd.DataFrame) -> Answer:
    """k1 to go is less noisy than k1 on the whole return"""
    over, to_go = _cells(rows, "over_floor"), need(rows, "ladder", estimator="to go")
    ratios = over["return"] / over["to go"]
    exceptions, environments = to_go["noisier_than_return"].sum(), to_go["compared"].sum()
    share = f"{exceptions:.0f} of {environments:.0f} environments"
    said = f"medians {ratios.min():.2f} to {ratios.max():.2f} times; noisier in {share}"
    return said, ratios.min() > 1


@claims.add("theory: a baseline by prefix takes the past out of the return as well", "in no environment", "exact")
def _prefix_return(rows: pd.DataFrame) -> Answer:
    """with its best baseline by prefix to go is never noisier than the whole return"""
    found = need(rows, "ladder", estimator=("to go, baseline by prefix", "rao-blackwell, critic"))
    count = found["noisier_than_return"].sum()
    return f"in {count} of {found['compared'].sum()}", count == 0


def _gains_of_mixtures(rows: pd.DataFrame) -> pd.Series:
    found = need(rows, "mixtures")
    return found["rao-blackwell, one baseline: over_floor"] / found["all: over_floor"]


@claims.add(OWN, "sampled alone above 2 times; with Rao–Blackwell it has weight above 0.8 and gains less than 3 times",
    "medians over environments, weights best for each")  # fmt: skip
def _mixtures(rows: pd.DataFrame) -> Answer:
    """no mixture of sampled log-probs comes near the floor, and one with Rao–Blackwell is mostly that"""
    found, gain = need(rows, "mixtures"), _gains_of_mixtures(rows).max()
    sampled, weight = found["sampled log-probs: over_floor"].min(), found["weight of rao-blackwell"]
    said = f"sampled alone {sampled:.1f} times the floor and more; with Rao–Blackwell, weight {weight.min():.2f} to "
    said += f"{weight.max():.2f}, {gain:.2f} times less than it alone at most"
    return said, sampled > 2 and gain < 3 and weight.min() > 0.8


# ----------------------------------------------------------------------------------------------------------- the bandit
@claims.add(THEORY, f"{START:g}", "0.005: printed digits")
def _start(rows: pd.DataFrame) -> Answer:
    """the bandit of the baseline study starts at its KL"""
    kl = need(rows, "bandit", what="path", step=0)["kl"].iloc[0]
    return f"{kl:.4f}", abs(kl - START) <= 0.005


def _medians(rows: pd.DataFrame, rate: float) -> pd.Series:
    """Median KL at the end by rule, where the study was run as stated, with as many seeds or more."""
    ends = need(rows, "bandit", what="end", rate=rate, **STUDY)
    return ends[ends["runs"] >= SEEDS].groupby("rule")["kl"].median()


def _said(medians: pd.Series) -> str:
    names = {"value": "λ_value", "gradient": "λ_grad"}
    return ", ".join(f"λ = {names.get(rule, rule)}: {kl:.3f}" for rule, kl in medians.items())


@claims.add(THEORY, "medians λ = 0: .46, 1: .32, λ_grad: .32 to .33, λ_value: .47",
    f"{MEDIAN_TOLERANCE:g}: as published")  # fmt: skip
def _as_published(rows: pd.DataFrame) -> Answer:
    """on the bandit at learning rate 5 λ_value is no better than λ = 0, and λ = 1 as good as λ_grad"""
    found = _medians(rows, PUBLISHED_RATE)
    require(set(found.index) == set(MEDIANS))
    return _said(found), (found - pd.Series(MEDIANS)).abs().max() <= MEDIAN_TOLERANCE


def _collapse(rows: pd.DataFrame, rate: float, harmed: list[str], well: list[str]) -> Answer:
    found = _medians(rows, rate)
    require({*harmed, *well} <= set(found.index))
    return _said(found), (found[harmed] > START).all() and found[well].between(*UNHARMED).all()


for _claim, _expected, _how in (
    ("at rate 10 λ = 0 and λ_value have collapsed, λ = 1 and λ_grad have not",
     "medians above the start's KL", (LATER_RATE, ["0", "value"], ["1", "gradient"])),
    ("at rate 20 λ = 1 has collapsed as well, λ_grad has not",
     "median above the start's KL", (LAST_RATE, ["0", "value", "1"], ["gradient"])),
):  # fmt: skip
    _judge = partial(_collapse, **dict(zip(("rate", "harmed", "well"), _how, strict=True)))
    claims.add(THEORY, f"{_expected}; {BETWEEN}", "medians over seeds", claim=_claim)(_judge)


@claims.add(THEORY, "where the parabolas through enumerated variances are least",
    "1e-9: differences of variances up to 1e4")  # fmt: skip
def _formulas(rows: pd.DataFrame) -> Answer:
    """the λ of the least noisy value is −Cov(u, w)/Var w, that of the least noisy gradient 1 + E[u‖g‖²]/E‖g‖²"""
    found = need(rows, "noise").sort_values("lam")
    require(len(found) >= 3)
    three, off = found.iloc[[0, len(found) // 2, -1]], []
    value, gradient = found.iloc[0][["least_noisy_value", "least_noisy_gradient"]]
    for column, formula in (("value_variance", value), ("gradient_variance", gradient)):
        bend, slope, _ = np.linalg.solve(np.vander(three["lam"], 3), three[column])
        off.append(abs(-slope / (2 * bend) - formula))
    return f"λ_value {value:.4f}, λ_grad {gradient:.3f}; off by at most {max(off):.0e}", max(off) < 1e-9


@claims.add(OWN, "above 1 times; below 1 times", "exact")
def _opposed(rows: pd.DataFrame) -> Answer:
    """k3's λ = 1 makes the bandit's value noisier and its gradient less noisy"""
    at = need(rows, "noise").groupby("lam")[["value_variance", "gradient_variance"]].last()
    require({0.0, 1.0} <= set(at.index))
    value, gradient = at.loc[1.0] / at.loc[0.0]
    return f"value {value:.0f} times as noisy, gradient {gradient:.2f} times", value > 1 > gradient


# -------------------------------------------------------------------------------------------------- tables and numbers
def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """The ladder at its longest: variances over the least possible one."""
    found, ladder = select(rows, "ladder"), []
    if found.empty:
        return {}
    found = select(found, length=found["length"].max(), seed=0).sort_values("distance")
    for name, sees in SEES.items():
        cells = {f"KL {row['kl']:.2g}": _short(row["over_floor"]) for row in records(select(found, estimator=name))}
        if cells:
            ladder.append({"estimator": name, "it needs": sees, **cells})
    return {"ladder": ladder} if ladder else {}


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


numbers.add(lambda rows: [number(f"pair {name}", _published(rows)[name]) for name in PAIR])


@numbers.add
def _of_rates(rows: pd.DataFrame) -> Cited:
    found = need(rows, "rates")
    counts = found.groupby(["spread", "distance"]).sum(numeric_only=True)
    for column in ("value", "gradient"):
        share = (counts[f"{column}_fails"] / counts["environments"]).to_frame("share")
        yield from melted(share, {"share": f"{column} fails"})
    yield number("random environments near", found[found["distance"] <= NEAR]["environments"].sum())


@numbers.add
def _of_the_ladder(rows: pd.DataFrame) -> Cited:
    found, to_go = need(rows, "ladder"), need(rows, "ladder", estimator="to go")
    first = found.drop_duplicates(["estimator", "length", "distance"])
    yield from melted(first, {"over_floor": "over floor"}, ["estimator", "length", "distance"])
    yield from melted(found.drop_duplicates(["length", "distance"]), {"kl": "KL"}, ["length", "distance"])
    yield number("longest", found["length"].max())
    yield number("to go noisier than return", to_go["noisier_than_return"].sum())
    yield number("ladder environments", to_go["compared"].sum())
    yield number("least of sampled mixtures", need(rows, "mixtures")["sampled log-probs: over_floor"].min())
    yield number("largest gain of mixtures", _gains_of_mixtures(rows).max())


@numbers.add
def _of_noise(rows: pd.DataFrame) -> Cited:
    found = need(rows, "noise")
    for name in ("value", "gradient"):
        yield number(f"least noisy {name}", found[f"least_noisy_{name}"].iloc[-1])
    k1, k3 = (need(found, lam=lam)["value_variance"].iloc[0] for lam in (0.0, 1.0))
    yield number("value noise of lambda 1", k3 / k1)


@numbers.add
def _of_the_bandit(rows: pd.DataFrame) -> Cited:
    ends = need(rows, "bandit", what="end").groupby(["rate", "rule"])[["kl"]]
    yield from melted(ends.median(), {"kl": "KL at the end"})
    yield number("bandit start", need(rows, "bandit", what="path", step=0)["kl"].iloc[0])
