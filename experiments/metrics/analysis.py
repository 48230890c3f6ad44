"""Metrics that are logged as the KL: claims, tables and the numbers that the paper cites."""

import numpy as np
import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import known, need, ordered
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .settings import CONTROLLER, EXACT, GARBAGE, PARTS

SLIME = "slime #2114"
TRL = "TRL #4638 and #6586"
MASKS = "TRL #5588 and #5640"
PADDED = "TRL #6803 and #6809"
TARGET = CONTROLLER["target"]
SUMS = f"{EXACT:g}: sums of float64"

claims = Claims("metrics")
numbers = Numbers()
tidy = ordered(PARTS)

claims.bound(
    "k1 in the reward made in place: what was recorded as the KL reads, per rollout, as the objective "
    "E[R] − β·KL itself",
    f"{SLIME}; {OWN}", "J_β at every step", SUMS, lambda found: found["read"] - found["objective"], EXACT,
    "mutation", copied=False)  # fmt: skip

claims.bound("what was recorded before was right", SLIME, "KL(π‖ref)", SUMS,
    lambda found: found["recorded"] - found["kl"], EXACT, "mutation")  # fmt: skip


@claims.add(f"{SLIME}; {OWN}", "the reward", SUMS)
def _at_the_start(rows: pd.DataFrame) -> Answer:
    """before the first update, where there is no KL, it reads E[R]"""
    found = need(rows, "mutation", copied=False, step=0)
    read = found["read"]
    worst = max(found["kl"].abs().max(), (read - found["reward"]).abs().max())
    return f"KL 0, read {read.min():.3f} … {read.max():.3f}", worst < EXACT


@claims.add(SLIME, "never identical in place, always with a copy", "torch.equal")
def _bits(rows: pd.DataFrame) -> Answer:
    """a comparison of bits before and after the loss tells at every step"""
    found = need(rows, "mutation")
    copied = found["copied"]
    in_place, copies = found[~copied]["identical"], found[copied]["identical"]
    said = f"in place {in_place.sum()} of {len(in_place)} steps, with a copy {copies.sum()} of {len(copies)}"
    return said, in_place.sum() == 0 and copies.all()


@claims.add(SLIME, "the same policies to the last bit", "digests of the logits")
def _silent(rows: pd.DataFrame) -> Answer:
    """neither the gradient nor training shows it"""
    runs = need(rows, "mutation").groupby(["beta", "seed", "step"])["policy"].agg(["size", "nunique"])
    pairs = known(runs[runs["size"] == 2])
    same = (pairs["nunique"] == 1).sum()
    return f"{same} of {len(pairs)} policies", same == len(pairs)


def _ends(rows: pd.DataFrame, read: str) -> pd.DataFrame:
    """The last round of controllers that go by `read`."""
    return need(rows, "controller", read=read, round=CONTROLLER["rounds"])


claims.bound("an adaptive β that goes by the true KL meets its target", "Ziegler et al. 2019, §2.2", f"KL = {TARGET:g}",
    "1e-6 of it", lambda ends: ends["kl"] / TARGET - 1, 1e-6, "controller", read="kl",
    round=CONTROLLER["rounds"])  # fmt: skip


@claims.add(OWN, "with rewards raised KL far below the target; with them lowered all that there can be, −log ref(best)",
    "a hundredth of the target; 1 %, and above the target")  # fmt: skip
def _thrown(rows: pd.DataFrame) -> Answer:
    """by the mutated one it runs away, upwards or downwards by a constant in the reward"""
    # Closer to zero the objective can be the target for some β, which is then met.
    ends = _ends(rows, "mutated")
    high, low = need(ends, offset=lambda x: x >= 1), need(ends, offset=lambda x: x <= -1)
    said = "; ".join(
        f"rewards {offset:+g}: β = {same['controller_beta'].max():.2g}, "
        f"KL = {same['kl'].min():.2g} to {same['kl'].max():.2g}"
        for offset, same in ends.groupby("offset", sort=False)
    )
    least = (low["kl"] / low["largest_kl"]).min()
    away = high["kl"].max() < TARGET / 100 and least > 0.99 and low["kl"].min() > TARGET
    return f"{said} ({least:.3f} of the largest or more); draws: {ends['seed'].nunique()}", away


@claims.add(OWN, "k2 on target and the KL off by more than 5 %, or β gone to nothing", "1e-6 for k2; β < 1e-3")
def _missed(rows: pd.DataFrame) -> Answer:
    """by k2 it meets another KL, or none where k2 comes to the target at no β"""
    ends = _ends(rows, "k2")
    met = (ends["metric"] / TARGET - 1).abs() < 1e-6
    lost, off = (ends["metric"] < TARGET) & (ends["controller_beta"] < 1e-3), (ends["kl"] / TARGET - 1).abs()
    low, high = ends["kl"][met].min(), ends["kl"][met].max()
    said = f"k2 meets {TARGET:g} in {met.sum()} of {len(ends)}, the KL is {low:.4f} to {high:.4f} there"
    return said, (met | lost).all() and met.any() and off.min() > 0.05


@claims.add(OWN, "off by more than 10 %", "10 %")
def _scaled(rows: pd.DataFrame) -> Answer:
    """by β·KL, the term as it enters the loss, it misses"""
    ends = _ends(rows, "scaled")
    beta, kl = ends["controller_beta"].max(), ends["kl"]
    said = f"β = {beta:.1e} at most, KL = {kl.min():.3f} to {kl.max():.3f} for a target of {TARGET:g}"
    return f"{said}; draws: {ends['seed'].nunique()}", (kl / TARGET - 1).abs().min() > 0.1


claims.bound("off-policy a metric with the ratio of the sequence, or of prefixes, is the KL", "theory", "KL(π‖ref)",
    SUMS, lambda found: found[["sequence ratio", "prefix ratio"]].sub(found["kl"], axis=0).abs().sum(axis=1), EXACT,
    "reweighted")  # fmt: skip

claims.bound("with the token's ratio, k1 or k3, it is the next-token KL at the sampler's prefixes", TRL,
    "local reverse KL at the sampler's prefixes", SUMS,
    lambda found: found[["token ratio", "token ratio, k3"]].sub(found["local@sampler"], axis=0).abs().sum(axis=1),
    EXACT, "reweighted")  # fmt: skip


@claims.add(TRL, "off the KL", "more than 0.1 %")
def _unweighted(rows: pd.DataFrame) -> Answer:
    """with no ratio, or the geometric mean of the sequence's, it is neither"""
    found = need(rows, "reweighted")
    farthest = found["staleness"].max()
    found = need(found, staleness=farthest)
    names = ["no ratio", "geometric ratio", "geometric ratio, k3", "token ratio"]
    off = (found[names].div(found["kl"], axis=0) - 1).abs().stack()
    return f"off by {off.min():.0%} … {off.max():.0%} of the KL, staleness {farthest:g}", off.min() > 1e-3


@claims.add(OWN, "negative for R or for −R", SUMS)
def _advantage(rows: pd.DataFrame) -> Answer:
    """times an advantage it is the covariance of reward and log-ratio, of either sign"""
    found = need(rows, "reweighted")
    one, other = found["advantage"], found["advantage of −R"]
    exact = (one - found["covariance"]).abs().max() < EXACT
    lowest = (np.minimum(one, other) / found["kl"]).min()
    return f"down to {lowest:.1f} times the KL", exact and (one * other < 0).all() and (found["kl"] > 0).all()


claims.bound("masked where rewards tie it reads Σ π·u·(1 − P(the others earn the same))", MASKS, "the closed form",
    SUMS, "closed_form_error", EXACT, "masked")  # fmt: skip

claims.bound("in evaluation groups of one it reads zero", MASKS, "0", SUMS, "read", EXACT, "masked", group_size=1)


@claims.add(
    OWN, "the sign of log(p(1 − p)/(r(1 − r))), p and r the chances of a right answer", "closed form; 1e-9 for zero"
)
def _negative(rows: pd.DataFrame) -> Answer:
    """in groups of two it reads negative exactly where the policy is surer of right or wrong than the reference"""
    found = need(rows, "masked", group_size=2)
    chance, reference = found["success"], found["reference_success"]
    surer = np.log(chance * (1 - chance) / (reference * (1 - reference)))
    agrees = np.sign(found["read"].round(9)) == np.sign(surer.round(9))
    low = found.loc[found["read"].idxmin()]
    said = f"so {agrees.sum()} times of {len(found)}, references: {found['seed'].nunique()}; down to {low['read']:.4f}"
    return f"{said}, where the KL is {low['kl']:.4f}", agrees.all() and low["read"] < -1e-3


claims.bound("averaged over padded positions it falls as the batch is padded more", PADDED, "E[Σu]/(padded length)",
    SUMS, lambda found: found["mean over zeros"] - found["kl"] / found["padded_length"].clip(lower=4), EXACT,
    "padding")  # fmt: skip

claims.bound("and reads the padding where that is not zero", PADDED,
    "E[Σu]/T + c·(1 − E[L]/T), c the log-ratio there", SUMS, lambda found: found["mean over garbage"]
    - found["mean over zeros"] - GARBAGE * (1 - found["length"] / found["padded_length"].clip(lower=4)), EXACT,
    "padding")  # fmt: skip

claims.bound("along a run k1 and k3 have the KL as their mean", "Schulman 2020", "KL(π‖ref)", SUMS,
    lambda found: found["mean"] - found["kl"], EXACT, "logged", estimator=("k1-loss", "k3-loss"))  # fmt: skip


@claims.add("Schulman 2020", "biased far from the reference, hardly near it",
    "√KL, as third moments go, near; more than 10 % beyond 1")  # fmt: skip
def _biased(rows: pd.DataFrame) -> Answer:
    """k2 has not: its bias grows with the distance"""
    found = need(rows, "logged", estimator="k2-loss")
    bias = (found["mean"] / found["kl"] - 1).abs()
    far, near = known(bias[found["kl"] > 1]), known(bias[found["kl"] < 0.05])
    said = f"at most {near.max():.1%} at a KL below 0.05, up to {far.max():.0%} beyond 1"
    return said, (near < found["kl"].loc[near.index] ** 0.5).all() and far.max() > 0.1


# Close to the reference u has variance 2·KL.
claims.between("near the reference k1's standard deviation is √(2·KL), far more than the KL", "Schulman 2020",
    "√(2·KL)", "10 %, KL below 0.05", "{low:.3f} … {high:.3f} of it",
    lambda found: found["std"] / (2 * found["kl"]) ** 0.5, "logged",
    estimator="k1-loss", kl=lambda x: x < 0.05, above=0.9, below=1.1)  # fmt: skip


@claims.add("Schulman 2020; theory", "half of k1's below a KL of 0.1, more beyond 3", "as said")
def _crossing(rows: pd.DataFrame) -> Answer:
    """k3 is less noisy near the reference and noisier far from it"""
    one, three = (need(rows, "logged", estimator=name) for name in ("k1-loss", "k3-loss"))
    pairs = one.merge(three, on=["beta", "seed", "step"], suffixes=("", "_k3"))
    ratio = pairs["std_k3"] / pairs["std"]
    near, far = (known(ratio[where]) for where in (pairs["kl"] < 0.1, pairs["kl"] > 3))
    return f"less than half near, up to {far.max():.0f} times far", near.max() < 0.5 and far.min() > 1


@claims.add(OWN, "none of the three", "1 % apart, nine times out of ten")
def _none_of_three(rows: pd.DataFrame) -> Answer:
    """a mean over rollouts of k3's mean per token is none of E[Σu], E[Σu]/E[L], E[Σu/L]"""
    found = need(rows, "logged", estimator="k3-loss")
    # Along a run the curves may cross: one point says nothing.
    times = 1 / found[["kl", "kl_per_token", "mean_of_token_means"]].div(found["over_own_length"], axis=0)
    off = (times - 1).abs().min(axis=1)
    apart = (off > 0.01).mean()
    return f"{apart:.0%} of {len(off)} are, by {off.median():.0%} in the median", apart > 0.9


claims.bound("it is E[Σu/L] + E[Σ(w − 1)/L]", OWN, "equal", SUMS,
    lambda found: found["over_own_length"] - found["mean_of_token_means"] - found["correction"], EXACT,
    "logged", estimator="k3-loss")  # fmt: skip


@claims.add(OWN, "below zero", "below −0.001")
def _below_zero(rows: pd.DataFrame) -> Answer:
    """and k1's is E[Σu/L], no divergence: it reads below zero early in a run"""
    found = need(rows, "logged", estimator="k1-loss")
    low = found.loc[found["over_own_length"].idxmin()]
    said = f"{low['over_own_length']:.4f} at KL {low['kl']:.4f}, step {low['step']}"
    return said, low["over_own_length"] < -1e-3 and low["kl"] > 0


numbers.add(lambda rows: [number("target", TARGET)])
numbers.melt("mutation", ["kl", "read"], ["step", "beta"], copied=False, seed=0)

numbers.melt("controller", {"kl": "kl at the end"}, ["read", "offset"],
    round=CONTROLLER["rounds"], seed=0)  # fmt: skip


@numbers.add
def _of_masks(rows: pd.DataFrame) -> Cited:
    found = need(rows, "masked", seed=0)
    yield from melted(found, {"read": "masked"}, ["group_size", "success"])
    yield from melted(found.drop_duplicates("success"), ["kl"], ["success"])


numbers.melt("logged", ["mean", "std", "kl"], ["estimator", "step", "beta"], seed=0)
numbers.single("logged", {"lowest mean of token means": ("over_own_length", "min")}, estimator="k1-loss")
