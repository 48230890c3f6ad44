"""Metrics that are logged as the KL: claims, tables and the numbers that the paper cites."""

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, at_most, below, exactly, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import known, need, ordered
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .settings import CONTROLLER, EXACT, GARBAGE, PARTS

SLIME = "slime #2114"
TRL = "TRL #4638 and #6586"
MASKS = "TRL #5588 and #5640"
PADDED = "TRL #6803 and #6809"
TARGET = CONTROLLER["target"]
SUMS = "sums of float64"

claims = Claims("metrics")
numbers = Numbers()
tidy = ordered(PARTS)

claims.column(
    "k1 in the reward made in place: at every step what was recorded as the KL reads, per rollout, as the "
    "objective E[R] − β·KL itself",
    f"{SLIME}; {OWN}",
    SUMS,
    "read - objective",
    near(0, EXACT),
    "mutation",
    copied=False,
)

claims.column(
    "what was recorded before was right, the KL(π‖ref)", SLIME, SUMS, "recorded - kl", near(0, EXACT), "mutation"
)


@claims.measure(f"{SLIME}; {OWN}", SUMS, kl=near(0, EXACT), read_off_reward=near(0, EXACT))
def _at_the_start(rows: pd.DataFrame) -> Measured:
    """before the first update, where there is no KL, it reads E[R]"""
    found = need(rows, "mutation", copied=False, step=0)
    return {"kl": found["kl"], "read_off_reward": found["read"] - found["reward"], "read": found["read"]}


@claims.measure(SLIME, "torch.equal", in_place_identical=exactly(0), copies_identical=EVERY)
def _bits(rows: pd.DataFrame) -> Measured:
    """a comparison of bits before and after the loss tells at every step: never identical in place, always with a
    copy"""
    found = need(rows, "mutation")
    in_place, copies = (need(found, copied=copied)["identical"].astype(bool) for copied in (False, True))
    return {"in_place_identical": int(in_place.sum()), "copies_identical": copies, "steps_in_place": len(in_place)}


@claims.measure(SLIME, "digests of the logits", same_policy=EVERY)
def _silent(rows: pd.DataFrame) -> Measured:
    """neither the gradient nor training shows it: the policies are the same to the last bit"""
    runs = need(rows, "mutation").groupby(["beta", "seed", "step"])["policy"].agg(["size", "nunique"])
    return {"same_policy": runs[runs["size"] == 2]["nunique"] == 1}


def _ends(rows: pd.DataFrame, read: str) -> pd.DataFrame:
    """The last round of controllers that go by `read`."""
    return need(rows, "controller", read=read, round=CONTROLLER["rounds"])


claims.column(
    "an adaptive β that goes by the true KL meets its target",
    "Ziegler et al. 2019, §2.2",
    "after the rounds made",
    f"kl / {TARGET:g}",
    near(1, 1e-6),
    "controller",
    read="kl",
    round=CONTROLLER["rounds"],
)


@claims.measure(
    OWN,
    "a hundredth of the target; all that there can be but a hundredth; nearer to zero the objective can be the target "
    "for some β, which is then met",
    raised=below(0.01),
    lowered=above(0.99),
    lowered_over_target=above(1),
    up=at_least(1),
    down=at_most(-1),
)
def _thrown(rows: pd.DataFrame, up: Bound, down: Bound) -> Measured:
    """by the mutated one it runs away: with an offset of {up} or more in the reward the KL ends below {raised:.0%} of
    the target, with one of {down} or less above {lowered:.0%} of all that there can be, −log ref(best)"""
    ends = _ends(rows, "mutated")
    high, low = need(ends, offset=up), need(ends, offset=down)
    return {
        "raised": high["kl"] / TARGET,
        "lowered": low["kl"] / low["largest_kl"],
        "lowered_over_target": low["kl"] / TARGET,
        "draws": ends["seed"].nunique(),
    }


@claims.measure(
    OWN,
    "k2 meets the target after the rounds made; a twentieth of it would still be near",
    met_or_out_of_reach=EVERY,
    met=at_least(1),
    kl_off_target=above(0.05),
    beta=below(1e-3),
)
def _missed(rows: pd.DataFrame, beta: Bound) -> Measured:
    """by k2 the KL ends off the target by more than {kl_off_target:.0%}: k2 meets the target, or, where it comes to it
    at no β, β goes below {beta}"""
    ends = _ends(rows, "k2")
    met = (ends["metric"] / TARGET - 1).abs() < 1e-6
    return {
        "met_or_out_of_reach": met | (ends["metric"] < TARGET) & beta(ends["controller_beta"]),
        "met": int(met.sum()),
        "kl_off_target": (ends["kl"] / TARGET - 1).abs(),
        "kl_where_met": ends["kl"][met],
    }


@claims.measure(OWN, "a tenth of the target would still be near", kl_off_target=above(0.1))
def _scaled(rows: pd.DataFrame) -> Measured:
    """by β·KL, the term as it enters the loss, it misses by more than {kl_off_target:.0%} of the target"""
    ends = _ends(rows, "scaled")
    return {
        "kl_off_target": (ends["kl"] / TARGET - 1).abs(),
        "largest_β": ends["controller_beta"].max(),
        "draws": ends["seed"].nunique(),
    }


for _column in ("sequence ratio", "prefix ratio"):
    claims.column(
        f"off-policy a metric with the {_column} is the KL",
        "Precup et al. 2000",
        SUMS,
        f"`{_column}` - kl",
        near(0, EXACT),
        "reweighted",
    )

for _column, _words in (("token ratio", "k1"), ("token ratio, k3", "k3")):

    @claims.measure(
        TRL,
        SUMS,
        claim=f"with the token's ratio {_words} is the next-token KL at the sampler's prefixes",
        off=near(0, EXACT),
        column=_column,
    )
    def _with_token_ratio(rows: pd.DataFrame, column: str) -> Measured:
        found = need(rows, "reweighted")
        return {"off": found[column] - found["local@sampler"]}


@claims.measure(TRL, "a thousandth of the KL, ten digits above rounding", off_the_kl=above(1e-3))
def _unweighted(rows: pd.DataFrame) -> Measured:
    """with no ratio, the token's, or the geometric mean of the sequence's, it is not the KL: at the largest staleness
    off by more than {off_the_kl:.1%}"""
    found = need(rows, "reweighted")
    found = need(found, staleness=found["staleness"].max())
    names = ["no ratio", "geometric ratio", "geometric ratio, k3", "token ratio"]
    return {"off_the_kl": (found[names].div(found["kl"], axis=0) - 1).abs(), "draws": found["seed"].nunique()}


@claims.measure(OWN, SUMS, off_covariance=near(0, EXACT), product_of_signs=below(0), kl=above(0))
def _advantage(rows: pd.DataFrame) -> Measured:
    """times an advantage it is the covariance of reward and log-ratio, negative for R or for −R, while the KL is not"""
    found = need(rows, "reweighted")
    one, other = found["advantage"], found["advantage of −R"]
    return {
        "off_covariance": one - found["covariance"],
        "product_of_signs": np.sign(one) * np.sign(other),
        "kl": found["kl"],
        "down_to_times_the_kl": (np.minimum(one, other) / found["kl"]).min(),
    }


claims.column(
    "masked where rewards tie it reads `Σ π·u·(1 − P(the others earn the same))`",
    MASKS,
    SUMS,
    "closed_form_error",
    near(0, EXACT),
    "masked",
)

claims.column(
    "in evaluation groups of {group_size} it reads zero", MASKS, SUMS, "read", near(0, EXACT), "masked", group_size=1
)


@claims.measure(
    OWN, "zero to nine decimals; a thousandth of a nat", sign_as_said=EVERY, lowest=below(-1e-3), group_size=2
)
def _negative(rows: pd.DataFrame, group_size: int) -> Measured:
    """in groups of {group_size} it reads negative, down to less than {lowest}, exactly where the policy is surer of
    right or wrong than the reference: its sign is that of `log(p(1 − p)/(r(1 − r)))`, p and r the chances of a right
    answer"""
    found = need(rows, "masked", group_size=group_size)
    chance, reference = found["success"], found["reference_success"]
    surer = np.log(chance * (1 - chance) / (reference * (1 - reference)))
    return {
        "sign_as_said": np.sign(found["read"].round(9)) == np.sign(surer.round(9)),
        "lowest": found["read"].min(),
        "references": found["seed"].nunique(),
    }


@claims.measure(PADDED, SUMS, off=near(0, EXACT))
def _padded(rows: pd.DataFrame) -> Measured:
    """averaged over padded positions it falls as the batch is padded more: it is E[Σu]/(padded length)"""
    found = need(rows, "padding")
    return {"off": found["mean over zeros"] - found["kl"] / found["padded_length"].clip(lower=4)}


@claims.measure(PADDED, SUMS, off=near(0, EXACT))
def _garbage(rows: pd.DataFrame) -> Measured:
    """and reads the padding where that is not zero: `c·(1 − E[L]/T)` more, c the log-ratio there"""
    found = need(rows, "padding")
    dead = 1 - found["length"] / found["padded_length"].clip(lower=4)
    return {"off": found["mean over garbage"] - found["mean over zeros"] - GARBAGE * dead}


claims.column(
    "along a run k1 and k3 have the KL as their mean",
    "Schulman 2020",
    SUMS,
    "mean - kl",
    near(0, EXACT),
    "logged",
    estimator=("k1-loss", "k3-loss"),
)


@claims.measure(
    "Schulman 2020",
    "√KL, as third moments go; a tenth",
    bias_over_root_of_kl=below(1),
    largest_bias_far=above(0.1),
    near_kl=below(0.05),
    far_kl=above(1),
)
def _biased(rows: pd.DataFrame, near_kl: Bound, far_kl: Bound) -> Measured:
    """k2 has not: for a KL below {near_kl} its bias, over the KL, is less than √KL, for one above {far_kl} it reaches
    more than {largest_bias_far:.0%}"""
    found = need(rows, "logged", estimator="k2-loss")
    bias = (found["mean"] / found["kl"] - 1).abs()
    close = known(found[near_kl(found["kl"])])
    return {
        "bias_over_root_of_kl": bias[close.index] / close["kl"] ** 0.5,
        "largest_bias_far": known(bias[far_kl(found["kl"])]).max(),
    }


# Close to the reference u has variance 2·KL.
claims.column(
    "near the reference, KL below {kl}, k1's standard deviation is within {bound:±.0%} of `√(2·KL)`, far "
    "more than the KL",
    "Schulman 2020",
    "the next order in √KL",
    "std / (2 * kl) ** 0.5",
    near(1, 0.1),
    "logged",
    estimator="k1-loss",
    kl=below(0.05),
)


@claims.measure(
    f"Schulman 2020; {OWN}",
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


@claims.measure(OWN, "along a run the curves may cross: one point says nothing", share_apart=above(0.9), apart=0.01)
def _none_of_three(rows: pd.DataFrame, apart: float) -> Measured:
    """a mean over rollouts of k3's mean per token is none of E[Σu], E[Σu]/E[L], E[Σu/L]: more than {apart:.0%} off the
    nearest of them at more than {share_apart:.0%} of the points looked at"""
    found = need(rows, "logged", estimator="k3-loss")
    times = 1 / found[["kl", "kl_per_token", "mean_of_token_means"]].div(found["over_own_length"], axis=0)
    off = (times - 1).abs().min(axis=1)
    return {"share_apart": (off > apart).mean(), "points": len(off), "median": off.median()}


claims.column(
    "it is `E[Σu/L] + E[Σ(w − 1)/L]`",
    OWN,
    SUMS,
    "over_own_length - mean_of_token_means - correction",
    near(0, EXACT),
    "logged",
    estimator="k3-loss",
)


@claims.measure(OWN, "a thousandth of a nat", lowest=below(-1e-3), kl_there=above(0))
def _below_zero(rows: pd.DataFrame) -> Measured:
    """and k1's is E[Σu/L], no divergence: it comes to read less than {lowest}"""
    found = need(rows, "logged", estimator="k1-loss")
    low = found.loc[found["over_own_length"].idxmin()]
    return {"lowest": low["over_own_length"], "kl_there": low["kl"], "at_step": int(low["step"])}


numbers.add(lambda rows: [number("target", TARGET)])
numbers.melt("mutation", ["kl", "read"], ["step", "beta"], copied=False, seed=0)

numbers.melt("controller", {"kl": "kl at the end"}, ["read", "offset"], round=CONTROLLER["rounds"], seed=0)


@numbers.add
def _of_masks(rows: pd.DataFrame) -> Cited:
    found = need(rows, "masked", seed=0)
    yield from melted(found, {"read": "masked"}, ["group_size", "success"])
    yield from melted(found.drop_duplicates("success"), ["kl"], ["success"])


numbers.melt("logged", ["mean", "std", "kl"], ["estimator", "step", "beta"], seed=0)
numbers.single("logged", {"lowest mean of token means": ("over_own_length", "min")}, estimator="k1-loss")
