"""Audits of a trained policy: the gradient that each estimator was found to follow there. Claims, a table, numbers."""

import pandas as pd

from kltest.estimators import find
from kltest.reproduce.bounds import EVERY, above, at_least, at_most
from kltest.reproduce.claims import Claims, Measured
from kltest.reproduce.frames import Row, Rows, known, need, records, select
from kltest.reproduce.numbers import Cited, Numbers, number
from kltest.truth import render

from .settings import AUDITS

THEORY = "the atlas, exact"
MARGIN = AUDITS["margin"]
EXPECTED = "reverse_kl"
TOGETHER = "all intervals of an audit hold together with 99 %"

claims, numbers = Claims("finetune"), Numbers()


def audited(rows: Rows) -> pd.DataFrame:
    """The audits, with what each estimator's SPEC names on rollouts of several lengths; Missing if there are none."""
    found = need(rows, "audits")
    specs = [find(name).spec.expectation("ragged", "current") for name in found["estimator"]]
    return found.assign(named=[None if one is None else " + ".join(one) for one in specs])


@claims.measure(
    THEORY, TOGETHER, as_named=EVERY, low_end_of_coefficient=at_most(1), high_end_of_coefficient=at_least(1)
)
def _names(rows: pd.DataFrame) -> Measured:
    """on a trained language model an audit finds no estimator to follow anything but what its SPEC names, with a
    coefficient whose interval holds {low_end_of_coefficient}"""
    found = audited(rows)
    # What cannot be told from zero follows nothing.
    found = known(found[found["named"].notna() & (found["follows"] != "zero")])
    return {
        "as_named": found["follows"] == found["named"],
        "low_end_of_coefficient": found["coefficient_low"],
        "high_end_of_coefficient": found["coefficient_high"],
    }


@claims.measure(THEORY, f"{TOGETHER}; the margin of an audit", low_end_of_distance=above(MARGIN))
def _refuted(rows: pd.DataFrame) -> Measured:
    """every estimator that SPEC says is biased on sequences is refuted: its distance from ∇KL(π‖ref) is surely more
    than {low_end_of_distance:.0%} of its norm"""
    found = audited(rows)
    return {"low_end_of_distance": found[found["named"] != EXPECTED]["distance_low"]}


@claims.measure(THEORY, f"{TOGETHER}; the margin of an audit", low_end_of_distance=at_most(MARGIN))
def _not_refuted(rows: pd.DataFrame) -> Measured:
    """and none that it says is unbiased is: the interval of its distance begins below {low_end_of_distance:.0%}"""
    found = audited(rows)
    return {"low_end_of_distance": found[found["named"] == EXPECTED]["distance_low"]}


def table(rows: Rows) -> list[Row]:
    """A row an estimator."""
    return [
        {
            "estimator": row["estimator"],
            "found to follow": _followed(row),
            "distance from ∇KL(π‖ref)": _interval(row, "distance"),
            "verdict": row["verdict"],
            "signal to noise": f"{max(row['signal_to_noise'], 0):.1f}",
            "bias overtakes": f"{row['crossing']:,.0f} rollouts" if "crossing" in row else "–",
        }
        for row in records(select(rows, "audits"))
    ]


def _followed(row: Row) -> str:
    if "coefficient" not in row:
        return "nothing distinguishable from zero"
    if row["rivals"] and row["follows"] != EXPECTED:
        return f"one of {row['rivals'] + 1} that fit"
    return f"{_interval(row, 'coefficient')} · {render({row['follows']: 1.0})}"


def _interval(row: Row, name: str) -> str:
    """A number and its interval, which may have no upper end."""
    high = f"{row[f'{name}_high']:.2f}]" if f"{name}_high" in row else "∞)"
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {high}".replace("-", "−")


@numbers.add
def _of_audits(rows: pd.DataFrame) -> Cited:
    found = audited(rows)
    for name in ("date", "torch"):
        yield number(f"audits: {name}", AUDITS[name])
    yield number("audit margin", MARGIN)
    yield number("most audited rollouts", found["rollouts"].max())
