"""Metrics that are logged as the KL: claims."""

import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import known, need, ordered

from .experiment import CONTROLLER, PARTS

ZIEGLER = "Ziegler et al. 2019, §2.2"
SCHULMAN = "Schulman 2020"
TARGET = CONTROLLER["target"]
EXACT = near(0, 1e-11)  # two routes in float64 to sums of up to a few hundred terms of size one
ENDED = {"round": CONTROLLER["rounds"]}

claims = Claims("metrics")
tidy = ordered(PARTS)


@claims.measure(f"slime #2114; {OWN}", "sums of float64", off=EXACT)
def _in_place(rows: pd.DataFrame) -> Measured:
    """k1 in the reward made in place: at every step what was recorded as the KL reads, per rollout, as the objective
    E[R] − β·KL itself"""
    found = need(rows, "mutation")
    return {"off": found["read"] - found["objective"]}


@claims.measure(ZIEGLER, "solved for", over_target=near(1, 1e-6))
def _met(rows: pd.DataFrame) -> Measured:
    """an adaptive β that goes by the true KL meets its target"""
    return {"over_target": need(rows, "controller", read="kl", **ENDED)["kl"] / TARGET}


@claims.measure(SCHULMAN, "the next order in √KL remains", std_over_root=near(1, 0.1), kl=below(0.05))
def _close(rows: pd.DataFrame, kl: Bound) -> Measured:
    """near the reference, KL below {kl}, k1's standard deviation is within {std_over_root:±.0%} of `√(2·KL)`, far more
    than the KL"""
    found = need(rows, "logged", estimator="k1-loss", kl=kl)
    return {"std_over_root": found["std"] / (2 * found["kl"]) ** 0.5}


@claims.measure(
    OWN,
    "a hundredth of the target; all that there can be but a hundredth",
    raised=below(0.01),
    lowered=above(0.99),
    up=at_least(1),
    down=at_most(-1),
)
def _thrown(rows: pd.DataFrame, up: Bound, down: Bound) -> Measured:
    """by the mutated one it runs away: with an offset of {up} or more in the reward the KL ends below {raised:.0%} of
    the target, with one of {down} or less above {lowered:.0%} of all that there can be, −log ref(best)"""
    high, low = (need(rows, "controller", read="mutated", **ENDED, offset=offset) for offset in (up, down))
    return {"raised": high["kl"] / TARGET, "lowered": low["kl"] / low["largest_kl"]}


@claims.measure(
    OWN, "a twentieth of the target would still be near", met_or_out_of_reach=EVERY, kl_off_target=above(0.05)
)
def _missed(rows: pd.DataFrame) -> Measured:
    """by k2 the KL ends off the target by more than {kl_off_target:.0%}: k2 meets the target, or comes to it at no β"""
    ends = need(rows, "controller", read="k2", **ENDED)
    met = ((ends["metric"] / TARGET - 1).abs() < 1e-6) | (ends["metric"] < TARGET) & (ends["controller_beta"] < 1e-3)
    return {"met_or_out_of_reach": met, "kl_off_target": (ends["kl"] / TARGET - 1).abs()}


@claims.measure(
    f"{SCHULMAN}; {OWN}",
    "chosen beside the curves",
    near_ratio=below(0.5),
    far_ratio=above(1),
    near_kl=below(0.1),
    far_kl=above(3),
)
def _crossing(rows: pd.DataFrame, near_kl: Bound, far_kl: Bound) -> Measured:
    """k3 has less than {near_ratio} of k1's standard deviation where the KL is below {near_kl}, and is noisier where
    it is above {far_kl}"""
    one, three = (need(rows, "logged", estimator=name) for name in ("k1-loss", "k3-loss"))
    pairs = one.merge(three, on=["beta", "seed", "step"], suffixes=("", "_k3"))
    ratio = pairs["std_k3"] / pairs["std"]
    return {"near_ratio": known(ratio[near_kl(pairs["kl"])]), "far_ratio": known(ratio[far_kl(pairs["kl"])])}
