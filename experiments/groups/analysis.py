"""Effects of masks, baselines and normalisation on the penalty: claims, tables and the numbers that the paper cites."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Row, frame, known, mean, need
from kltest.reproduce.numbers import Cited, Numbers, extremes, number

from .settings import EXACT

ORDER = ("part", "estimator", "group_size", "success", "push", "batch_size", "beta", "seed")
# Exact training has settled where its gradient is shorter than this; what it reached is then known about as well.
SETTLED, REACHED = 1e-9, 1e-7
MASKS = "TRL #5588 and #5640"

LIMIT = f"{EXACT:g}"

claims = Claims("groups")
numbers = Numbers()


def tidy(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows in a fixed order; if exact training has a fixed point in closed form, `predicted` is P(right) there."""
    found = [{**row, "predicted": predicted(row)} if row["part"] == "training" else dict(row) for row in rows]
    return frame(sorted(found, key=lambda row: [(row.get(name) is not None, str(row.get(name))) for name in ORDER]))


def predicted(row: Row) -> float | None:
    """P(right) at the fixed point. If both weights c_r of the KL are 1 that is π* ∝ ref·e^{R/β}.

    Stationary: R − β·c_r·log π/ref is the same for all answers, with c_r = 1 − 1/n for the mean with self, and
    c_r = 1 − P(the others of the group earn r)  for masked ties.
    """
    size, reference, beta = row["group_size"], row["success"], row["beta"]
    weights = {
        "k2-loss-sequence": lambda right: (1.0, 1.0),
        "leave-one-out": lambda right: (1.0, 1.0),
        "group-mean": lambda right: (1 - 1 / size, 1 - 1 / size),
        "tied-groups-masked": lambda right: (1 - right ** (size - 1), 1 - (1 - right) ** (size - 1)),
    }.get(row["estimator"])
    if weights is None:
        return None

    def excess(right: float) -> float:
        hit, miss = weights(right)
        return 1 - beta * hit * math.log(right / reference) + beta * miss * math.log((1 - right) / (1 - reference))

    low, high = reference, 1 - 1e-15
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


ENDED = {"batch_size": 0, "gradient_norm": lambda x: x < SETTLED}

DRAWN = {"part": "training", "batch_size": lambda x: x > 0}

claims.between("masking tied groups loses E[1{tied}·KL term] of the gradient", MASKS,
    "the closed form, in every group size and difficulty", f"{LIMIT}: sums over all groups",
    "largest difference {high:.1e} of the gradient", "closed_form_error", "masking", below=EXACT)  # fmt: skip

claims.between("in evaluation groups of one sample the whole KL term is masked", MASKS, "all of it lost", LIMIT,
    "{low:.6f} … {high:.6f} of it", "lost", "masking", group_size=1, above=1 - EXACT, below=1 + EXACT)  # fmt: skip

claims.between("unmasked, the penalty ends at the optimum of the regularised objective", "theory",
    f"KL(π‖π*) below {REACHED:g}", f"runs whose gradient is below {SETTLED:g}", "at most {high:.1e}", "kl_to_optimum",
    "training", **ENDED, estimator=("k2-loss-sequence", "leave-one-out"), below=REACHED)  # fmt: skip


def _masked_beside_right(rows: pd.DataFrame) -> pd.DataFrame:
    """Settled runs with masked ties, and in columns `…_right` those without a mask of the same reference and β."""
    masked, right = (
        need(rows, "training", **ENDED, estimator=name) for name in ("tied-groups-masked", "k2-loss-sequence")
    )
    return known(masked.merge(right, on=["success", "beta"], suffixes=("", "_right")))


@claims.add(f"{MASKS}; the numbers: this work",
    "right more often than π*; KL(π‖ref) and J* − J = β·KL(π‖π*) > 0 of that end",
    f"{REACHED:g}; exact training, groups of four")  # fmt: skip
def _elsewhere(rows: pd.DataFrame) -> Answer:
    """masked, it ends elsewhere: farther from the reference, at a lower objective"""
    pairs = _masked_beside_right(rows)
    kl, gap, ends, best = (pairs[name].astype(float) for name in ("kl", "gap", "predicted", "predicted_right"))
    away, lost = _kl(ends, pairs["success"].astype(float)), pairs["beta"] * _kl(ends, best)
    times = kl / pairs["kl_right"]
    said = f"KL(π‖ref) {times.min():.2f} to {times.max():.2f} times as large, J* − J {gap.min():.1e} to {gap.max():.1e}"
    off = max((kl - away).abs().max(), (gap - lost).abs().max())
    return f"{said}; references: {pairs['success'].nunique()}", (ends > best).all() and lost.min() > 0 and off < REACHED


def _kl(chance: pd.Series, other: pd.Series) -> pd.Series:
    """KL between two policies that are right so often: answers that earn the same keep their proportions."""
    return chance * np.log(chance / other) + (1 - chance) * np.log((1 - chance) / (1 - other))


claims.between("every fixed point is the predicted one (π*, π* at (1 − 1/n)β, and that of the mask)", OWN,
    "P(right) as predicted", f"{REACHED:g}", "largest difference {high:.1e} in {count} runs",
    lambda ends: (ends["right"] - ends["predicted"].astype(float)).abs(), "training", **ENDED,
    below=REACHED)  # fmt: skip


def _baseline(rows: pd.DataFrame, name: str) -> Answer:
    found = need(rows, "baselines", estimator=name)
    factor = 1 - 1 / found["group_size"] if name == "group-mean" else 1.0
    off = max((found["factor"] - factor).abs().max(), found["rest"].max())
    return f"largest difference {off:.1e}", off < EXACT


for _name, _words, _expected in (
    ("group-mean", "with the rollout itself shortens the gradient", "(1 − 1/n)·∇KL"),
    ("leave-one-out", "without the rollout itself does not", "∇KL"),
):
    claims.add("theory; Ahmadian et al. 2024", _expected, LIMIT, claim=f"a baseline of the group's mean {_words}")(
        lambda rows, name=_name: _baseline(rows, name)
    )


def _push(rows: pd.DataFrame, kind: str) -> pd.Series:
    """The mean length of the expected step in a tied group, by β."""
    return need(rows, "std").groupby("push")[kind].mean()


@claims.add("theory", "equal from 0.01 to 1, while the plain push grows a hundredfold",
    "5 %: β·std(u) against ε at β = 0.01")  # fmt: skip
def _cancels(rows: pd.DataFrame) -> Answer:
    """in tied groups std-normalisation cancels β: the push is the same for every β well above ε = 1e-4"""
    large = _push(rows, "normalised").loc[1e-2:]
    known(large[1:])
    least = large.min() / large.max()
    return f"{least:.3f} from the smallest to the largest", least > 0.95


@claims.add("theory", "proportional to β below 1e-5", "15 %: β·std(u) against ε at β = 1e-5")
def _fades(rows: pd.DataFrame) -> Answer:
    """and fades like the plain one once β is of the order of ε"""
    small = _push(rows, "normalised").loc[:1e-5]
    known(small[1:])
    ratio, times = small.iloc[1] / small.iloc[0], small.index[1] / small.index[0]
    return f"ratio {ratio:.2f} where β has {times:.0f} times the size", 0.85 < ratio / times <= 1.0


@claims.add("theory", "plain push / β constant", "1e-9")
def _proportional(rows: pd.DataFrame) -> Answer:
    """without normalisation the push is proportional to β"""
    plain = _push(rows, "plain")
    ratio = plain / plain.index
    return f"{ratio.min():.4g} … {ratio.max():.4g}", ratio.max() / ratio.min() - 1 < 1e-9


claims.between("the exact expectation over groups is that of a second, plain enumeration", OWN, "equal", LIMIT,
    "largest difference {high:.1e}", "by_hand_error", "std", below=EXACT)  # fmt: skip

# Below β = 0.3 π* is all but certain, and there is nothing left to blow up.
claims.between("with the KL in a std-normalised reward even exact training at a constant step does not settle: near π* "
    "all regularised rewards are equal, and the division blows up what is left", OWN,
    "gradient norm above 0.001 after all steps, β ≥ 0.3", "settled runs are below 1e-9", "{low:.2g} … {high:.2g}",
    "gradient_norm", "training", batch_size=0, estimator="group-std", beta=lambda x: x >= 0.3,
    above=1e-3)  # fmt: skip


def _gap(rows: pd.DataFrame, name: str) -> float:
    drawn = need(rows, **DRAWN, estimator=name)
    return mean(drawn.loc[drawn["beta"] >= 0.5, "gap"].clip(lower=0.0))


@claims.add(OWN, "J* − J a thousand times smaller", "β from 0.5, where all runs have the time to settle")
def _noise(rows: pd.DataFrame) -> Answer:
    """sampled, k1 in the reward with a leave-one-out baseline has no noise left at π*, since R − β·u is the same for
    all rollouts there; k2 in the loss keeps its noise
    """
    without, noisy = (_gap(rows, name) for name in ("leave-one-out", "k2-loss-sequence"))
    return f"{without:.1e} against {noisy:.1e} (means over runs and seeds)", without < 1e-3 * noisy


numbers.melt("masking", {"lost": "lost", "ties": "tied"}, ["group_size", "success"], means=True)


@numbers.add
def _of_exact_training(rows: pd.DataFrame) -> Cited:
    pairs = _masked_beside_right(rows)
    yield from extremes("KL ratio of masked", pairs["kl"] / pairs["kl_right"])


numbers.add(lambda rows: [number("push", size, kind=kind, beta=push) for kind in ("normalised", "plain")
    for push, size in _push(rows, kind).items()])  # fmt: skip


@numbers.add
def _of_samples(rows: pd.DataFrame) -> Cited:
    drawn = need(rows, **DRAWN)
    for name in sorted(drawn["estimator"].unique()):
        yield number("sampled gap", _gap(rows, name), estimator=name)
