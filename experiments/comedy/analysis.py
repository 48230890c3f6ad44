"""What the rows say: claims, a table by placement, and the numbers that the paper cites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kltest.reproduce import Claim

from ..judging import Answer, Question, answers, at_most, select
from .settings import ANCHOR, ESTIMATORS, EXACT, PARTS, PLACEMENTS, PUBLISHED

Row = dict[str, Any]

SHAH = "Shah et al. 2025 (arXiv 2512.21852), Fig. 2"
TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the product rule for E[k]"
THEORY = "theory"
OWN = "this work"
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


def tidy(rows: Sequence[Row]) -> list[Row]:
    """As computed, part by part."""
    return sorted(rows, key=lambda row: list(PARTS).index(row["part"]))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """One for each question; not run where rows that it needs are not there."""
    return answers("comedy", QUESTIONS, rows)


def _of(rows: Sequence[Row], which: tuple[str, str], **wanted: Any) -> list[Row]:
    return select(rows, "length", estimator=which[0], placement=which[1], **wanted)


def _cells(rows: Sequence[Row]) -> list[dict[tuple[str, str], Row]]:
    """For each length, distance, way to hold it and seed, the row of each estimator and placement."""
    cells: dict[tuple, dict[tuple[str, str], Row]] = {}
    for row in select(rows, "length"):
        key = tuple(row[name] for name in ("length", "kl", "hold", "seed"))
        cells.setdefault(key, {})[row["estimator"], row["placement"]] = row
    return list(cells.values())


def _unbiased(which: Sequence[tuple[str, str]]) -> Any:
    return lambda rows: at_most([row for one in which for row in _of(rows, one)], "bias", EXACT)


def _biased(rows: Sequence[Row]) -> Answer:
    wrong = [which for which in PUBLISHED if which != ("k1-loss", "reward")]
    least = {which: [row["bias"] for row in _of(rows, which)] for which in wrong}
    if not all(least.values()):
        return None
    said = ", ".join(f"{_name(which)} {min(found):.2f} to {max(found):.2f}" for which, found in least.items())
    zero = max(abs(bias - 1) for bias in least["k1-loss", "loss"])
    return said, zero < EXACT and min(min(found) for found in least.values()) > CLEAR


def _largest(rows: Sequence[Row]) -> Answer:
    cells = _cells(rows)
    if not cells:
        return None
    first = [max(PUBLISHED, key=lambda which: cell[which]["bias"]) for cell in cells]
    hits = sum(which == ("k3-loss", "reward") for which in first)
    return f"in {hits} of {len(cells)} lengths and distances", hits == len(cells)


def _near(rows: Sequence[Row]) -> Answer:
    cells = [cell for cell in _cells(rows) if cell["k1-loss", "loss"]["rollout_kl"] <= NEAR]
    if not cells:
        return None
    first = [max(PUBLISHED, key=lambda which: cell[which]["std"]) for cell in cells]
    hits = sum(which == ("k1-loss", "loss") for which in first)
    ratios = [cell["k1-loss", "loss"]["std"] / cell["k1-loss", "reward"]["std"] for cell in cells]
    said = f"the noisiest of four in {hits} of {len(cells)}; {min(ratios):.1f} to {max(ratios):.1f} times k1 in reward"
    return said, hits == len(cells)


def _far(rows: Sequence[Row]) -> Answer:
    cells = [cell for cell in _cells(rows) if cell["k1-loss", "loss"]["rollout_kl"] >= FAR - 1e-9]
    if not cells:
        return None
    ratios = [cell["k1-loss", "loss"]["std"] / cell["k1-loss", "reward"]["std"] for cell in cells]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times k1 in reward", max(ratios) < 1


def _equal(rows: Sequence[Row]) -> Answer:
    chosen = select(rows, "order")
    if not chosen:
        return None
    at = [row["equal_at"] for row in chosen]
    if None in at:
        return "no such distance", False
    return f"at a KL of {min(at):.3f} to {max(at):.3f}, over {len(at)} lengths", min(at) > NEAR and max(at) < FAR


def _one_pair(rows: Sequence[Row]) -> Answer:
    lengths = [row["length"] for row in _of(rows, ("k1-loss", "loss"), hold="pair") if row["kl"] >= FAR]
    if not lengths or min(lengths) > SHORT or max(lengths) < ANCHOR:
        return None
    found = _changes(rows)
    return "; ".join(f"between T = {short} and {long}" for short, long in found) or "it does not", bool(found)


def _changes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Of one pair, the lengths between which k1 in the loss becomes the less noisy, where it is far enough away."""
    found = []
    for kl in sorted({row["kl"] for row in select(rows, "length", hold="pair") if row["kl"] >= FAR}):
        mine = {which: {} for which in PUBLISHED}  # type: dict[tuple[str, str], dict[int, float]]
        for which in PUBLISHED:
            mine[which] = {row["length"]: row["std"] for row in _of(rows, which, hold="pair", kl=kl)}
        loss, reward = mine["k1-loss", "loss"], mine["k1-loss", "reward"]
        noisier = [length for length in sorted(loss) if loss[length] > reward[length]]
        others = [length for length in sorted(loss) if length not in noisier]
        if noisier and others and max(noisier) < min(others):
            found.append((max(noisier), min(others)))
    return found


def _both(rows: Sequence[Row]) -> Answer:
    near = _gain(rows, 0, NEAR)
    if not near:
        return None
    far = _gain(rows, FAR - 1e-9, FAR + 1e-9)
    said = f"{min(near):.1f} to {max(near):.1f} times fewer rollouts"
    said += f"; at KL {FAR:g} {min(far):.2f} to {max(far):.1f}" if far else ""
    return said, min(near) > 2


def _gain(rows: Sequence[Row], least: float, most: float) -> list[float]:
    """How many times fewer rollouts k3 in both places needs than k1 in the reward at distances, both unbiased."""
    cells = [cell for cell in _cells(rows) if least <= cell["k1-loss", "reward"]["rollout_kl"] <= most + 1e-9]
    return [(cell["k1-loss", "reward"]["std"] / cell["k3-loss", "both"]["std"]) ** 2 for cell in cells]


def _random(column: str, least: float, most: float) -> Any:
    def judge(rows: Sequence[Row]) -> Answer:
        chosen = select(rows, "random")
        hits, pairs = sum(row[column] for row in chosen), sum(row["pairs"] for row in chosen)
        if pairs < FEW:
            return None
        return f"in {hits} of {pairs} random pairs", least < hits / pairs < most

    return judge


def _samples(rows: Sequence[Row]) -> Answer:
    chosen = [row for row in select(rows, "length") if row["z_mean"] is not None]
    if not chosen:
        return None
    mean, std = max(row["z_mean"] for row in chosen), max(abs(row["z_std"]) for row in chosen)
    said = f"means off by at most {mean:.1f} standard errors, spreads by {std:.1f}; {len(chosen)} gradients"
    return said, max(mean, std) < ERRORS


def _name(which: tuple[str, str]) -> str:
    return f"{which[0].removesuffix('-loss')} in {which[1]}"


QUESTIONS = (
    Question(
        "k1 in the reward is unbiased at every length, near and far",
        SHAH,
        "0",
        _unbiased([("k1-loss", "reward")]),
        f"{EXACT:g} of the gradient: exact up to rounding",
    ),
    Question(
        "k1 in the loss, k3 in the loss and k3 in the reward are biased at every length",
        SHAH,
        "k1 in loss 1 exactly, the others clear of 0",
        _biased,
        f"clear: above {CLEAR:g} of the gradient",
    ),
    Question(
        "k3 in the reward has the largest bias of the four",
        SHAH,
        "at every length and distance, for the stated pair",
        _largest,
        "an order",
    ),
    Question(
        "near the reference k1 in the loss is the noisiest of the four",
        SHAH,
        f"at every length, where KL ≤ {NEAR:g}",
        _near,
        "an order",
    ),
    Question(
        "away from it k1 in the loss is less noisy than k1 in the reward",
        THEORY,
        f"at every length, where KL ≥ {FAR:g}",
        _far,
        "an order",
    ),
    Question(
        "at which distance the two are equally noisy hardly depends on length",
        OWN,
        f"between {NEAR:g} and {FAR:g} nats for whole sequences, at every length",
        _equal,
        "the root of a difference of exact variances",
    ),
    Question(
        "of one pair the order changes with length alone",
        OWN,
        "k1 in the loss noisier when short, less noisy when long",
        _one_pair,
        "an order",
    ),
    Question(
        "k1 and k3 in both places are unbiased",
        TANG_MUNOS,
        "0",
        _unbiased([("k1-loss", "both"), ("k3-loss", "both")]),
        f"{EXACT:g} of the gradient: exact up to rounding",
    ),
    Question(
        "near the reference k3 in both places needs fewer rollouts than k1 in the reward",
        OWN,
        f"less than half as many, at every length, where KL ≤ {NEAR:g}",
        _both,
        "a ratio of exact variances of two unbiased gradients",
    ),
    Question(
        "that k3 in the reward has the largest bias depends on the pair",
        OWN,
        "for more than half of random pairs, not for all",
        _random("most_biased_is_k3_reward", 0.5, 0.95),
        "shares, of independent draws",
    ),
    Question(
        "k3 in both places beats k1 in the reward on random pairs too",
        OWN,
        "for most, not for all",
        _random("k3_both_less_noisy_than_k1_reward", 0.5, 1.0),
        "shares, of independent draws",
    ),
    Question(
        "sampled gradients agree with the exact ones",
        "200 × 1,000 samples, as in Shah et al. 2025",
        f"within {ERRORS:g} standard errors",
        _samples,
        "over some hundred gradients of three free components",
    ),
    Question(
        "counting types agrees with enumeration of all sequences and with dynamic programming",
        "two routes",
        "0",
        lambda rows: at_most(select(rows, "length"), "off_again", EXACT),
        f"{EXACT:g} of the gradient and of its square",
    ),
)


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Bias and standard deviation relative to the gradient, at the shortest and the longest length."""
    chosen = select(rows, "length", hold="kl", seed=0)
    if not chosen:
        return {}
    lengths = sorted({row["length"] for row in chosen})
    columns = [
        (kl, length)
        for kl in sorted({row["kl"] for row in chosen})
        for length in dict.fromkeys((lengths[0], lengths[-1]))
    ]
    found = []
    for estimator in ESTIMATORS:
        for placement in PLACEMENTS:
            cells = {(row["kl"], row["length"]): row for row in _of(chosen, (estimator, placement))}
            line: Row = {"estimator": estimator.removesuffix("-loss"), "placed in": placement}
            for kl, length in columns:
                row = cells.get((kl, length))
                text = "" if row is None else f"{_short(row['bias'])} ± {row['std']:.2f}"
                line[f"KL {kl:g}, T = {length}"] = text
            found.append(line)
    return {"table": found}


def _short(bias: float) -> str:
    return "0" if bias < EXACT else f"{bias:.2f}"


def numbers(rows: Sequence[Row]) -> dict[str, float | int | str | None]:
    """By name; those of one estimator are named after it, its placement, the distance and the length."""
    chosen = select(rows, "length", hold="kl", seed=0)
    equal = [row["equal_at"] for row in select(rows, "order") if row["equal_at"] is not None]
    changes, gain = _changes(rows), {kl: _gain(select(chosen, "length", kl=kl), kl, kl) for kl in (0.05, 0.8)}
    random = select(rows, "random")
    result: dict[str, float | int | str | None] = {
        "shortest": min((row["length"] for row in chosen), default=None),
        "longest": max((row["length"] for row in chosen), default=None),
        "types": max((row["types"] for row in chosen), default=None),
        "sampled gradients": sum(row["z_mean"] is not None for row in chosen) or None,
        "largest deviation in standard errors": max(
            (max(row["z_mean"], abs(row["z_std"])) for row in chosen if row["z_mean"] is not None), default=None
        ),
        "off second route": max((row["off_again"] for row in select(rows, "length")), default=None),
        "equally noisy from": min(equal, default=None),
        "equally noisy to": max(equal, default=None),
        "order changes after": changes[-1][0] if changes else None,
        **{f"least gain of k3 in both, {kl:g}": min(found, default=None) for kl, found in gain.items()},
        **{f"largest gain of k3 in both, {kl:g}": max(found, default=None) for kl, found in gain.items()},
    }
    for name in ("most_biased_is_k3_reward", "most_biased_is_k1_loss", "k3_both_less_noisy_than_k1_reward"):
        hits, pairs = sum(row[name] for row in random), sum(row["pairs"] for row in random)
        result[f"share of pairs, {name.replace('_', ' ')}"] = hits / pairs if pairs else None
    result["random pairs"] = sum(row["pairs"] for row in random) or None
    for row in chosen:
        where = f"{row['estimator']} in {row['placement']}, {row['kl']:g}, {row['length']}"
        result[f"bias of {where}"] = row["bias"]
        result[f"std of {where}"] = row["std"]
    return result
