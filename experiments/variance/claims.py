"""Noise of unbiased gradients: claims, and the ladder as a table."""

from typing import Any

import pandas as pd

from kltest.reproduce.bounds import Bound, above, at_least, at_most, below, exactly
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, need, ordered, records, require, select

from ..spread import interval
from .experiment import PARTS, PUBLISHED

CHECK = "Chen 2026, a post with a script, check_kl.py, 29 September 2026"
AMINI = "Amini, Vieira & Cotterell 2025 (arXiv 2504.10637): Rao–Blackwell's variance is never the larger one"

# Of the published pair: KL, variance of the Monte Carlo and of the Rao–Blackwell value.
PAIR = ("kl", "monte_carlo", "rao_blackwell")
# Random environments: up to the first logit noise nothing fails, from the second on something does.
NEAR, FAR, MILD = at_most(0.3), at_least(3.0), at_most(1.0)
# Fewer random environments say nothing about what is rare.
MANY = 1000

# The share of the positions of which claims about budgets are made.
QUARTER = 0.25

# From what needs least to what needs most.
SAMPLED, FULL = "sampled log-probs", "full next-token distributions"
BY_PREFIX, CRITIC = "and a baseline for each prefix", "and the expected KL to go"
SEES = {
    **dict.fromkeys(
        ("return", "k3 in both", "to go", "k3 in both, to go", "to go, best λ", "to go, one baseline"), SAMPLED
    ),
    "to go, baseline by prefix": BY_PREFIX,
    "to go, critic": CRITIC,
    **dict.fromkeys(("rao-blackwell", "rao-blackwell, one baseline"), FULL),
    "rao-blackwell, baseline by prefix": BY_PREFIX,
    "rao-blackwell, critic": CRITIC,
}

claims = Claims("variance")
tidy = ordered(PARTS)


# ------------------------------------------------------------------------------------------------------ the inequality
def _published(rows: pd.DataFrame) -> pd.Series:
    return need(rows, "pair", reference=PUBLISHED).iloc[0]


@claims.measure(f"{CHECK}; against {AMINI}", "an order of exact variances", times_as_noisy=above(1))
def _noisier(rows: pd.DataFrame) -> Measured:
    """Rao–Blackwell's value can be the noisier one: the inequality that was published fails for two tokens"""
    row = _published(rows)
    return {"times_as_noisy": row["rao_blackwell"] / row["monte_carlo"], **{name: f"{row[name]:.5f}" for name in PAIR}}


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


COUNTS = "exact for each environment; counts over the same cells"


@claims.measure(OWN, COUNTS, more_failures=above(0), name="spread", distance=FAR, spread=at_least(0))
def _fails_by(rows: pd.DataFrame, name: str, distance: Bound, spread: Bound) -> Measured:
    """it fails more often where the policy is sure of its tokens: at the largest spread of logits more than at the
    smallest"""
    found = need(rows, "rates", distance=distance, spread=spread)
    others = [one for one in ("vocabulary", "length", "distance", "spread", "seed") if one != name]
    # In cells that both ends have.
    cells = found.assign(share=found["value_fails"] / found["environments"]).pivot_table("share", others, name)
    ends = cells[list(dict.fromkeys((cells.columns.min(), cells.columns.max())))].dropna().mean()
    require(len(ends) == 2 and found["environments"].sum() >= MANY)
    few, many = ends
    return {"more_failures": many - few, "failures": [f"{share:.1%} at {end:g}" for end, share in ends.items()]}


@claims.measure(OWN, COUNTS, more_failures=below(0), name="vocabulary", distance=FAR, spread=MILD)
def _fails_by_vocabulary(rows: pd.DataFrame, name: str, distance: Bound, spread: Bound) -> Measured:
    """for mild policies, of a spread up to {spread}, it fails less often with more tokens to choose from: with the
    largest vocabulary less than with the smallest"""
    return _fails_by(rows, name, distance, spread)


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


# -------------------------------------------------------------------------------------------------- what can be gained


@claims.measure(OWN, "medians over environments", over_floor=below(1.2), distance=at_most(0.1))
def _near_floor(rows: pd.DataFrame, distance: Bound) -> Measured:
    """near the reference, up to a logit noise of {distance}, Rao–Blackwell alone has all but reached the floor: below
    {over_floor} times it"""
    return {"over_floor": need(rows, "ladder", estimator="rao-blackwell", distance=distance)["over_floor"]}


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


def _over_floor(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each length, distance and seed, a column for each estimator."""
    return need(rows, "ladder").pivot_table("over_floor", ["length", "distance", "seed"], "estimator")


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
    over = _over_floor(rows)
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
    over, to_go = _over_floor(rows), need(rows, "ladder", estimator="to go")
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


# --------------------------------------------------------------------------------------------------- exact KLs, budget
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


def _language(rows: pd.DataFrame, by: list[str], column: str = "removed", **wanted: Any) -> pd.DataFrame:
    """Mean and 95 % interval over seeds (Student's t) of a column of the language model's record."""
    found = need(rows, "language", **wanted).groupby(by)[column].apply(lambda values: interval(list(values)))
    return pd.DataFrame([vars(one) for one in found], found.index)


def _in_training(rows: pd.DataFrame) -> pd.DataFrame:
    """The record's variances along training, as ratios."""
    found = need(rows, "language", what="training")
    return found.assign(
        removed=1 - found["exact"] / found["sampled"], objective=found["objective_exact"] / found["objective_sampled"]
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
