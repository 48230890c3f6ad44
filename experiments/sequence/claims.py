"""The part that a token-level loss misses on sequences: claims, a table by length and steering, and numbers."""

from itertools import pairwise

import pandas as pd

from kltest.reproduce.bounds import Bound, above, at_least, below, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, known, mean, need, ordered, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted

from .experiment import CONDITIONS, DISCOUNTS, EXACT, PARTS

TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the partial gradient of a token-level loss"
NOTA = f"Nota & Thomas 2019 for discounted gradients; {OWN}"
BLIND = f"Chen 2026, an example; {OWN}"
LOCAL = ("k2-loss", "full-loss", "k1-reward-immediate")
RIGHT = ("k1-reward", "k1-reward-to-go")
# A share of the gradient below this would not be called missing by anyone.
CLEAR = 1e-2
# Rounding stays below EXACT; what is there may be small, but not as small as this.
VISIBLE = 1e-4
SUMS = "sums of 10,000 terms in float64"

claims = Claims("sequence")
numbers = Numbers()
tidy = ordered(PARTS)


@claims.measure(TANG_MUNOS, SUMS, share_off=near(0, EXACT), estimators=LOCAL, column="off_local")
def _local_followed(rows: pd.DataFrame, estimators: tuple[str, ...], column: str) -> Measured:
    """a token-level loss follows the local gradient `Σ_t E ∇KL_t`, prefixes held fixed, at any length"""
    found = need(rows, "estimators", estimator=estimators)
    return {"share_off": found[column], "longest": found["length"].max()}


@claims.measure(TANG_MUNOS, SUMS, share_off=near(0, EXACT), estimators=RIGHT, column="bias")
def _truth_followed(rows: pd.DataFrame, estimators: tuple[str, ...], column: str) -> Measured:
    """k1 in the reward with credit for later tokens follows ∇KL(π‖ref), at any length"""
    return _local_followed(rows, estimators, column)


@claims.measure(BLIND, "rounding", to_go_off=near(0, 1e-12), the_others=near(0, 1e-15))
def _root_seen(rows: pd.DataFrame) -> Measured:
    """a blind root, a token whose own chances are the reference's, is moved by k1 in the reward with credit for later
    tokens, by `p(1 − p)·d`, and not by token-level losses"""
    right, blind = (need(rows, "root", estimator=names) for names in (RIGHT, (*LOCAL, "k3-loss")))
    truth = right["chance"] * (1 - right["chance"]) * right["departure"]
    return {"to_go_off": right["found"] - truth, "the_others": blind["found"]}


def _at_longest(rows: pd.DataFrame) -> pd.DataFrame:
    found = need(rows, "length")
    return found[found["length"] == found["length"].max()]


@claims.measure(OWN, "an order, in every draw", rise=above(0), length=at_least(1000))
def _steered(rows: pd.DataFrame, length: Bound) -> Measured:
    """what is missed, against what is kept, grows with how strongly tokens steer later ones, at the longest length"""
    found = _at_longest(rows)
    require(length(found["length"].iloc[0]))
    share = found["missed"] / found["kept"]
    by = share.groupby([found["steering"], found["seed"]]).mean().unstack("steering")
    return {
        "rise": by.diff(axis=1).stack().dropna(),
        "at_κ": [f"{level:g}: {mean(one):.2g}" for level, one in by.items()],
    }


@claims.measure(
    OWN,
    "a tenth and a twentieth of the gradient",
    mean_growth=above(0.1),
    change_beyond=near(0, 0.05),
    steering=at_least(0.75),
    memories=10,
)
def _levels_off(rows: pd.DataFrame, steering: Bound, memories: int) -> Measured:
    """for κ from {steering} on what is missed grows with length, from two tokens on by more than {mean_growth} in the
    mean over draws, up to a few memories `1/(1 − κ)`; from {memories} memories on it changes by less than
    {change_beyond:±}"""
    growth, change = [], []
    for level, mine in need(rows, "length", steering=steering).groupby("steering"):
        draws = mine.pivot_table("missed", "seed", "length")
        beyond = [length for length in draws if length >= memories / (1 - level) - EXACT]
        if len(beyond) < 2 or 2 not in draws or draws[[2, *beyond]].isna().any(axis=None):
            continue
        last = draws[beyond[-1]]
        growth.append((last - draws[2]).mean())
        change += list(last - draws[beyond[0]])
    return {"mean_growth": growth, "change_beyond": change}


@claims.measure(OWN, "a tenth: tokens differ in context", times=below(1.1), length=at_least(100))
def _last(rows: pd.DataFrame, length: Bound) -> Measured:
    """for T from {length} on the last token alone has less than {times}/T of the gradient"""
    long = need(rows, "length", length=length)
    return {"times": long["last"] * long["length"]}


@claims.measure(
    OWN,
    "rounding; a share below one percent would not be called missing",
    missed_if_so=near(0, EXACT),
    missed_else=above(CLEAR),
)
def _conditions(rows: pd.DataFrame) -> Measured:
    """a token-level loss misses nothing where the KL to come does not depend on the token (both policies context-free,
    or relabelled alike); with one of them context-free, or neither, it misses more than {missed_else:.0%} of the
    gradient in every draw"""
    found = need(rows, "conditions")
    exact = found["condition"].isin(("both context-free", "relabelled"))
    require(set(CONDITIONS) <= set(found["condition"]))
    means = found.groupby("condition")["missed"].mean().loc[list(CONDITIONS)]
    return {
        "missed_if_so": found[exact]["missed"],
        "missed_else": found[~exact]["missed"],
        "means": [f"{name} {share:.2f}" for name, share in means.items()],
    }


@claims.measure(OWN, "an order in every draw; rounding", fall=above(0), bias_at_1=near(0, EXACT))
def _discounted(rows: pd.DataFrame) -> Measured:
    """a discount γ goes from the local gradient to the whole: its bias falls in γ, to zero at `γ = 1`"""
    found = need(rows, "credit")
    by = known(found[found["steering"] > 0]).pivot_table("bias", ["steering", "seed"], "discount")
    falls = pd.concat([by[one] - by[other] for one, other in pairwise(DISCOUNTS)])
    return {
        "fall": falls,
        "bias_at_1": by[1.0],
        "mean_at_γ": [f"{at:g}: {by[at].mean():.2f}" for at in (0.0, 0.9, 0.99)],
    }


@claims.measure(
    NOTA,
    "rounding; what is there may be small, but not as small as this",
    asymmetry_of_one_token=near(0, EXACT),
    asymmetry_of_more=above(VISIBLE),
)
def _curl(rows: pd.DataFrame) -> Measured:
    """a token-level loss is the gradient of no function for more than one token: `‖J − Jᵀ‖/‖J + Jᵀ‖` is above
    {asymmetry_of_more}"""
    found = need(rows, "field")
    single, several = need(found, length=1), known(found[found["length"] > 1])
    return {"asymmetry_of_one_token": single["asymmetry"], "asymmetry_of_more": several["asymmetry"]}


@claims.measure(OWN, "rounding; a hundredth would be called little", missed=near(0, EXACT), asymmetry=above(CLEAR))
def _curl_without_bias(rows: pd.DataFrame) -> Measured:
    """it is the gradient of no function even where it misses nothing: `‖J − Jᵀ‖/‖J + Jᵀ‖` is above {asymmetry} there"""
    found = need(rows, "conditions", condition=("both context-free", "relabelled"))
    return {"missed": found["missed"], "asymmetry": found["asymmetry"]}


@claims.measure(
    OWN,
    "a Gauss-Legendre rule of 30 nodes an edge; a hundredth would be called little",
    true_gradient=near(0, EXACT),
    size=above(CLEAR),
)
def _circulation(rows: pd.DataFrame) -> Measured:
    """going round a rectangle of two logits a token-level loss gains more than {size} in size, ∇KL nothing"""
    local, whole = (need(rows, "circulation", field=name)["circulation"] for name in ("local_reverse_kl", "reverse_kl"))
    return {"true_gradient": whole, "size": local.abs(), "rectangles": len(whole)}


@claims.measure(
    OWN,
    "in probability, after the steps made; triangular to rounding",
    off_rest=near(0, 1e-6),
    not_triangular=near(0, EXACT),
    largest_eigenvalue=below(0),
)
def _ends(rows: pd.DataFrame) -> Measured:
    """with a reward, in a token tree, there is one end and no rotation: every start ends at the rest point, whose
    eigenvalues are real (the Jacobian is triangular) and below zero"""
    found = need(rows, "ends")
    return {
        "off_rest": found["off_rest"],
        "not_triangular": found[["by_earlier_logits", "blocks_asymmetry"]],
        "largest_eigenvalue": found["least_stable"],
        "starts_apart": found["starts_apart"],
    }


def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """The missed part, by length and steering: the share, and the cosine of the local gradient, means over draws."""
    found = []
    for length, mine in select(rows, "length").groupby("length") if len(select(rows, "length")) else ():
        line: Row = {"T": f"{length:,}"}
        for level, draws in mine.groupby("steering"):
            share, angle = mean(draws["missed"]), round(mean(draws["cosine"]), 2) + 0.0
            line[f"κ = {level:g}"] = f"{share:.2f} ({angle:.2f})".replace("-", "−") if share >= EXACT else "0 (1)"
        found.append(line)
    return {"table": found} if found else {}


@numbers.add
def _of_lengths(rows: pd.DataFrame) -> Cited:
    longest = _at_longest(rows)
    yield from melted(longest.groupby("steering")[["missed"]].mean(), {"missed": "missed"})
    short = need(rows, "length", length=2).groupby("steering")[["missed"]].mean()
    yield from melted(short, {"missed": "missed by two tokens"})
