"""Jobs: one target with its options each, graded in a child process of its own."""

import re
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kltest.adapters import named
from kltest.errors import UsageError
from kltest.grading.isolated import Child, Children, Kind, Output, Step, cores, note_bug
from kltest.grading.options import DEFAULT_TIMEOUT, Options, checked
from kltest.loss.target import named as named_loss
from kltest.report import Report

WAITING = 8
"""Children that wait between resolving their target and grading it; more would take too much memory."""
TO_REPORT = 3.0
"""Seconds that a child has after its time limit to report by itself what was reached; one that hangs is ended then."""
LINES_SHOWN, LINE_SHOWN = 5, 100
"""Lines of a failing target's output in its report, and characters of each."""


@dataclass(frozen=True)
class Job:
    """One target to be graded: its name in reports, what is resolved, and its checked options by their Python names.

    Modules are looked for in `folder` too.
    """

    name: str
    target: str
    given: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None

    @property
    def timeout(self) -> float:
        """Seconds that finding the target may take, and then grading it."""
        return self.given.get("timeout", DEFAULT_TIMEOUT)

    @classmethod
    def all_of(cls, target: str, given: Mapping[str, Any], folder: str | None = None) -> "list[Job]":
        """Return the jobs of a target: one, or one for each setting of a library.

        `given` holds checked options. Raises UsageError for a library or a setting that is not there.
        """
        settings = [
            cls(name, setting.target, checked(setting.options_with(given), lambda option: option.name), folder)
            for name, setting in named(target, to_grade=True)
        ]
        return settings or [cls(target, target, given, folder)]


class Graded(NamedTuple):
    """The report of the job of this number, and how grading ended: "usage" is a misuse that shows only in a call."""

    number: int
    report: Report
    kind: Kind


def graded(jobs: Sequence[Job]) -> Iterator[Graded]:
    """Yield the report of each job as it is finished; as many are graded at once as there are cores.

    Raises:
        UsageError: A target cannot be called; nothing has been graded then.
    """
    for job in jobs:
        if job.folder is not None and job.folder not in sys.path:
            sys.path.append(job.folder)
        named_loss(job.target)  # refuses unknown names, missing files and modules before torch is imported
    # Imported before children are forked, so that each has torch already.
    import kltest.grading.grader  # noqa: F401

    def work(number: int, child: Child, resolved: Step) -> Generator[Child, Step, Graded]:
        if len(jobs) > 1 and sys.stderr.isatty():
            print(f"grading {jobs[number].name} ({number + 1} of {len(jobs)})", file=sys.stderr)
        if resolved.kind == "value" and number >= WAITING:
            return Graded(number, *(yield from in_child(jobs[number])))
        return Graded(number, *(yield from _reported(jobs[number], child, resolved)))

    with ExitStack() as stack:
        resolved: list[tuple[Child, Step]] = []
        for job in jobs:
            child = stack.enter_context(Child(steps, job))
            resolved.append((child, child.step(job.timeout)))
            if resolved[-1][1].kind == "usage":
                raise UsageError(resolved[-1][1].message)
            if len(resolved) > WAITING:
                child.close()
        running = stack.enter_context(Children(cores()))
        for number, (child, step) in enumerate(resolved):
            running.add(number, work(number, child, step))
        for _, found in running.finished():
            yield found


def in_child(job: Job) -> Generator[Child, Step, tuple[Report, Kind]]:
    """Grade one job in a child of its own, as a piece of work; returns the report and how grading ended."""
    with Child(steps, job) as child:
        resolved = yield child.begin(job.timeout)
        return (yield from _reported(job, child, resolved))


def _reported(job: Job, child: Child, step: Step) -> Generator[Child, Step, tuple[Report, Kind]]:
    """Grade in the child that has resolved its target; the report is that of the last row or check that it finished."""
    report, finished = None, False
    home, deadline = step.value, time.monotonic() + job.timeout + TO_REPORT
    while step.kind == "value" and not finished:
        step = yield child.begin(max(deadline - time.monotonic(), 0.0), limit=job.timeout, home=home)
        if step.kind == "value":
            finished, report = step.value
    child.close()
    return _report(job, step, report, child.output), step.kind


def steps(job: Job) -> Iterator[str | tuple[bool, Report]]:
    """Resolve the target and fill its parameters in the child, then grade it there, row by row and check by check.

    Yields:
        The file of the loss, then after each step whether it was the last, and the report as far as it has come.
    """
    import torch

    # Threads cost more than they gain in environments this small, and a forked process cannot use its parent's.
    torch.set_num_threads(1)
    from kltest.grading.grader import Grading
    from kltest.loss.callables import source_file
    from kltest.loss.resolve import resolve

    options = Options(**{"name": job.name, **job.given, "timeout": job.timeout})
    loss = resolve(job.target, options.call, options.name)
    yield source_file(loss.function) or ""
    grading = Grading.of(job.name, options)
    for _ in grading.steps(loss):
        yield grading.finished, grading.report()


def _report(job: Job, step: Step, report: Report | None, output: Output) -> Report:
    """Return the report of a child that came to its end, or of one that was ended: what it had reached stands."""
    if step.kind == "value" and report is not None:
        return _with_output(report, output)
    message = f"{job.name} {step.message}" if step.kind == "ended" else step.message
    if step.kind == "crashed":
        message = note_bug(message, step.trace)
    report = failed(job, message) if report is None else replace(report, verdict="error", error=message)
    if frame := re.search(r", in \S+ at (.+):(\d+)$", message):
        report = replace(report, source=(frame[1], int(frame[2])))
    return _with_output(report, output)


def failed(job: Job, message: str) -> Report:
    """Return the report of a target that ended before anything was measured."""
    from kltest.grading.grader import unmeasured

    return unmeasured(Options(**job.given), job.name, reduction="per-row", error=message)


def _with_output(report: Report, output: Output) -> Report:
    """The report with a note on what the target printed: how many lines, and the last of them if it failed."""
    if not output.lines:
        return report
    count = f"the target printed {output.lines} line{'s' if output.lines > 1 else ''}"
    last = " ⏎ ".join(line[:LINE_SHOWN] for line in output.last(LINES_SHOWN))
    note = f"{count}; the last: {last}" if report.verdict == "error" else f"{count}, not shown here"
    return replace(report, notes=[*report.notes, note])
