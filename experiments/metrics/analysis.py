"""What is logged as the KL and what it is: claims, tables and the numbers that the paper cites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ..judging import Answer, Question, answers, at_most, select
from .settings import CONTROLLER, EXACT, GARBAGE, PARTS

Row = dict[str, Any]
NAME = "metrics"
OWN = "this work"
SLIME = "slime #2114"
TRL = "TRL #4638 and #6586"
MASKS = "TRL #5588 and #5640"
TARGET = CONTROLLER["target"]


def tidy(rows: Sequence[Row]) -> list[Row]:
    """As computed, part by part."""
    return sorted(rows, key=lambda row: list(PARTS).index(row["part"]))


def _off(rows: Sequence[Row], wrong: Callable[[Row], float], limit: float = EXACT) -> Answer:
    """Whether a difference stays below a limit in all rows."""
    return at_most([{"off": abs(wrong(row))} for row in rows], "off", limit)


def _mutated(rows: Sequence[Row]) -> list[Row]:
    return select(rows, "mutation", copied=False)


def _at_the_start(rows: Sequence[Row]) -> Answer:
    found = [row for row in _mutated(rows) if row["step"] == 0]
    if not found:
        return None
    worst = max(max(abs(row["kl"]), abs(row["read"] - row["reward"])) for row in found)
    return (
        f"KL 0, read {min(row['read'] for row in found):.3f} … {max(row['read'] for row in found):.3f}",
        worst < EXACT,
    )


def _bits(rows: Sequence[Row]) -> Answer:
    found = select(rows, "mutation")
    if not found:
        return None
    in_place = sum(row["identical"] for row in found if not row["copied"])
    copies = [row["identical"] for row in found if row["copied"]]
    words = f"in place {in_place} of {len(found) - len(copies)} steps, with a copy {sum(copies)} of {len(copies)}"
    return words, in_place == 0 and all(copies)


def _silent(rows: Sequence[Row]) -> Answer:
    """Whether every policy on the way is the same, bit for bit, with the copy and without."""
    runs: dict[tuple, list[str]] = {}
    for row in select(rows, "mutation"):
        runs.setdefault((row["beta"], row["seed"], row["step"]), []).append(row["policy"])
    pairs = [policies for policies in runs.values() if len(policies) == 2]
    same = sum(one == other for one, other in pairs)
    return (f"{same} of {len(pairs)} policies", same == len(pairs)) if pairs else None


def _ends(rows: Sequence[Row], read: str) -> dict[float, Row]:
    """By what is added to the reward: the last round of a controller that goes by `read`."""
    return {row["offset"]: row for row in select(rows, "controller", read=read, round=CONTROLLER["rounds"])}


def _met(rows: Sequence[Row]) -> Answer:
    return _off(list(_ends(rows, "kl").values()), lambda row: row["kl"] / TARGET - 1, 1e-6)


def _thrown(rows: Sequence[Row]) -> Answer:
    ends = _ends(rows, "mutated")
    # Closer to zero the objective can be the target for some β, which is then met.
    high = [row for offset, row in ends.items() if offset >= 1]
    low = [row for offset, row in ends.items() if offset <= -1]
    if not high or not low:
        return None
    words = "; ".join(
        f"rewards {row['offset']:+g}: β = {row['controller_beta']:.2g}, KL = {row['kl']:.2g}" for row in [*high, *low]
    )
    return words, all(r["kl"] < TARGET / 100 for r in high) and all(r["kl"] > 2 * TARGET for r in low)


def _missed(rows: Sequence[Row]) -> Answer:
    ends = list(_ends(rows, "k2").values())
    if not ends:
        return None
    met = max(abs(row["metric"] / TARGET - 1) for row in ends) < 1e-6
    off = max(row["kl"] / TARGET - 1 for row in ends)
    return f"k2 meets {TARGET:g}, the KL is {TARGET * (1 + off):.4f}", met and abs(off) > 0.05


def _scaled(rows: Sequence[Row]) -> Answer:
    ends = list(_ends(rows, "scaled").values())
    off = [abs(row["kl"] / TARGET - 1) for row in ends]
    if not ends:
        return None
    return f"β = {ends[0]['controller_beta']:.1e}, KL = {ends[0]['kl']:.3f} for a target of {TARGET:g}", min(off) > 0.1


def _unweighted(rows: Sequence[Row]) -> Answer:
    return _relative(rows, ("no ratio", "geometric ratio", "geometric ratio, k3", "token ratio"))


def _relative(rows: Sequence[Row], names: Sequence[str]) -> Answer:
    found = select(rows, "reweighted")
    if not found:
        return None
    farthest = max(row["staleness"] for row in found)
    off = [row[name] / row["kl"] - 1 for row in found if row["staleness"] == farthest for name in names]
    words = f"off by {min(map(abs, off)):.0%} … {max(map(abs, off)):.0%} of the KL, staleness {farthest:g}"
    return words, min(map(abs, off)) > 1e-3


def _advantage(rows: Sequence[Row]) -> Answer:
    found = select(rows, "reweighted")
    if not found:
        return None
    exact = max(abs(row["advantage"] - row["covariance"]) for row in found) < EXACT
    signs = all(row["advantage"] * row["advantage of −R"] < 0 < row["kl"] for row in found)
    lowest = min(min(row["advantage"], row["advantage of −R"]) / row["kl"] for row in found)
    return f"down to {lowest:.1f} times the KL", exact and signs


def _alone(rows: Sequence[Row]) -> Answer:
    return _off(select(rows, "masked", group_size=1), lambda row: row["read"])


def _negative(rows: Sequence[Row]) -> Answer:
    found = [row for row in select(rows, "masked") if row["group_size"] in (2, 4) and row["kl"] > 0.3]
    if not found:
        return None
    lowest = min(found, key=lambda row: row["read"])
    words = (
        f"down to {lowest['read']:.4f}, where the KL is {lowest['kl']:.4f} "
        f"(groups of {lowest['group_size']}, right {lowest['success']:g})"
    )
    return words, max(row["read"] for row in found) < -1e-3


def _near(rows: Sequence[Row]) -> Answer:
    """Close to the reference u has variance 2·KL."""
    found = [row for row in select(rows, "logged", estimator="k1-loss") if row["kl"] < 0.05]
    ratios = [row["std"] / math.sqrt(2 * row["kl"]) for row in found]
    return (f"{min(ratios):.3f} … {max(ratios):.3f} of it", min(ratios) > 0.9 and max(ratios) < 1.1) if ratios else None


def _crossing(rows: Sequence[Row]) -> Answer:
    runs = _pairs(rows)
    near = [k3["std"] < 0.5 * k1["std"] for k1, k3 in runs if k1["kl"] < 0.1]
    far = [k3["std"] / k1["std"] for k1, k3 in runs if k1["kl"] > 3]
    if not near or not far:
        return None
    return f"less than half near, up to {max(far):.0f} times far", all(near) and min(far) > 1


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    found: dict[tuple, dict[str, Row]] = {}
    for row in select(rows, "logged"):
        found.setdefault((row["beta"], row["seed"], row["step"]), {})[row["estimator"]] = row
    return [(one["k1-loss"], one["k3-loss"]) for one in found.values() if {"k1-loss", "k3-loss"} <= one.keys()]


def _biased(rows: Sequence[Row]) -> Answer:
    found = select(rows, "logged", estimator="k2-loss")
    far = [abs(row["mean"] / row["kl"] - 1) for row in found if row["kl"] > 1]
    near = [(abs(row["mean"] / row["kl"] - 1), math.sqrt(row["kl"])) for row in found if row["kl"] < 0.05]
    if not far or not near:
        return None
    words = f"at most {max(bias for bias, _ in near):.1%} at a KL below 0.05, up to {max(far):.0%} beyond 1"
    return words, all(bias < size for bias, size in near) and max(far) > 0.1


def _none_of_three(rows: Sequence[Row]) -> Answer:
    found = select(rows, "logged", estimator="k3-loss")
    if not found:
        return None
    # Along a run the curves may cross: one point says nothing.
    three = ("kl", "kl_per_token", "mean_of_token_means")
    off = [min(abs(row["over_own_length"] / row[name] - 1) for name in three) for row in found]
    apart = sum(one > 0.01 for one in off) / len(off)
    return f"{apart:.0%} of {len(off)} are, by {median(off):.0%} in the median", apart > 0.9


def _below_zero(rows: Sequence[Row]) -> Answer:
    found = select(rows, "logged", estimator="k1-loss")
    if not found:
        return None
    lowest = min(found, key=lambda row: row["over_own_length"])
    words = f"{lowest['over_own_length']:.4f} at KL {lowest['kl']:.4f}, step {lowest['step']}"
    return words, lowest["over_own_length"] < -1e-3 and lowest["kl"] > 0


SUMS = f"{EXACT:g}: sums of float64"
QUESTIONS = (
    Question("k1 in the reward made in place: what was recorded as the KL reads, per rollout, as the objective "
             "E[R] − β·KL itself", f"{SLIME}; {OWN}", "J_β at every step",
             lambda rows: _off(_mutated(rows), lambda row: row["read"] - row["objective"]), SUMS),
    Question("what was recorded before was right", SLIME, "KL(π‖ref)",
             lambda rows: _off(select(rows, "mutation"), lambda row: row["recorded"] - row["kl"]), SUMS),
    Question("before the first update, where there is no KL, it reads E[R]", f"{SLIME}; {OWN}", "the reward",
             _at_the_start, SUMS),
    Question("a comparison of bits before and after the loss tells at every step", SLIME,
             "never identical in place, always with a copy", _bits, "torch.equal"),
    Question("neither the gradient nor training shows it", SLIME, "the same policies to the last bit", _silent,
             "digests of the logits"),
    Question("an adaptive β that goes by the true KL meets its target", "Ziegler et al. 2019, §2.2", f"KL = {TARGET:g}",
             _met, "1e-6 of it"),
    Question("by the mutated one it runs away, upwards or downwards by a constant in the reward", OWN,
             "KL far below the target with rewards raised, far above it with them lowered", _thrown,
             "a hundredth; twice"),
    Question("by k2 it meets another KL", OWN, "k2 on target, the KL off by more than 5 %", _missed, "1e-6 for k2"),
    Question("by β·KL, the term as it enters the loss, it misses", OWN, "off by more than 10 %", _scaled, "10 %"),
    Question("off-policy a metric with the ratio of the sequence, or of prefixes, is the KL", "theory", "KL(π‖ref)",
             lambda rows: _off(select(rows, "reweighted"),
                               lambda r: abs(r["sequence ratio"] - r["kl"]) + abs(r["prefix ratio"] - r["kl"])), SUMS),
    Question("with the token's ratio, k1 or k3, it is the next-token KL at the sampler's prefixes", TRL,
             "local reverse KL at the sampler's prefixes",
             lambda rows: _off(select(rows, "reweighted"), lambda r: abs(r["token ratio"] - r["local@sampler"])
                               + abs(r["token ratio, k3"] - r["local@sampler"])), SUMS),
    Question("with no ratio, or the geometric mean of the sequence's, it is neither", TRL, "off the KL", _unweighted,
             "more than 0.1 %"),
    Question("times an advantage it is the covariance of reward and log-ratio, of either sign", OWN,
             "negative for R or for −R", _advantage, SUMS),
    Question("masked where rewards tie it reads Σ π·u·(1 − P(the others earn the same))", MASKS, "the closed form",
             lambda rows: at_most(select(rows, "masked"), "closed_form_error", EXACT), SUMS),
    Question("in evaluation groups of one it reads zero", MASKS, "0", _alone, SUMS),
    Question("in groups of two and of four it reads negative once the policy is far", OWN, "below zero", _negative,
             "below −0.001 at a KL above 0.3"),
    Question("averaged over padded positions it falls as the batch is padded more", "TRL #6803 and #6809",
             "E[Σu]/(padded length)",
             lambda rows: _off(select(rows, "padding"),
                               lambda row: row["mean over zeros"] - row["kl"] / max(row["padded_length"], 4)), SUMS),
    Question("and reads the padding where that is not zero", "TRL #6803 and #6809",
             "E[Σu]/T + c·(1 − E[L]/T), c the log-ratio there",
             lambda rows: _off(select(rows, "padding"), lambda row: row["mean over garbage"] - row["mean over zeros"]
                               - GARBAGE * (1 - row["length"] / max(row["padded_length"], 4))), SUMS),
    Question("along a run k1 and k3 have the KL as their mean", "Schulman 2020", "KL(π‖ref)",
             lambda rows: _off([r for r in select(rows, "logged") if r["estimator"] != "k2-loss"],
                               lambda row: row["mean"] - row["kl"]), SUMS),
    Question("k2 has not: its bias grows with the distance", "Schulman 2020",
             "biased far from the reference, hardly near it", _biased,
             "√KL, as third moments go, near; more than 10 % beyond 1"),
    Question("near the reference k1's standard deviation is √(2·KL), far more than the KL", "Schulman 2020", "√(2·KL)",
             _near, "10 %, KL below 0.05"),
    Question("k3 is less noisy near the reference and noisier far from it", "Schulman 2020; theory",
             "half of k1's below a KL of 0.1, more beyond 3", _crossing, "as said"),
    Question("a mean over rollouts of k3's mean per token is none of E[Σu], E[Σu]/E[L], E[Σu/L]", OWN,
             "none of the three", _none_of_three, "1 % apart, nine times out of ten"),
    Question("it is E[Σu/L] + E[Σ(w − 1)/L]", OWN, "equal",
             lambda rows: _off(select(rows, "logged", estimator="k3-loss"),
                               lambda r: r["over_own_length"] - r["mean_of_token_means"] - r["correction"]), SUMS),
    Question("and k1's is E[Σu/L], no divergence: it reads below zero early in a run", OWN, "below zero", _below_zero,
             "below −0.001"),
)  # fmt: skip


def claims(rows: Sequence[Row]) -> list:
    return answers(NAME, QUESTIONS, rows)


LOGGED = {
    "k1-loss": "k1, summed over a rollout",
    "k2-loss": "k2, summed over a rollout",
    "k3-loss": "k3, summed over a rollout",
}


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Everything that was logged of one run, at its beginning and its end; and where controllers end."""
    beta = min((row["beta"] for row in select(rows, "logged")), default=None)
    chosen = select(rows, "logged", beta=beta, seed=0)
    steps = sorted({row["step"] for row in chosen})
    shown = steps[:1] + steps[len(steps) // 2 : len(steps) // 2 + 1] + steps[-1:]
    at = {(row["step"], row["estimator"]): row for row in chosen}

    def line(words: str, read: Callable[[int], str]) -> Row:
        return {"logged": words, **{f"update {step}": read(step) for step in shown}}

    truths = {"kl": "KL(π‖ref) = E[Σu]", "kl_per_token": "E[Σu]/E[L]", "mean_of_token_means": "E[Σu/L]"}
    table: list[Row] = []
    if all((step, name) in at for step in shown for name in LOGGED) and shown:
        table += [line(words, lambda s, n=name: f"{at[s, 'k1-loss'][n]:.4f}") for name, words in truths.items()]
        table.append(line("E[Σk3/L]", lambda s: f"{at[s, 'k3-loss']['over_own_length']:.4f}"))
        table += [
            line(words, lambda s, n=name: f"{at[s, n]['mean']:.4f} ± {at[s, n]['std']:.3f}")
            for name, words in LOGGED.items()
        ]
    ends = [
        {
            "controller reads": row["read"],
            "added to rewards": f"{row['offset']:+g}",
            "metric": f"{row['metric']:.3g}",
            "β": f"{row['controller_beta']:.3g}",
            "KL(π‖ref)": f"{row['kl']:.3g}",
        }
        for row in select(rows, "controller", round=CONTROLLER["rounds"])
    ]
    return {"table": table, "controllers": ends}


def numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """What the paper cites."""
    result: dict[str, Any] = {"target": TARGET}
    for row in select(rows, "mutation", copied=False, seed=0):
        where = f"step {row['step']}, beta {row['beta']:g}"
        result |= {f"kl at {where}": row["kl"], f"read at {where}": row["read"]}
    for row in select(rows, "controller", round=CONTROLLER["rounds"]):
        where = f"{row['read']}, rewards {row['offset']:+g}"
        result |= {f"kl by {where}": row["kl"], f"beta by {where}": row["controller_beta"]}
    for row in select(rows, "reweighted", seed=0):
        for name in ("no ratio", "token ratio", "geometric ratio", "advantage"):
            result[f"{name} over kl, staleness {row['staleness']:g}"] = row[name] / row["kl"]
    for row in select(rows, "masked"):
        where = f"groups of {row['group_size']}, success {row['success']:g}"
        result |= {f"masked, {where}": row["read"], f"kl, success {row['success']:g}": row["kl"]}
    for row in select(rows, "logged", seed=0):
        where = f"{row['estimator']}, update {row['step']}, beta {row['beta']:g}"
        result |= {f"{name} of {where}": row[name] for name in ("mean", "std", "kl", "kl_per_token", "over_own_length")}
    lowest = [row["over_own_length"] for row in select(rows, "logged", estimator="k1-loss")]
    if lowest:
        result["lowest mean of token means"] = min(lowest)
    return result
