"""The part that a token-level loss misses on sequences: claims, a table by length and steering, and numbers."""

from itertools import pairwise

import pandas as pd

from kltest.reproduce.claims import OWN, Answer, Claims
from kltest.reproduce.frames import Row, known, mean, need, ordered, require, select
from kltest.reproduce.numbers import Cited, Numbers, melted, number

from .settings import CONDITIONS, DISCOUNTS, EXACT, PARTS

TANG_MUNOS = "Tang & Munos 2025 (arXiv 2506.09477), the partial gradient of a token-level loss"
LOCAL = ("k2-loss", "full-loss", "k1-reward-immediate")
RIGHT = ("k1-reward", "k1-reward-to-go")
# A share of the gradient below this would not be called missing by anyone.
CLEAR = 1e-2
# Rounding stays below EXACT; what is there may be small, but not as small as this.
VISIBLE = 1e-4
SUMS = f"{EXACT:g}: sums of 10,000 terms in float64"

claims = Claims("sequence")
numbers = Numbers()
tidy = ordered(PARTS)


def _followed(rows: pd.DataFrame, names: tuple[str, ...], column: str) -> Answer:
    found = need(rows, "estimators", estimator=names)
    off, longest = found[column].max(), found["length"].max()
    return f"{', '.join(found['estimator'].unique())}: off by {off:.0e} of its length, to T = {longest:,}", off < EXACT


@claims.add(TANG_MUNOS, "Σ_t E ∇KL_t, prefixes held fixed", SUMS)
def _local(rows: pd.DataFrame) -> Answer:
    """a token-level loss follows the local gradient, at any length"""
    return _followed(rows, LOCAL, "off_local")


@claims.add(TANG_MUNOS, "∇KL(π‖ref)", SUMS)
def _right(rows: pd.DataFrame) -> Answer:
    """k1 in the reward with credit for later tokens follows ∇KL(π‖ref), at any length"""
    return _followed(rows, RIGHT, "bias")


@claims.add("theory", "truth p(1 − p)·d, local 0", "1e-12 and 1e-15: rounding")
def _root(rows: pd.DataFrame) -> Answer:
    """the blind root"""
    found = need(rows, "root")
    off = (found["whole"] - found["chance"] * (1 - found["chance"]) * found["departure"]).abs().max()
    local = found["local"].abs().max()
    return f"truth off by {off:.0e}, local at most {local:.0e}", off < 1e-12 and local < 1e-15


@claims.add("theory", "to-go gives p(1 − p)·d, token-level losses 0", "1e-12 and 1e-15: rounding")
def _root_seen(rows: pd.DataFrame) -> Answer:
    """implementations at the blind root"""
    found = need(rows, "root", estimator=(*LOCAL, "k3-loss", *RIGHT))
    right = found["estimator"].isin(RIGHT)
    off = (found["found"] - found["whole"])[right].abs().max() if right.any() else 0.0
    blind = 0.0 if right.all() else found["found"][~right].abs().max()
    return f"to-go off by {off:.0e}; the others move the root by at most {blind:.0e}", off < 1e-12 and blind < 1e-15


claims.between("what is missed where no context is seen", OWN, "0 at κ = 0", f"{EXACT:g}: rounding",
    "at most {high:.0e}, over {count} lengths, vocabularies and draws", "missed", ("length", "vocabulary"),
    steering=0.0, below=EXACT)  # fmt: skip


def _at_longest(rows: pd.DataFrame) -> pd.DataFrame:
    found = need(rows, "length")
    return found[found["length"] == found["length"].max()]


@claims.add(OWN, "from 0 at κ = 0 upwards, in every draw", "the order, at the longest length")
def _steered(rows: pd.DataFrame) -> Answer:
    """what is missed, against what is kept, grows with how strongly tokens steer later ones"""
    found = _at_longest(rows)
    longest, share = found["length"].iloc[0], found["missed"] / found["kept"]
    by = share.groupby([found["steering"], found["seed"]]).mean().unstack("steering")
    require(by.shape[1] >= 2 and longest >= 1000)
    rises = all(draw.dropna().is_monotonic_increasing and draw.dropna().is_unique for _, draw in by.iterrows())
    text = ", ".join(f"{mean(found):.2g} at κ = {level:g}" for level, found in by.items())
    return f"T = {longest:,}: {text}", rises


@claims.add(OWN, "growth, then no change (κ ≥ 0.75)", "growth over 0.1; level to 0.05 from ten memories on")
def _levels_off(rows: pd.DataFrame) -> Answer:
    """what is missed grows with length up to a few memories 1/(1 − κ) in the mean over draws, then levels off"""
    found = need(rows, "length")
    growth, change = [], []
    for steering, mine in found[found["steering"] >= 0.75].groupby("steering"):
        draws = mine.pivot_table("missed", "seed", "length")
        beyond = [length for length in draws if length >= 10 / (1 - steering) - EXACT]
        if len(beyond) < 2 or 2 not in draws or draws[[2, *beyond]].isna().any(axis=None):
            continue
        last = draws[beyond[-1]]
        growth.append((last - draws[2]).mean())
        change.append((last - draws[beyond[0]]).abs().max())
    require(growth)
    least, most = min(growth), max(change)
    said = f"from T = 2 on it grows by {least:.2f} or more; beyond ten memories it changes by {most:.3f} at most"
    return said, least > 0.1 and most < 0.05


@claims.add(OWN, "a token decides the KL of (1 − κⁿ)/(1 − κ) later ones", SUMS)
def _formula(rows: pd.DataFrame) -> Answer:
    """what a persistent bigram misses, in closed form"""
    off = need(rows, part=("length", "vocabulary"))["off_formula"].max()
    longest = max(select(rows, "length").get("length", ()), default=0)
    return f"off by {off:.0e}, to T = {longest:,}", off < EXACT


claims.between("the last token alone", "theory", "about 1/T of the gradient", "1.1/T: tokens differ in context",
    "at most {high:.2f}/T for T ≥ 100", lambda long: long["last"] * long["length"], "length",
    length=lambda x: x >= 100, below=1.1)  # fmt: skip


@claims.add(OWN, "where the KL to come does not depend on the token: both context-free, or relabelled alike",
    f"exact: {EXACT:g}; not exact: above {CLEAR:g}")  # fmt: skip
def _conditions(rows: pd.DataFrame) -> Answer:
    """when a token-level loss is exact"""
    found = need(rows, "conditions")
    missed = found.groupby("condition")["missed"].agg(["min", "max", "mean"]).loc[list(CONDITIONS)]
    exact = missed.loc[["both context-free", "relabelled"], "max"].max() < EXACT
    clear = missed.loc[["policy context-free", "reference context-free", "neither"], "min"].min() > CLEAR
    again = found["off_again"].max()
    text = ", ".join(f"{name} {share:.2f}" for name, share in missed["mean"].items())
    return f"missed: {text}; second route off by {again:.0e}", exact and clear and again < EXACT


@claims.add(OWN, "bias falls in γ, to 0 at γ = 1", f"{EXACT:g} at γ = 1; the order elsewhere")
def _discounted(rows: pd.DataFrame) -> Answer:
    """a discount γ goes from the local gradient to the whole"""
    found = need(rows, "credit", what="discount", critic=0.0)
    by = known(found[found["steering"] > 0]).pivot_table("bias", ["steering", "seed"], "discount")
    falls = all((by[a] > by[b]).all() for a, b in pairwise(DISCOUNTS))
    ends, text = by[1.0].max(), ", ".join(f"{by[at].mean():.2f} at γ = {at:g}" for at in (0.0, 0.9, 0.99))
    return f"{text}, {ends:.0e} at γ = 1 (means over κ and draws)", falls and ends < EXACT


@claims.add(OWN, "(1 − α) times the bias of a discount λ", f"{EXACT:g}: rounding")
def _critic(rows: pd.DataFrame) -> Answer:
    """generalised advantages with a critic that knows a share α of the KL to come"""
    formed = need(rows, "credit", what="rollout by rollout")["off_formula"].max()
    by = need(rows, "credit", what="discount").pivot_table("bias", ["steering", "seed", "discount"], "critic")
    scaled = max((by[critic] - (1 - critic) * by[0.0]).abs().max() for critic in by)
    said = f"advantages formed along every rollout: off by {formed:.0e}; bias off by {scaled:.0e}"
    return said, max(formed, scaled) < EXACT


@claims.add("theory", "‖J − Jᵀ‖/‖J + Jᵀ‖ is 0 at T = 1 only", f"zero: {EXACT:g}; not zero: above {VISIBLE:g}")
def _curl(rows: pd.DataFrame) -> Answer:
    """a token-level loss is the gradient of no function for T > 1"""
    found = need(rows, "field")
    single = need(found, length=1)["asymmetry"].max()
    several = known(found[found["length"] > 1])["asymmetry"]
    said = f"one token: {single:.0e}; more: {several.min():.2g} to {several.max():.2f}"
    return said, single < EXACT and several.min() > VISIBLE


@claims.add(OWN, "an asymmetric Jacobian at an exact gradient", f"zero: {EXACT:g}; not zero: above {CLEAR:g}")
def _curl_without_bias(rows: pd.DataFrame) -> Answer:
    """it is the gradient of no function even where it misses nothing"""
    found = need(rows, "conditions", condition=("both context-free", "relabelled"))
    missed, least = found["missed"].max(), found["asymmetry"].min()
    return f"missed at most {missed:.0e}, asymmetry at least {least:.2f}", missed < EXACT and least > CLEAR


@claims.add(OWN, "∮ = Δp·ΔKL; 0 for ∇KL", f"{EXACT:g}: a Gauss-Legendre rule of 30 nodes an edge")
def _circulation(rows: pd.DataFrame) -> Answer:
    """what a token-level loss gains by going round a rectangle of two logits"""
    found = need(rows, "circulation")
    local, whole = (
        known(found[found["field"].isin(names)]) for names in (("local_reverse_kl", "k2-loss"), ("reverse_kl",))
    )
    off, none = (local["circulation"] - local["formula"]).abs().max(), whole["circulation"].abs().max()
    least, most = local["formula"].min(), local["formula"].max()
    said = f"Δp·ΔKL = {least:.6f} to {most:.6f}; both off by {off:.0e}; ∇KL: {none:.0e}; rectangles: {len(whole)}"
    return said, max(off, none) < EXACT and local["formula"].abs().min() > CLEAR


@claims.add(OWN, "every start ends at the rest point; eigenvalues real, below 0",
    f"1e-6 in probability after the steps made; triangular to {EXACT:g}")  # fmt: skip
def _ends(rows: pd.DataFrame) -> Answer:
    """with a reward, in a token tree: one end, no rotation"""
    found = need(rows, "ends")
    starts, off, stable = found["starts_apart"].min(), found["off_rest"].max(), found["least_stable"].max()
    triangular = found[["by_earlier_logits", "blocks_asymmetry"]].max(axis=None)
    said = f"starts {starts:.2f} apart end within {off:.0e} of the rest point; eigenvalues real to {triangular:.0e}"
    return f"{said}, the largest {stable:.3f}", off < 1e-6 and triangular < EXACT and stable < 0


def tables(rows: pd.DataFrame) -> dict[str, list[Row]]:
    """The missed part, by length and steering: the share, and the cosine of the local gradient, means over draws."""
    found = []
    for length, mine in select(rows, "length").groupby("length") if len(select(rows, "length")) else ():
        line: Row = {"T": f"{length:,}"}
        for level, draws in mine.groupby("steering"):
            share, angle = mean(draws["missed"]), mean(draws["cosine"])
            line[f"κ = {level:g}"] = f"{share:.2f} ({angle:.2f})".replace("-", "−") if share >= EXACT else "0 (1)"
        found.append(line)
    return {"table": found} if found else {}


@numbers.add
def _of_lengths(rows: pd.DataFrame) -> Cited:
    longest = _at_longest(rows)
    yield number("longest", longest["length"].max())
    share = longest.assign(relative=longest["missed"] / longest["kept"]).groupby("steering")
    yield from melted(share[["missed", "relative"]].mean(), {"missed": "missed", "relative": "missed against kept"})
    for which, words in (("min", "lowest cosine"), ("max", "highest cosine")):
        yield from melted(share[["cosine"]].agg(which), {"cosine": words})
    short = need(rows, "length", length=2).groupby("steering")[["missed"]].mean()
    yield from melted(short, {"missed": "missed by two tokens"})


numbers.melt("credit", ["bias"], ["discount", "steering"], means=True, what="discount", critic=0.0)
numbers.melt("conditions", ["missed", "asymmetry"], ["condition"], means=True)

numbers.single(("length", "vocabulary"), {"recursion against formula": ("off_formula", "max")})
numbers.single("field", {"largest asymmetry": ("asymmetry", "max")})
numbers.melt("circulation", ["circulation"], ["field"], seed=0)

numbers.single("ends", {"ends off rest": ("off_rest", "max"), "starts apart": ("starts_apart", "min")})
