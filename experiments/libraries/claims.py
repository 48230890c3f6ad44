"""Gradients that libraries follow by default and did before: claims, the table of defaults, counts and dates."""

from collections.abc import Mapping

import pandas as pd

from kltest.identify.instances import instances
from kltest.reproduce.bounds import above, at_least, at_most, exactly, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, Rows, frame, need, ordered, records, select
from kltest.reproduce.numbers import Cited, Numbers, number
from kltest.scoreboard.classes import CLASSES
from kltest.scoreboard.rows import MARGIN

from .experiment import PARTS, PENALTY, ROUNDING

# A share of the gradient that no choice of the coefficient mends, below which a direction counts as right.
MENDED = 0.1
SHORT = {"reverse_kl": "∇KL(π‖ref)", "local_reverse_kl": "local ∇KL(π‖ref)", "local_forward_kl": "local ∇KL(ref‖π)"}
RECORDED = "a count of recorded settings"

claims, numbers = Claims("libraries"), Numbers()
tidy = ordered(PARTS)


def left(rows: pd.DataFrame) -> pd.Series:
    """The share of the norm that is wrong at the best coefficient; all of it if none is positive."""
    cosine = rows["cosine"].astype(float).fillna(0).clip(0, 1)
    return (1 - cosine**2) ** 0.5


@claims.measure(OWN, RECORDED, following=at_most(1), following_off_policy=exactly(0))
def _penalties(rows: pd.DataFrame) -> Measured:
    """of the penalties that libraries switch on by default at most {following} follows ∇KL(π‖ref) of whole sequences
    with its coefficient, and none does if another policy drew the rollouts"""
    found = need(rows, "defaults", purpose=PENALTY)
    on = found[~found["off"].astype(bool)]
    right = on["relative_bias"] < ROUNDING
    return {
        "following": right.sum(),
        "following_off_policy": (right & (on["stale_bias"] < ROUNDING)).sum(),
        "penalties": len(on),
        "off": len(found) - len(on),
        "libraries": found["library"].nunique(),
    }


@claims.measure(OWN, RECORDED, following=exactly(0), off=at_least(1))
def _penalties_off(rows: pd.DataFrame) -> Measured:
    """of the penalties that are off unless a user switches them on, and of which there are {off}, {following} follow it
    once they are on"""
    found = need(rows, "defaults", purpose=PENALTY)
    off = found[found["off"].astype(bool)]
    return {"following": (off["relative_bias"] < ROUNDING).sum(), "off": len(off)}


@claims.measure(OWN, "limits are sampled, each with an interval that misses once in 10,000 times", left=at_most(MARGIN))
def _limits(rows: pd.DataFrame) -> Measured:
    """where a default that couples rows has a limit as batches grow, it leaves at most {left} of the gradient of the
    largest batches, at the end of the interval"""
    found = need(rows, "defaults", couples=True)
    known = found[found["limit_kind"] != ""]
    return {"left": known["left_high"], "defaults": len(known), "of": len(found)}


@claims.measure(OWN, RECORDED, within_the_margin=at_most(2), margin=MENDED)
def _directions(rows: pd.DataFrame, margin: float) -> Measured:
    """another coefficient mends at most {within_the_margin} of them: of all others more than {margin} of the norm is
    wrong at the best one"""
    wrong = left(need(rows, "defaults", purpose=PENALTY))
    return {"within_the_margin": (wrong <= margin).sum(), "wrong_in_the_others": wrong[wrong > margin]}


@claims.measure(OWN, "libraries compute in float32", relative_bias=near(0, ROUNDING))
def _instead(rows: pd.DataFrame) -> Measured:
    """each setting that is proposed instead of a default follows ∇KL(π‖ref) of whole sequences"""
    return {"relative_bias": need(rows, "instead")["relative_bias"]}


@claims.measure(OWN, RECORDED, changes_of_class=exactly(1), days=above(365))
def _changes(rows: pd.DataFrame) -> Measured:
    """in more than {days} days of releases one default penalty of those followed has come to another gradient"""
    found = need(rows, "history", default=True, purpose=PENALTY)
    dates = pd.to_datetime(found["released"])
    turned = found[found["class_changed"].astype(bool)]
    said = [f"{row['library']} {row['version']} ({row['released']})" for row in records(turned)]
    return {"changes_of_class": len(turned), "days": (dates.max() - dates.min()).days, "which": said}


def tables(rows: Rows) -> dict[str, list[Row]]:
    """A row a default, in few words."""
    found, instead = select(rows, "defaults"), select(rows, "instead")
    return {"table": [_line(row, instead) for row in records(found)]} if len(found) else {}


def _line(row: Row, instead: pd.DataFrame) -> Row:
    right = records(select(instead, library=row["library"], default=row["setting"]))
    wrong = left(frame([row])).iloc[0] if "cosine" in row else 1.0
    return {
        "purpose": row["purpose"],
        "library": row["library"],
        "version": row["version"],
        "setting": row["setting"],
        "unset": _unset(row["unset"]),
        "follows": _gradient(row["gradient"]) + "*" * row["equal_lengths"],
        "off-policy": row["off_policy"],
        "bias": _share(row["relative_bias"]),
        "best": _share(wrong),
        "limit": row["limit"],
        "off by": f"{row['off_by']:.2g}/{row['limit_of']}" if row.get("off_by") else "",
        "instead": right[0]["setting"] if right else "",
        "of": ("kltest" if right[0]["ours"] else "on-policy") if right else "",
    }


def _short(name: str) -> str:
    return SHORT.get(name) or name.replace("_", " ")


def _gradient(terms: Mapping[str, str]) -> str:
    """A combination with its factors; one factor of all terms stands behind them."""
    if not terms:
        return "unnamed"
    if "zero" in terms:
        return "nothing"
    factors = set(terms.values())
    if len(factors) == 1:
        by = factors.pop()
        return " + ".join(map(_short, terms)) + f", × {by}" * bool(by)
    words = " + ".join(f"{by}·{_short(name)}" if by else _short(name) for name, by in terms.items())
    return words.replace("+ −", "− ")


def _unset(words: str) -> str:
    """Return the behaviour if nothing is set, without the setting's name."""
    state, _, value = words.partition(", ")
    amount = value.rpartition(" = ")[2]
    return {"no KL": "off", "KL on": f"on, {amount}".replace(", True", ""), "the loss itself": "is the loss"}.get(
        state, "no reference" if "reference" in state else state
    )


def _share(value: float) -> str:
    return "0" if value < ROUNDING else f"{value:.2f}"


@numbers.add
def _of_defaults(rows: pd.DataFrame) -> Cited:
    found = need(rows, "defaults")
    yield number("tokens", instances("sequence", 0)[0].environment.horizon)
    for purpose, own in found.groupby("purpose", sort=False):
        yield number("defaults", len(own), purpose=purpose)
        yield number("defaults that are off", own["off"].astype(bool).sum(), purpose=purpose)
        yield number("libraries", own["library"].nunique(), purpose=purpose)
        for kind in CLASSES:
            yield number("defaults", (own["kind"] == kind).sum(), purpose=purpose, kind=kind)


@numbers.add
def _of_biases(rows: pd.DataFrame) -> Cited:
    """In the largest batches that were enumerated."""
    found = need(rows, "defaults", purpose=PENALTY)
    for kind, own in found.groupby("finite_kind", sort=False):
        yield number("largest bias at the best coefficient", left(own).max(), kind=kind)


@numbers.add
def _of_limits(rows: pd.DataFrame) -> Cited:
    """What a batch of B rollouts, or a group of as many, is off by is `off by`/B."""
    found = need(rows, "defaults", limit_kind=lambda kind: kind != "")
    for row in records(found):
        yield number("off by", row["off_by"], library=row["library"], setting=row["setting"])


@numbers.add
def _of_history(rows: pd.DataFrame) -> Cited:
    found = need(rows, "history")
    yield number("releases", len(found[["library", "version"]].drop_duplicates()))
    for row in records(found[found["changed"].astype(bool)]):
        yield number("version of the change", row["version"], library=row["library"], setting=row["setting"])
    yield number("first release", found["released"].min())
