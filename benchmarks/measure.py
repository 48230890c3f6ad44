"""Timing two things side by side, and the row that a benchmark leaves behind."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas

RESULTS = Path(__file__).parent / "results.csv"


@dataclass(frozen=True)
class Row:
    """`ratio` is the median over rounds of ours/theirs, `low` … `high` its range; `bound` is what was promised.

    `at_most` says on which side of the bound the ratio must lie. Seconds are medians, for orientation only.
    """

    claim: str
    case: str
    ratio: float
    low: float
    high: float
    bound: float | None
    at_most: bool
    ours: float
    theirs: float

    @property
    def met(self) -> bool | None:
        """Return True if the median keeps the promise; None if none was made."""
        if self.bound is None:
            return None
        return self.ratio <= self.bound if self.at_most else self.ratio >= self.bound


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    claim: str,
    case: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    bound: float | None,
    at_most: bool = True,
    rounds: int = 11,
    scale: float = 1.0,
) -> Row:
    """Time both in turn, after one warm-up, and take the ratio ours/(scale·theirs) in each round.

    With `at_most` false the ratio is (scale·theirs)/ours: how many times faster.
    """
    ours(), theirs()
    pairs = [(seconds(ours), scale * seconds(theirs)) for _ in range(rounds)]
    return from_pairs(claim, case, pairs, bound=bound, at_most=at_most)


def from_pairs(
    claim: str, case: str, pairs: Sequence[tuple[float, float]], *, bound: float | None, at_most: bool = True
) -> Row:
    """The row of what was timed in turn, (ours, theirs) a round."""
    ratios = [mine / other if at_most else other / mine for mine, other in pairs]
    return Row(
        claim,
        case,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        bound,
        at_most,
        statistics.median(mine for mine, _ in pairs),
        statistics.median(other for _, other in pairs),
    )


def save(name: str, rows: list[Row], *, beside: bool = False) -> None:
    """Print the rows and put them into results.csv for the benchmark's old ones; `beside`: for the same cases only."""
    new = pandas.DataFrame([{"benchmark": name, **asdict(row)} for row in rows])
    if RESULTS.exists():
        old = pandas.read_csv(RESULTS)
        replaced = old["benchmark"] == name
        if beside:
            replaced &= old.set_index(["claim", "case"]).index.isin(new.set_index(["claim", "case"]).index)
        new = pandas.concat([old[~replaced], new]).sort_values("benchmark", kind="stable")
    new.to_csv(RESULTS, index=False, float_format="%.4g")
    print(table(rows), flush=True)


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| claim | case | ratio (min – max) | promised | met |", "|---|---|---|---|---|"]
    for row in rows:
        promised = "–" if row.bound is None else f"{'≤' if row.at_most else '≥'} {row.bound:g}"
        met = {None: "–", True: "yes", False: "no"}[row.met]
        times = "" if row.at_most else " times faster"
        numbers = f"{_short(row.ratio)}{times} ({_short(row.low)} – {_short(row.high)})"
        lines.append(f"| {row.claim} | {row.case} | {numbers} | {promised} | {met} |")
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"
