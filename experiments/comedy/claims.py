"""Bias and noise by placement: claims, a table by placement, and the numbers that the paper cites."""

import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, near, within
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, known, need, ordered, require, select
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

from .settings import ANCHOR, ESTIMATORS, EXACT, PARTS, PLACEMENTS, PUBLISHED

SHAH = "Shah et al. 2025 (arXiv 2512.21852), Fig. 2"
TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the product rule for E[k]"
# Distances near the reference and away from it. The stated pairs are solved for to these, so not to the last bit.
NEAR, FAR = at_most(0.1), at_least(0.8 - 1e-9)
# The order of one pair is looked for from this length on, to that at which its distance is given.
SHORT = 6
# Fewer random pairs say nothing about shares.
FEW = 50
ROUNDING = "relative to the gradient, exact up to rounding"
WHICH = ["estimator", "placement"]
K1_LOSS, K1_REWARD = ("k1-loss", "loss"), ("k1-loss", "reward")
K3_REWARD, K3_BOTH = ("k3-loss", "reward"), ("k3-loss", "both")

claims = Claims("comedy")
numbers = Numbers()
tidy = ordered(PARTS)


def _cells(rows: pd.DataFrame, column: str, **wanted: object) -> pd.DataFrame:
    """A column for each length, distance, way to hold it and seed; across, each estimator and placement."""
    found = need(rows, "length", **wanted)
    return found.pivot_table(column, ["length", "kl", "hold", "seed"], WHICH, sort=False)


claims.column(
    "k1 in the reward is unbiased at every length, near and far",
    SHAH,
    ROUNDING,
    "bias",
    near(0, EXACT),
    "length",
    **dict(zip(WHICH, K1_REWARD, strict=True)),
)


@claims.measure(
    SHAH,
    "a bias below one percent of the gradient would not be called clear",
    bias_of_k1_in_loss=near(1, EXACT),
    bias_of_k3=above(0.01),
)
def _biased(rows: pd.DataFrame) -> Measured:
    """for the stated pair k1 in the loss, k3 in the loss and k3 in the reward are biased at every length: k1 has no
    gradient, and the bias of k3 is more than {bias_of_k3:.0%} of the gradient"""
    bias = _cells(rows, "bias")
    wrong = [which for which in PUBLISHED if which not in (K1_REWARD, K1_LOSS)]
    require({*wrong, K1_LOSS} <= set(bias))
    return {"bias_of_k1_in_loss": bias[K1_LOSS], "bias_of_k3": bias[wrong]}


@claims.measure(SHAH, "an order", largest_is_k3_in_reward=EVERY)
def _largest(rows: pd.DataFrame) -> Measured:
    """for the stated pair k3 in the reward has the largest bias of the four at every length and distance"""
    return {"largest_is_k3_in_reward": _cells(rows, "bias")[list(PUBLISHED)].idxmax(axis=1) == K3_REWARD}


def _std(rows: pd.DataFrame, kl: Bound, **wanted: object) -> pd.DataFrame:
    """Standard deviations in the cells whose rollouts are this far from the reference."""
    std = _cells(rows, "std", **wanted)
    return known(std[kl(_cells(rows, "rollout_kl", **wanted)[K1_REWARD])])


@claims.measure(SHAH, "an order", noisiest_is_k1_in_loss=EVERY, kl=NEAR)
def _near(rows: pd.DataFrame, kl: Bound) -> Measured:
    """near the reference (KL up to {kl}), for the stated pair, k1 in the loss is the noisiest of the four at every
    length"""
    std = _std(rows, kl)[list(PUBLISHED)]
    return {
        "noisiest_is_k1_in_loss": std.idxmax(axis=1) == K1_LOSS,
        "times_k1_in_reward": std[K1_LOSS] / std[K1_REWARD],
    }


@claims.measure(OWN, "an order", times_k1_in_reward=below(1), kl=FAR)
def _away(rows: pd.DataFrame, kl: Bound) -> Measured:
    """away from it (KL from {kl} on), for the stated pair, k1 in the loss is less noisy than k1 in the reward at every
    length"""
    return {"times_k1_in_reward": _std(rows, kl).pipe(lambda std: std[K1_LOSS] / std[K1_REWARD])}


@claims.measure(OWN, "the root of a difference of exact variances", kl=within(0.1, 0.8))
def _equal(rows: pd.DataFrame) -> Measured:
    """the two are equally noisy at a KL of {kl} nats for whole sequences, at every length, for the stated pair"""
    return {"kl": need(rows, "order")["equal_at"]}


@claims.measure(OWN, "an order", pairs_that_change=at_least(1), shortest=at_most(SHORT), longest=at_least(ANCHOR))
def _one_pair(rows: pd.DataFrame, shortest: Bound, longest: Bound) -> Measured:
    """of one pair the order changes with length alone: k1 in the loss is noisier up to some length, less noisy from
    there on, between {shortest} tokens and {longest}"""
    where = {"hold": "pair", "kl": FAR}
    lengths = need(rows, "length", estimator=K1_LOSS[0], placement=K1_LOSS[1], **where)["length"]
    require(shortest(lengths.min()) and longest(lengths.max()))
    found = _changes(rows)
    return {"pairs_that_change": len(found), "between": [f"T = {short} and {long}" for short, long in found] or "none"}


def _changes(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """Of one pair, the lengths between which k1 in the loss becomes the less noisy, where it is far enough away."""
    found, std = [], _cells(rows, "std", hold="pair")
    for kl, mine in std.groupby("kl"):
        last = mine.groupby("length").last()
        noisier = last[K1_LOSS] > last[K1_REWARD]
        short, long = last.index[noisier], last.index[~noisier]
        if FAR(kl) and len(short) and len(long) and short.max() < long.min():
            found.append((int(short.max()), int(long.min())))
    return found


claims.column(
    "k1 and k3 in both places are unbiased",
    TANG_MUNOS,
    ROUNDING,
    "bias",
    near(0, EXACT),
    "length",
    estimator=("k1-loss", "k3-loss"),
    placement="both",
)


@claims.measure(OWN, "a ratio of exact variances of two unbiased gradients", times_fewer=above(2), kl=NEAR)
def _both(rows: pd.DataFrame, kl: Bound) -> Measured:
    """near the reference (KL up to {kl}), for the stated pair, k3 in both places needs more than {times_fewer} times
    fewer rollouts than k1 in the reward, at every length"""
    return {"times_fewer": _gain(rows, kl)}


def _gain(rows: pd.DataFrame, kl: Bound, **wanted: object) -> pd.Series:
    """Ratio of the rollouts that k1 in the reward and k3 in both places need at distances, both unbiased."""
    std = _std(rows, kl, **wanted)
    return (std[K1_REWARD] / std[K3_BOTH]) ** 2


ANY = at_least(0)
for _words, _column, _bound, _kl in (
    (
        "in {share:.0%} of random pairs, and no more, k3 in the reward has the largest bias of the four: it depends on "
        "the pair",
        "most_biased_is_k3_reward",
        within(0.5, 0.95),
        ANY,
    ),
    (
        "k3 in both places beats k1 in the reward on most random pairs, {share:.0%} of them, and not on all",
        "k3_both_less_noisy_than_k1_reward",
        within(0.5, 1.0),
        ANY,
    ),
    (
        "near the reference (KL up to {kl}) k1 in the loss is the noisiest of the four on more than {share:.0%} of "
        "random pairs too",
        "k1_loss_noisiest",
        above(0.95),
        NEAR,
    ),
    (
        "away from it (KL from {kl} on) k1 in the loss is less noisy than k1 in the reward on more than {share:.0%} of "
        "random pairs too",
        "k1_loss_less_noisy_than_k1_reward",
        above(0.9),
        FAR,
    ),
):

    @claims.measure(OWN, "shares of independent draws", claim=_words, share=_bound, kl=_kl, what=_column)
    def _share(rows: pd.DataFrame, kl: Bound, what: str) -> Measured:
        found = need(rows, "random", kl=kl)
        pairs = found["pairs"].sum()
        require(pairs >= FEW)
        return {"share": found[what].sum() / pairs, "pairs": pairs}


claims.column(
    "k1 in the reward, and k1 and k3 in both places, are unbiased on random pairs too",
    f"{SHAH}; {TANG_MUNOS}",
    ROUNDING,
    "bias_of_unbiased",
    near(0, EXACT),
    "random",
)


def _sampled(rows: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    return known(need(rows, "length", **wanted).dropna(subset=["z_mean"]))


@claims.measure(
    "200 × 1,000 samples, as in Shah et al. 2025",
    "some hundred numbers: with probability below 0.001 one of them is further off",
    means_off=below(5.5),
    spreads_off=near(0, 5.5),
)
def _samples(rows: pd.DataFrame) -> Measured:
    """sampled gradients agree with the exact ones: means and spreads are within {means_off} standard errors"""
    found = _sampled(rows)
    return {"means_off": found["z_mean"], "spreads_off": found["z_std"]}


claims.column(
    "counting types agrees with enumeration of all sequences and with dynamic programming",
    "two routes",
    ROUNDING,
    "off_again",
    near(0, EXACT),
    "length",
)


def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """Bias and standard deviation relative to the gradient, at the shortest and the longest length."""
    found = select(rows, "length", hold="kl", seed=0)
    if found.empty:
        return {}
    ends = dict.fromkeys((found["length"].min(), found["length"].max()))
    cells = found.set_index(["estimator", "placement", "kl", "length"])[["bias", "std"]].to_dict("index")

    def cell(*at: object) -> str:
        return f"{_short(cells[at]['bias'])} ± {cells[at]['std']:.2f}" if at in cells else ""

    columns = {f"KL {kl:g}, T = {length}": (kl, length) for kl in sorted(found["kl"].unique()) for length in ends}
    return {
        "table": [
            {
                "estimator": estimator.removesuffix("-loss"),
                "placed in": placement,
                **{title: cell(estimator, placement, *at) for title, at in columns.items()},
            }
            for estimator in ESTIMATORS
            for placement in PLACEMENTS
        ]
    }


def _short(bias: float) -> str:
    return "0" if bias < EXACT else f"{bias:.2f}"


@numbers.add
def _of_lengths(rows: pd.DataFrame) -> Cited:
    found = need(rows, "length", hold="kl", seed=0)
    yield number("shortest", found["length"].min())
    yield number("longest", found["length"].max())
    yield number("types", found["types"].max())
    yield number("off second route", need(rows, "length")["off_again"].max())
    for kl in found["kl"].unique():
        yield from extremes("gain of k3 in both", _gain(need(found, kl=kl), ANY), kl=kl)


@numbers.add
def _of_samples(rows: pd.DataFrame) -> Cited:
    found = _sampled(rows, hold="kl", seed=0)
    yield number("largest deviation in standard errors", max(found["z_mean"].max(), found["z_std"].abs().max()))


@numbers.add
def _of_orders(rows: pd.DataFrame) -> Cited:
    yield from extremes("KL of equal noise", need(rows, "order")["equal_at"])
    for short, _ in _changes(rows)[-1:]:
        yield number("order changes after", short)


@numbers.add
def _of_random_pairs(rows: pd.DataFrame) -> Cited:
    found = need(rows, "random")
    yield number("random pairs", found["pairs"].sum())
    for name in ("most_biased_is_k3_reward", "most_biased_is_k1_loss", "k3_both_less_noisy_than_k1_reward"):
        yield number("share of pairs", found[name].sum() / found["pairs"].sum(), where=name.replace("_", " "))
