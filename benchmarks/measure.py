"""Timing two things side by side, beside the least that ours could take, and the row that this leaves behind."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from kltest.grading.isolated import Child


@dataclass(frozen=True)
class Row:
    """Ratio of two things that were timed in turn: the fastest round of ours over the fastest of theirs, or inverse.

    Attributes:
        low, high: Range of the rounds' own ratios.
        bound: The aim, None without one; `at_most` says on which side of it the ratio must lie.
        floor: The ratio if ours took no longer than what cannot be left out, None where nothing is known of that.
        ours, theirs: Seconds of the CPU in the fastest rounds, bytes or counts, for orientation only.
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
    least = floor if callable(floor) else (lambda: None)
    for run in (ours, theirs, least):
        run()
    timed = [(seconds(ours, clock), scale * seconds(theirs, clock), seconds(least, clock)) for _ in range(rounds)]
    if callable(floor):
        _, others, quickest = (min(column) for column in zip(*timed, strict=True))
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
    """The row of what was measured in turn, (ours, theirs) a round; `of` is the fastest of them or the median."""
    ratios = [mine / other if at_most else other / mine for mine, other in pairs]
    ours, theirs = (of(column) for column in zip(*pairs, strict=True))
    ratio = ours / theirs if at_most else theirs / ours
    return Row(claim, case, ratio, min(ratios), max(ratios), bound, at_most, floor, ours, theirs)


def memory(claim: str, case: str, measured: Callable[..., Iterator[Any]], *arguments: Any, bound: float | None) -> Row:
    """The row of what a generator yields in a fresh process: bytes of ours and theirs."""
    with Child(measured, *arguments, fresh=True) as child:
        step = child.step()
    if step.kind != "value":
        raise RuntimeError(f"{claim}: {step.message}")
    return from_pairs(claim, case, [step.value], bound=bound)


def measured(
    name: str, tree: Path, python: str = sys.executable, environment: Mapping[str, str] = os.environ
) -> pandas.DataFrame:
    """The rows that a script measures in a checkout, in a process of its own."""
    environment = {**environment, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        command = [python, "-m", "benchmarks", name, "--output", str(path)]
        done = subprocess.run(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name} was not measured in {tree}:\n{done.stderr[-2000:]}")
        return pandas.read_csv(path).drop(columns="benchmark")


def record(path: Path, rows: pandas.DataFrame, by: Sequence[str] = ()) -> None:
    """Write a table in place of what a file holds, or of those of its rows that have the same values of `by`."""
    if by and path.exists():
        old, places = pandas.read_csv(path), pandas.MultiIndex.from_frame
        others = old[~places(old[[*by]]).isin(places(rows[[*by]]))]
        rows = pandas.concat([others, rows]).sort_values([*by], kind="stable")
    rows.to_csv(path, index=False, float_format="%.5g")


def peak(run: Callable[[], object]) -> int:
    """Bytes by which the process grows at most in a call, by Linux's account."""

    def resident(which: str) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(next(line for line in status.splitlines() if line.startswith(which)).split()[1])

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted from here
    run()
    return resident("VmHWM") - before
