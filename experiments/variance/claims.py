"""Noise of unbiased gradients: claims, the ladder as a table, and the numbers that the paper cites."""

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from kltest.reproduce.bounds import Bound, above, at_least, at_most, below, exactly, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, need, ordered, records, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .experiment import EXACT, MEDIAN_TOLERANCE, PARTS, PUBLISHED, PUBLISHED_RATE

AMINI = "Amini, Vieira & Cotterell 2025 (arXiv 2504.10637): Rao–Blackwell's variance is never the larger one"
CHECK = "Chen 2026, a post with a script, check_kl.py, 29 September 2026"
STUDY_OF_λ = "Aribandi 2026, “The best estimate of KL is not the best estimate of its gradient”, a post, 2 October 2026"

# Of the published pair: KL, variance of the Monte Carlo and of the Rao–Blackwell value.
PAIR = ("kl", "monte_carlo", "rao_blackwell")
# Random environments: up to the first logit noise nothing fails, from the second on something does.
NEAR, FAR, MILD = at_most(0.3), at_least(3.0), at_most(1.0)
# Fewer random environments say nothing about what is rare.
MANY = 1000

# The share of the positions of which claims about budgets are made.
QUARTER = 0.25

# The study of the λ family as it was published: runs of each rule.
STUDY, SEEDS = {"steps": 400, "batch_size": 16}, 32

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


@claims.measure(
    f"{CHECK}; against {AMINI}",
    "an order of exact variances, and of sampled ones",
    times_as_noisy=above(1),
    times_as_noisy_drawn=above(1),
)
def _noisier(rows: pd.DataFrame) -> Measured:
    """Rao–Blackwell's value can be the noisier one: the inequality that was published fails for two tokens"""
    row = _published(rows)
    return {
        "times_as_noisy": row["rao_blackwell"] / row["monte_carlo"],
        "times_as_noisy_drawn": row["rao_blackwell_drawn"] / row["monte_carlo_drawn"],
        **{name: f"{row[name]:.5f}" for name in PAIR},
    }


@claims.measure(
    OWN, "two independent numbers are further apart with probability below 1e-6", standard_errors_off=near(0, 5.0)
)
def _drawn(rows: pd.DataFrame) -> Measured:
    """rollouts drawn from the pair have these variances, within {standard_errors_off:±} standard errors"""
    row = _published(rows)
    return {"standard_errors_off": [(row[f"{name}_drawn"] - row[name]) / row[f"{name}_error"] for name in PAIR[1:]]}


claims.column(
    "the two variances differ by `Σ E Var(u_t | s_t) + 2 Σ E Cov(u_t, KL ahead | s_t)` in every random environment: "
    "Rao–Blackwell loses where costly tokens lead to cheaper prefixes",
    OWN,
    "of the variances: recursions in float64",
    "off_identity",
    near(0, EXACT),
    "rates",
)


@claims.measure(OWN, "rounding", times_the_better_one=at_most(1 + EXACT))
def _mixture(rows: pd.DataFrame) -> Measured:
    """the best mixture of both values is no noisier than either"""
    found = need(rows, "pair")
    return {"times_the_better_one": found["mixture"] / found[["monte_carlo", "rao_blackwell"]].min(axis=1)}


@claims.measure(
    OWN, "exact for each environment; counts", fails_near=exactly(0), fails_far=above(0), close=NEAR, far=FAR
)
def _by_distance(rows: pd.DataFrame, close: Bound, far: Bound) -> Measured:
    """of random environments the inequality fails in none up to a logit noise of {close}, and in some from {far} on"""
    found = need(rows, "rates")
    sums = [found[where(found["distance"])][["value_fails", "environments"]].sum() for where in (close, far)]
    (few, of), (many, of_far) = sums
    require(of >= MANY and of_far >= MANY)
    return {"fails_near": int(few), "fails_far": int(many), "near": int(of), "far": int(of_far)}


for _words, _name, _bound, _spread in (
    (
        "it fails more often where the policy is sure of its tokens: at the largest spread of logits more than at the "
        "smallest",
        "spread",
        above(0),
        at_least(0),
    ),
    (
        "for mild policies, of a spread up to {spread}, it fails less often with more tokens to choose from: with the "
        "largest vocabulary less than with the smallest",
        "vocabulary",
        below(0),
        MILD,
    ),
):

    @claims.measure(
        OWN,
        "exact for each environment; counts over the same cells",
        claim=_words,
        more_failures=_bound,
        name=_name,
        distance=FAR,
        spread=_spread,
    )
    def _fails_by(rows: pd.DataFrame, name: str, distance: Bound, spread: Bound) -> Measured:
        found = need(rows, "rates", distance=distance, spread=spread)
        others = [one for one in ("vocabulary", "length", "distance", "spread", "seed") if one != name]
        ends = sorted({found[name].min(), found[name].max()})
        cells = found.pivot_table(["value_fails", "environments"], others, name, aggfunc="last")
        cells = cells.dropna(subset=[(of, end) for of in ("value_fails", "environments") for end in ends]).astype(
            "Int64"
        )
        environments = cells["environments"][ends[0]].sum()
        require(len(ends) >= 2 and environments >= MANY)
        few, many = (int(cells["value_fails"][end].sum()) for end in ends)
        at = [f"{count / environments:.1%} at {end:g}" for count, end in zip((few, many), ends, strict=True)]
        return {"more_failures": many - few, "failures": at, "environments": int(environments)}


@claims.measure(OWN, "exact for each environment; counts", gradient_fails=above(0), share_of_the_values=below(1))
def _gradients(rows: pd.DataFrame) -> Measured:
    """Rao–Blackwell's gradient, too, can be noisier than k1 to go, but less often than its value"""
    found = need(rows, "rates")
    value, gradient, environments = found[["value_fails", "gradient_fails", "environments"]].sum()
    require(environments >= MANY and value)
    return {
        "gradient_fails": int(gradient),
        "share_of_the_values": gradient / value,
        "environments": int(environments),
        "at_worst_times_as_noisy": found["gradient_worst"].max(),
    }


claims.column(
    "recursions over prefixes give what enumeration of the registered estimators does",
    OWN,
    "of the second moment",
    "off_again",
    near(0, EXACT),
    ("rates", "ladder"),
)


# -------------------------------------------------------------------------------------------------- what can be gained
claims.column(
    "whatever an unbiased estimator knows, if it gives gradients to visited prefixes alone its variance is "
    "at least `Σ d(1 − d)‖M‖²`, in every environment",
    OWN,
    "rounding",
    "least_over_floor",
    at_least(1 - EXACT),
    "ladder",
)


@claims.measure(OWN, "exact: ranks of integers' size", dimensions_too_many=exactly(0))
def _freedom(rows: pd.DataFrame) -> Measured:
    """unbiased estimators differ by terms z(prefix, token) of mean zero and, where the reference is seen at sampled
    tokens alone, by `λ(prefix)·(w − 1)`; there are no others, and so no best one for all environments"""
    found = need(rows, "freedom")
    dimensions = [f"{row['dimension']} of {row['unknowns']}" for row in records(found)]
    return {"dimensions_too_many": found["dimension"] - found["predicted"], "dimensions": dimensions}


claims.column(
    "near the reference, up to a logit noise of {distance}, Rao–Blackwell alone has all but reached the floor: below "
    "{bound} times it",
    OWN,
    "medians over environments",
    "over_floor",
    below(1.2),
    "ladder",
    estimator="rao-blackwell",
    distance=at_most(0.1),
)


@claims.measure(
    OWN, "medians over environments", without=above(5), with_a_critic=below(2), distance=FAR, length=at_least(6)
)
def _far_floor(rows: pd.DataFrame, distance: Bound, length: Bound) -> Measured:
    """far from it (a logit noise from {distance} on, {length} tokens or more) Rao–Blackwell needs a critic: without
    one it stays above {without} times the floor, with one it is everywhere below {with_a_critic} times it"""
    alone = need(rows, "ladder", estimator="rao-blackwell", distance=distance, length=length)
    return {
        "without": alone["over_floor"],
        "with_a_critic": need(rows, "ladder", estimator="rao-blackwell, critic")["over_floor"],
    }


def _cells(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A row for each length, distance and seed, a column for each estimator."""
    return need(rows, "ladder").pivot_table(column, ["length", "distance", "seed"], "estimator", aggfunc="last")


@claims.measure(
    OWN,
    "medians over environments",
    ratio_near=above(1),
    ratio_far=below(1),
    close=NEAR,
    distance=FAR,
    length=at_least(6),
)
def _critic_or_exact(rows: pd.DataFrame, close: Bound, distance: Bound, length: Bound) -> Measured:
    """k1 to go with a critic is noisier than Rao–Blackwell with one number up to a logit noise of {close}, and less
    noisy from {distance} on, with {length} tokens or more: a critic is worth less than exact next-token terms near the
    reference, more far from it"""
    over = _cells(rows, "over_floor")
    ratio = (over["to go, critic"] / over["rao-blackwell, one baseline"]).reset_index(name="ratio")
    return {
        "ratio_near": need(ratio, distance=close)["ratio"],
        "ratio_far": need(ratio, distance=distance, length=length)["ratio"],
    }


@claims.measure(
    "Tang & Munos 2025 (arXiv 2506.09477)", "medians over environments; single ones can differ", times_as_noisy=above(1)
)
def _to_go(rows: pd.DataFrame) -> Measured:
    """k1 on the whole return is noisier than k1 to go in the median over environments, at every length and distance"""
    over, to_go = _cells(rows, "over_floor"), need(rows, "ladder", estimator="to go")
    return {
        "times_as_noisy": over["return"] / over["to go"],
        "environments_otherwise": int(to_go["noisier_than_return"].sum()),
        "environments": int(to_go["compared"].sum()),
    }


@claims.measure(f"{OWN}: a baseline by prefix takes the past out of the return as well", "exact", noisier=exactly(0))
def _prefix_return(rows: pd.DataFrame) -> Measured:
    """with its best baseline by prefix to go is never noisier than the whole return, in any environment"""
    found = need(rows, "ladder", estimator=("to go, baseline by prefix", "rao-blackwell, critic"))
    return {"noisier": found["noisier_than_return"], "environments": int(found["compared"].sum())}


def _gains_of_mixtures(rows: pd.DataFrame) -> pd.Series:
    found = need(rows, "mixtures")
    return found["rao-blackwell, one baseline: over_floor"] / found["all: over_floor"]


@claims.measure(
    OWN,
    "medians over environments, weights best for each",
    sampled_alone=above(2),
    weight_of_rao_blackwell=above(0.8),
    gain=below(3),
)
def _mixtures(rows: pd.DataFrame) -> Measured:
    """no mixture of sampled log-probs comes nearer than {sampled_alone} times the floor, and one with Rao–Blackwell is
    mostly that, with a weight above {weight_of_rao_blackwell} and less than {gain} times less noise than it alone"""
    found = need(rows, "mixtures")
    return {
        "sampled_alone": found["sampled log-probs: over_floor"],
        "weight_of_rao_blackwell": found["weight of rao-blackwell"],
        "gain": _gains_of_mixtures(rows),
    }


# --------------------------------------------------------------------------------------------------- exact KLs, budget
claims.column(
    "with exact next-token KLs at any prefixes, and sampled ones elsewhere, the variance is Rao–Blackwell's "
    "plus `Σ d(1 − c)·gain`: of value, token-level gradient and whole gradient, by recursion and by enumeration",
    OWN,
    "of the variances: two routes in float64",
    "off_again",
    near(0, EXACT),
    "budget",
)


@claims.measure(OWN, "exact, an order", of_both=at_most(1 + EXACT), of_the_best_mixture_in_the_published_pair=below(1))
def _threshold(rows: pd.DataFrame) -> Measured:
    """exact KLs at the prefixes with a positive gain alone are no noisier than exact KLs everywhere or nowhere, and in
    the published pair less noisy than the best mixture of these two"""
    found, one = need(rows, "pair"), _published(rows)
    return {
        "of_both": found["threshold"] / found[["monte_carlo", "rao_blackwell"]].min(axis=1),
        "of_the_best_mixture_in_the_published_pair": one["threshold"] / one["mixture"],
    }


@claims.measure(
    OWN,
    "medians over environments",
    removed=above(0.6),
    without_looking_ahead=above(0.6),
    share=QUARTER,
    spread=at_least(4),
)
def _few_positions(rows: pd.DataFrame, share: float, spread: Bound) -> Measured:
    """for sure policies, of a spread from {spread} on, exact KLs at a share of {share} of the positions remove more
    than {removed} of what they can remove, also if they are chosen by `Var(u | s)` alone"""
    found = need(rows, "budget", share=share, spread=spread)
    return {
        "removed": need(found, rule="optimal")["removed"],
        "without_looking_ahead": need(found, rule="variance")["removed"],
    }


@claims.measure(OWN, "medians over environments; what chance removes is the share itself", less=above(0), share=QUARTER)
def _entropy(rows: pd.DataFrame, share: float) -> Measured:
    """for a share of {share} of the positions the policy's entropy chooses worse than `Var(u | s)`, at every distance
    and spread"""
    found = need(rows, "budget", share=share).pivot_table("removed", ["of", "spread", "distance", "seed"], "rule")
    return {"less": found["variance"] - found["entropy"], "entropy": found["entropy"]}


claims.column(
    "choosing positions by the sampled log-ratio itself biases the value: at logit noises of {distance} the "
    "relative bias is below {bound}, at every spread",
    OWN,
    "medians over environments; nearer to the reference signs vary",
    "bias_by_token",
    below(-0.1),
    "budget",
    distance=(1.0, 3.0),
)


claims.column(
    "at the optimum of `E[R] − β·KL` the objective `R − β·Σu` has no noise, and each exact KL adds `β²·Var(u | s)`",
    f"{OWN}; that sampled terms have no noise there: Roeder et al. 2017 (arXiv 1703.09194)",
    "of the variance: two routes in float64",
    "off_optimum",
    near(0, EXACT),
    "budget",
)


claims.column(
    "along a path of training the same theorem, the reward in the gain, says how much exact KLs add to the "
    "objective's variance: recursion and enumeration agree",
    OWN,
    "of the variance: two routes in float64",
    "off_gain",
    near(0, EXACT),
    "reward",
)

claims.column(
    "trained from the reference, exact KLs beside a sampled reward make the gradient of `E[R] − β·KL` "
    "noisier than sampled ones do, in every environment, all along the path, each with its best single baseline",
    OWN,
    "exact, an order",
    "gradient",
    above(1),
    "reward",
    start="reference",
    made=above(0),
)


def _language(rows: pd.DataFrame, by: list[str], column: str = "removed", **wanted: Any) -> pd.DataFrame:
    """Mean and 95 % interval over seeds (Student's t) of a column of the language model's record."""
    found = need(rows, "language", **wanted).groupby(by)[column].agg(["mean", "std", "size"])
    require((found["size"] > 1).all())
    reach = t.ppf(0.975, found["size"] - 1) * found["std"] / np.sqrt(found["size"])
    return found.assign(low=found["mean"] - reach, high=found["mean"] + reach)


def _in_training(rows: pd.DataFrame) -> pd.DataFrame:
    """The record's variances along training, as ratios."""
    found = need(rows, "language", what="training")
    return found.assign(
        removed=1 - found["exact"] / found["sampled"],
        own=found["own"] / found["sampled"],
        objective=found["objective_exact"] / found["objective_sampled"],
    )


@claims.measure(OWN, "ends of 95 % intervals over seeds", by_variance=above(0.5), by_entropy=below(0.5), share=0.2)
def _language_model(rows: pd.DataFrame, share: float) -> Measured:
    """recorded, for a language model: of what exact KLs remove from the noise of the token-level gradient at logits, a
    share of {share} of the positions, those with the largest `Var(u | s)`, has more than {by_variance}; those with the
    largest entropy have less than {by_entropy}"""
    found = _language(rows, ["rule"], what="logits", share=share)
    return {"by_variance": found.loc["variance", "low"], "by_entropy": found.loc["entropy", "high"]}


@claims.measure(
    OWN,
    "ends of 95 % intervals over seeds",
    removed_at_first=above(0.8),
    removed_at_last=below(0.4),
    noise_of_the_objective=above(1),
)
def _while_it_trains(rows: pd.DataFrame) -> Measured:
    """recorded, while a language model trains: exact KLs everywhere remove more than {removed_at_first} of the variance
    of the KL's estimate at first and less than {removed_at_last} at last, and leave that of the objective `R − β·KL`
    more than {noise_of_the_objective} times as large all along"""
    training = _in_training(rows)
    removed, objective = (
        _language(training, ["update"], column, what="training") for column in ("removed", "objective")
    )
    return {
        "removed_at_first": removed["low"].iloc[0],
        "removed_at_last": removed["high"].iloc[-1],
        "noise_of_the_objective": objective["low"],
    }


# ----------------------------------------------------------------------------------------------------------- the bandit
def _medians(rows: pd.DataFrame, rate: float) -> pd.Series:
    """Median KL at the end by rule, where the study was run as stated, with as many seeds or more."""
    ends = need(rows, "bandit", what="end", rate=rate, **STUDY)
    return ends[ends["runs"] >= SEEDS].groupby("rule")["kl"].median()


@claims.measure(
    STUDY_OF_λ,
    "the margin was published with the medians",
    rate=PUBLISHED_RATE,
    right_over_wrong=below(1),
    λ_1_less_λ_gradient=near(0, MEDIAN_TOLERANCE),
    λ_value_less_λ_0=above(-MEDIAN_TOLERANCE),
)
def _as_published(rows: pd.DataFrame, rate: float) -> Measured:
    """on the bandit at learning rate {rate:g} λ_value is no better than `λ = 0`, `λ = 1` as good as λ_grad (medians of
    the KL at the end, a margin of {λ_1_less_λ_gradient:±} nats), and both of these end nearer than both of those"""
    found = _medians(rows, rate)
    require({"0", "1", "value", "gradient"} <= set(found.index))
    return {
        "right_over_wrong": found[["1", "gradient"]].max() / found[["0", "value"]].min(),
        "λ_1_less_λ_gradient": found["1"] - found["gradient"],
        "λ_value_less_λ_0": found["value"] - found["0"],
        "medians": [f"{rule}: {kl:.3f}" for rule, kl in found.items()],
    }


for _rate, _harmed, _well, _words in (
    (10.0, ["0", "value"], ["1", "gradient"], "`λ = 0` and λ_value have collapsed, `λ = 1` and λ_grad have not"),
    (20.0, ["0", "value", "1"], ["gradient"], "`λ = 1` has collapsed as well, λ_grad has not"),
):

    @claims.measure(
        STUDY_OF_λ,
        "medians over seeds",
        harmed_over_start=above(1),
        unharmed=within(0.20, 0.35),
        rate=_rate,
        claim=f"at rate {{rate:g}} {_words}: the KL ends above the start's or at {{unharmed}}",
        rules=_harmed,
        well=_well,
    )
    def _collapse(rows: pd.DataFrame, rate: float, rules: list[str], well: list[str]) -> Measured:
        found, start = _medians(rows, rate), need(rows, "bandit", what="path", step=0)["kl"].iloc[0]
        require({*rules, *well} <= set(found.index))
        return {"harmed_over_start": found[rules] / start, "unharmed": found[well], "start": start}


@claims.measure(STUDY_OF_λ, "differences of variances up to 1e4", value_off=near(0, 1e-9), gradient_off=near(0, 1e-9))
def _formulas(rows: pd.DataFrame) -> Measured:
    """the λ of the least noisy value is `−Cov(u, w)/Var w`, that of the least noisy gradient `1 + E[u‖g‖²]/E‖g‖²`:
    there the parabolas through enumerated variances are least"""
    found = need(rows, "noise").sort_values("lam")
    require(len(found) >= 3)
    three, off = found.iloc[[0, len(found) // 2, -1]], {}
    for name in ("value", "gradient"):
        bend, slope, _ = np.linalg.solve(np.vander(three["lam"], 3), three[f"{name}_variance"])
        off[f"{name}_off"] = -slope / (2 * bend) - found.iloc[0][f"least_noisy_{name}"]
    return {**off, "λ": found.iloc[0][["least_noisy_value", "least_noisy_gradient"]]}


@claims.measure(STUDY_OF_λ, "exact, an order", value=above(1), gradient=below(1))
def _opposed(rows: pd.DataFrame) -> Measured:
    """k3's λ = one makes the bandit's value noisier and its gradient less noisy than k1's λ = zero"""
    at = need(rows, "noise").groupby("lam")[["value_variance", "gradient_variance"]].last()
    require({0.0, 1.0} <= set(at.index))
    value, gradient = at.loc[1.0] / at.loc[0.0]
    return {"value": value, "gradient": gradient}


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
    yield number("random environments near", found[NEAR(found["distance"])]["environments"].sum())


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


numbers.add(lambda rows: [number("pair threshold", _published(rows)["threshold"])])


@numbers.add
def _of_budgets(rows: pd.DataFrame) -> Cited:
    found = need(rows, "budget")
    means = found.groupby(["of", "rule", "share", "spread"])["removed"].mean()
    yield from melted(means.to_frame("removed"), ["removed"])


@numbers.add
def _of_rewards(rows: pd.DataFrame) -> Cited:
    found = need(rows, "reward").groupby(["start", "made"])
    for name in ("value", "gradient"):
        yield from melted(found[[name]].median(), {name: f"median {name} with reward"})
        yield from melted((found[name].agg(lambda ratio: (ratio > 1).mean())).to_frame(), {name: f"share {name} worse"})


@numbers.add
def _of_the_language_model(rows: pd.DataFrame) -> Cited:
    found = need(rows, "language")
    yield number("language model seeds", found["seed"].nunique())
    shares = ("value", "logits", "weights", "bias")
    yield from _bounded(_language(rows, ["what", "rule", "share"], what=shares), "language model")
    yield number("language model at last", found["update"].max())
    training = _in_training(rows)
    for column in ("kl", "removed", "own", "objective"):
        yield from _bounded(_language(training, ["update"], column, what="training"), f"training {column}")


def _bounded(found: pd.DataFrame, quantity: str) -> Cited:
    yield from melted(found, {"mean": quantity})
    for bound in ("low", "high"):
        for row in melted(found, {bound: quantity}):
            yield {**row, "bound": bound}
