"""Timing two things side by side, beside the least that ours could take, and the row that this leaves behind."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Ratio of two things that were timed in turn: the fastest round of ours over the fastest of theirs, or inverse.

    Attributes:
        low, high: Range of the rounds' own ratios.
        bound: The aim, None without one; `at_most` says on which side of it the ratio must lie.
        floor: The ratio if ours took no longer than what cannot be left out, None where nothing is known of that.
        ours, theirs: Seconds of the CPU in the fastest rounds, for orientation only.
    """

    claim: str
    case: str
    ratio: float
    low: float
    high: float
    bound: float | None
    at_most: bool
    floor: float | None
    ours: float
    theirs: float

    @property
    def met(self) -> bool | None:
        """True if the aim is met; None without one."""
        if self.bound is None:
            return None
        return self.ratio <= self.bound if self.at_most else self.ratio >= self.bound

    @property
    def share(self) -> float | None:
        """How much of what is possible is reached: 1 at the floor; None without one."""
        return None if self.floor is None else 1 / self.worse(self.floor)

    def worse(self, than: float) -> float:
        """How many times worse this ratio is than another."""
        return self.ratio / than if self.at_most else than / self.ratio


def cpu() -> float:
    """Seconds that this process and its children computed, those alone that have ended; a busy machine adds few."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def seconds(run: Callable[[], object], clock: Callable[[], float] = cpu) -> float:
    """Return the seconds of one call."""
    start = clock()
    run()
    return clock() - start


def compare(
    claim: str,
    case: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    bound: float | None,
    at_most: bool = True,
    floor: Callable[[], object] | float | None = None,
    rounds: int = 11,
    scale: float = 1.0,
    clock: Callable[[], float] = cpu,
) -> Row:
    """Time both in turn, after one warm-up; the ratio is ours/(scale·theirs), or the inverse if not `at_most`.

    A `floor` that can be called is timed beside them, in place of ours.
    """
    least = floor if callable(floor) else None
    for run in (ours, theirs, *([least] if least else [])):
        run()
    timed = [
        (seconds(ours, clock), scale * seconds(theirs, clock), seconds(least, clock) if least else 0.0)
        for _ in range(rounds)
    ]
    if least:
        quickest, others = (min(column) for column in list(zip(*timed, strict=True))[:0:-1])
        floor = quickest / others if at_most else others / quickest
    return from_pairs(claim, case, [pair[:2] for pair in timed], bound=bound, at_most=at_most, floor=floor)


def from_pairs(
    claim: str,
    case: str,
    pairs: Sequence[tuple[float, float]],
    *,
    bound: float | None,
    at_most: bool = True,
    floor: float | None = None,
    of: Callable[..., float] = min,
) -> Row:
    """The row of what was timed in turn, (ours, theirs) a round; `of` the rounds the fastest count, or the median."""
    ratios = [mine / other if at_most else other / mine for mine, other in pairs]
    ours, theirs = (of(column) for column in zip(*pairs, strict=True))
    ratio = ours / theirs if at_most else theirs / ours
    return Row(claim, case, ratio, min(ratios), max(ratios), bound, at_most, floor, ours, theirs)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| claim | case | ratio (rounds) | aim | met | floor | reached |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        aim = "–" if row.bound is None else f"{'≤' if row.at_most else '≥'} {row.bound:g}"
        met = {None: "–", True: "yes", False: "no"}[row.met]
        floor = "–" if row.floor is None else _short(row.floor)
        reached = "–" if row.share is None else f"{row.share:.0%}"
        times = "" if row.at_most else " times faster"
        numbers = f"{_short(row.ratio)}{times} ({_short(row.low)} – {_short(row.high)})"
        lines.append(f"| {row.claim} | {row.case} | {numbers} | {aim} | {met} | {floor} | {reached} |")
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"
