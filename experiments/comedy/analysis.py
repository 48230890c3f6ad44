"""Bias and noise by placement: claims, a table by placement, and the numbers that the paper cites."""

import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Missing, Row, known, need, ordered, require, select
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

from .settings import ANCHOR, ESTIMATORS, EXACT, PARTS, PLACEMENTS, PUBLISHED

SHAH = "Shah et al. 2025 (arXiv 2512.21852), Fig. 2"
TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the product rule for E[k]"
THEORY = "theory"
# Below and above the distances at which the two variances can be equal (those are measured and claimed as well).
NEAR, FAR = 0.1, 0.8
# The order of one pair is looked for from this length on, to that at which its distance is given.
SHORT = 6
# Fewer random pairs say nothing about shares.
FEW = 50
# A bias below one percent of the gradient would not be called clear.
CLEAR = 0.01
# Of some hundreds of numbers, none is off by more than this many standard errors but with probability below 1e-3.
ERRORS = 5.5
ROUNDING = f"{EXACT:g} of the gradient: exact up to rounding"
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


claims.bound("k1 in the reward is unbiased at every length, near and far", SHAH, "0", ROUNDING, "bias", EXACT, "length",
    **dict(zip(WHICH, K1_REWARD, strict=True)))  # fmt: skip


@claims.add(SHAH, "k1 in loss 1 exactly, the others clear of 0", f"clear: above {CLEAR:g} of the gradient")
def _biased(rows: pd.DataFrame) -> Answer:
    """for the stated pair k1 in the loss, k3 in the loss and k3 in the reward are biased at every length"""
    bias = _cells(rows, "bias")
    wrong = [which for which in PUBLISHED if which != K1_REWARD]
    require(set(wrong) <= set(bias))
    words = {which: f"{which[0].removesuffix('-loss')} in {which[1]}" for which in wrong}
    said = ", ".join(f"{words[which]} {bias[which].min():.2f} to {bias[which].max():.2f}" for which in wrong)
    return said, (bias[K1_LOSS] - 1).abs().max() < EXACT and bias[wrong].min(axis=None) > CLEAR


claims.between("for the stated pair k3 in the reward has the largest bias of the four", SHAH,
    "at every length and distance", "an order", "in {total} of {count} lengths and distances",
    lambda rows: _cells(rows, "bias")[list(PUBLISHED)].idxmax(axis=1) == K3_REWARD, above=0.5)  # fmt: skip


def _std(rows: pd.DataFrame, least: float = -1.0, most: float = float("inf"), **wanted: object) -> pd.DataFrame:
    """Standard deviations in the cells whose rollouts are this far from the reference."""
    std = _cells(rows, "std", **wanted)
    distance = _cells(rows, "rollout_kl", **wanted)[K1_REWARD]
    return known(std[(distance >= least) & (distance <= most)])


@claims.add(SHAH, f"at every length, where KL ≤ {NEAR:g}", "an order")
def _near(rows: pd.DataFrame) -> Answer:
    """near the reference, for the stated pair, k1 in the loss is the noisiest of the four"""
    std = _std(rows, most=NEAR)[list(PUBLISHED)]
    hits, ratios = (std.idxmax(axis=1) == K1_LOSS).sum(), std[K1_LOSS] / std[K1_REWARD]
    said = f"the noisiest of four in {hits} of {len(std)}; {ratios.min():.1f} to {ratios.max():.1f} times k1 in reward"
    return said, hits == len(std)


claims.between("away from it, for the stated pair, k1 in the loss is less noisy than k1 in the reward", THEORY,
    f"at every length, where KL ≥ {FAR:g}", "an order", "{low:.2f} to {high:.2f} times k1 in reward",
    lambda rows: _std(rows, least=FAR - 1e-9).pipe(lambda std: std[K1_LOSS] / std[K1_REWARD]), below=1)  # fmt: skip


@claims.add(OWN, f"between {NEAR:g} and {FAR:g} nats for whole sequences, at every length",
    "the root of a difference of exact variances")  # fmt: skip
def _equal(rows: pd.DataFrame) -> Answer:
    """at which distance the two are equally noisy hardly depends on length, for the stated pair"""
    at = need(rows, "order")["equal_at"]
    if at.isna().any():
        return "no such distance", False
    said = f"at a KL of {at.min():.3f} to {at.max():.3f}, over {len(at)} lengths"
    return said, at.min() > NEAR and at.max() < FAR


@claims.add(OWN, "k1 in the loss noisier when short, less noisy when long", "an order")
def _one_pair(rows: pd.DataFrame) -> Answer:
    """of one pair the order changes with length alone"""
    where = {"hold": "pair", "kl": lambda x: x >= FAR}
    lengths = need(rows, "length", estimator=K1_LOSS[0], placement=K1_LOSS[1], **where)["length"]
    require(lengths.min() <= SHORT and lengths.max() >= ANCHOR)
    found = _changes(rows)
    return "; ".join(f"between T = {short} and {long}" for short, long in found) or "it does not", bool(found)


def _changes(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """Of one pair, the lengths between which k1 in the loss becomes the less noisy, where it is far enough away."""
    found, std = [], _cells(rows, "std", hold="pair")
    for kl, mine in std.groupby("kl"):
        last = mine.groupby("length").last()
        noisier = last[K1_LOSS] > last[K1_REWARD]
        short, long = last.index[noisier], last.index[~noisier]
        if kl >= FAR and len(short) and len(long) and short.max() < long.min():
            found.append((int(short.max()), int(long.min())))
    return found


claims.bound("k1 and k3 in both places are unbiased", TANG_MUNOS, "0", ROUNDING, "bias", EXACT, "length",
    estimator=("k1-loss", "k3-loss"), placement="both")  # fmt: skip


@claims.add(OWN, f"less than half as many, at every length, where KL ≤ {NEAR:g}",
    "a ratio of exact variances of two unbiased gradients")  # fmt: skip
def _both(rows: pd.DataFrame) -> Answer:
    """near the reference, for the stated pair, k3 in both places needs fewer rollouts than k1 in the reward"""
    near = _gain(rows, 0, NEAR)
    said = f"{near.min():.1f} to {near.max():.1f} times fewer rollouts"
    try:
        far = _gain(rows, FAR - 1e-9, FAR + 1e-9)
        said += f"; at KL {FAR:g} {far.min():.2f} to {far.max():.1f}"
    except Missing:
        pass
    return said, near.min() > 2


def _gain(rows: pd.DataFrame, least: float, most: float, **wanted: object) -> pd.Series:
    """Ratio of the rollouts that k1 in the reward and k3 in both places need at distances, both unbiased."""
    std = _std(rows, least, most + 1e-9, **wanted)
    return (std[K1_REWARD] / std[K3_BOTH]) ** 2


def _share(rows: pd.DataFrame, column: str, least: float, most: float, **wanted: object) -> Answer:
    found = need(rows, "random", **wanted)
    hits, pairs = found[column].sum(), found["pairs"].sum()
    require(pairs >= FEW)
    return f"in {hits} of {pairs} random pairs", least < hits / pairs < most


@claims.add(OWN, "for more than half of random pairs, not for all", "shares, of independent draws")
def _most_biased(rows: pd.DataFrame) -> Answer:
    """that k3 in the reward has the largest bias depends on the pair"""
    return _share(rows, "most_biased_is_k3_reward", 0.5, 0.95)


@claims.add(OWN, "for most, not for all", "shares, of independent draws")
def _less_noisy(rows: pd.DataFrame) -> Answer:
    """k3 in both places beats k1 in the reward on random pairs too"""
    return _share(rows, "k3_both_less_noisy_than_k1_reward", 0.5, 1.0)


@claims.add(OWN, f"for nearly all where KL ≤ {NEAR:g}", "95 %: shares, of independent draws")
def _noisiest(rows: pd.DataFrame) -> Answer:
    """near the reference k1 in the loss is the noisiest of the four on random pairs too"""
    return _share(rows, "k1_loss_noisiest", 0.95, 1.01, kl=lambda x: x <= NEAR)


@claims.add(OWN, f"for nearly all where KL ≥ {FAR:g}", "90 %: shares, of independent draws")
def _less_far(rows: pd.DataFrame) -> Answer:
    """away from it k1 in the loss is less noisy than k1 in the reward on random pairs too"""
    return _share(rows, "k1_loss_less_noisy_than_k1_reward", 0.9, 1.01, kl=lambda x: x >= FAR)


claims.bound("k1 in the reward, and k1 and k3 in both places, are unbiased on random pairs too",
    f"{SHAH}; {TANG_MUNOS}", "0", ROUNDING, "bias_of_unbiased", EXACT, "random")  # fmt: skip


def _sampled(rows: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    return known(need(rows, "length", **wanted).dropna(subset=["z_mean"]))


@claims.add("200 × 1,000 samples, as in Shah et al. 2025", f"within {ERRORS:g} standard errors",
    "over some hundred gradients of three free components")  # fmt: skip
def _samples(rows: pd.DataFrame) -> Answer:
    """sampled gradients agree with the exact ones"""
    found = _sampled(rows)
    off, std = found["z_mean"].max(), found["z_std"].abs().max()
    said = f"means off by at most {off:.1f} standard errors, spreads by {std:.1f}; {len(found)} gradients"
    return said, max(off, std) < ERRORS


claims.bound("counting types agrees with enumeration of all sequences and with dynamic programming", "two routes", "0",
    f"{EXACT:g} of the gradient and of its square", "off_again", EXACT, "length")  # fmt: skip


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
        yield from extremes("gain of k3 in both", _gain(need(found, kl=kl), kl, kl) if kl <= FAR else (), kl=kl)


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
