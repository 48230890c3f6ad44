"""Jobs: one target with its options each, graded in a child process of its own."""

import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kltest.adapters import named
from kltest.errors import UsageError
from kltest.grading.isolated import Child, Children, Kind, Output, Step, cores, note_bug
from kltest.grading.options import DEFAULT_TIMEOUT, Options, checked
from kltest.loss.target import named as named_loss
from kltest.report import Report

TO_REPORT = 3.0
"""Seconds that a child has after its time limit to report by itself what was reached; one that hangs is ended then."""
LINES_SHOWN, LINE_SHOWN = 5, 100
"""Lines of a failing target's output in its report, and characters of each."""


@dataclass(frozen=True)
class Job:
    """One target to be graded: its name in reports, what is resolved, and its checked options by their Python names.

    Modules are looked for in `folder` too. If `fix`, a change of the source is looked for with which it is confirmed.
    `read` says how its source was read, if it is not called, and `beside` why what is read decides nothing.
    """

    name: str
    target: str
    given: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    fix: bool = False
    read: str = ""
    beside: str = ""

    @property
    def timeout(self) -> float:
        """Seconds that finding the target may take, and then grading it."""
        return self.given.get("timeout", DEFAULT_TIMEOUT)

    @classmethod
    def all_of(
        cls, target: str, given: Mapping[str, Any], folder: str | None = None, *, fix: bool = False
    ) -> "list[Job]":
        """Return the jobs of a target: one, or one for each setting of a library.

        `given` holds checked options. Raises UsageError for a library or a setting that is not there.
        """
        part = given.get("part", "kl")
        settings = [
            cls(name, setting.target, checked(setting.options_with(given), lambda option: option.name), folder, fix)
            for name, setting in ((name, one.for_part(part)) for name, one in named(target, to_grade=True))
        ]
        return settings or [cls(target, target, given, folder, fix)]


class Graded(NamedTuple):
    """The report of the job of this number, and how grading ended: "usage" is a misuse that shows only in a call."""

    number: float
    report: Report
    kind: Kind


# What is graded in the place of a job that could not be called: nothing, or other jobs. UsageError says why none.
Otherwise = Callable[[Job, Report], Sequence[Job]]


def graded(
    jobs: Sequence[Job], otherwise: Otherwise = lambda job, report: [], *, refuses: bool = True
) -> Iterator[Graded]:
    """Yield the report of each job as it is finished; as many are graded at once as there are cores.

    Where a target cannot be called, `otherwise` may return jobs in the place of its own; their numbers follow its own.
    Without `refuses`, one that cannot be called ends with its report and not all grading.

    Raises:
        UsageError: A target does not exist, and nothing was graded; or it cannot be called, and all grading ends.
    """
    for job in jobs:
        if job.folder is not None and job.folder not in sys.path:
            sys.path.append(job.folder)
        named_loss(job.target)  # refuses unknown names, missing files and modules before torch is imported
    # Imported before children are forked, so that each has torch already.
    from kltest.grading.grader import cannot_be_called

    with Children(cores()) as children:
        for number, job in enumerate(jobs):
            children.add(number, in_child(job, f" ({number + 1} of {len(jobs)})" if len(jobs) > 1 else ""))
        for number, (report, kind) in children.finished():
            refused = kind in ("usage", "failed", "value") and cannot_be_called(report) and number in range(len(jobs))
            try:
                others = otherwise(jobs[number], report) if refused else []
            except UsageError as error:
                others, report = [], replace(report, error=f"{report.error}\n{error}")
            for place, other in enumerate(others, 1):
                children.add(number + place / (1 + len(others)), in_child(other))
            if others:
                continue
            if kind == "usage" and refuses and not report.calls:
                raise UsageError(report.error)
            yield Graded(number, report, kind)


def in_child(job: Job, count: str = "") -> Generator[Child, Step, tuple[Report, Kind]]:
    """Grade one job in a child of its own, as a piece of work; returns the report and how grading ended.

    The report is that of the last row or check that the child finished.
    """
    report, finished = None, False
    with Child(steps, job) as child:
        step = yield child.begin(job.timeout)
        if count and sys.stderr.isatty():
            print(f"grading {job.name}{count}", file=sys.stderr)
        home, deadline = step.value, time.monotonic() + job.timeout + TO_REPORT
        while step.kind == "value" and not finished:
            step = yield child.begin(max(deadline - time.monotonic(), 0.0), limit=job.timeout, home=home)
            if step.kind == "value":
                finished, report = step.value
        graded = step
        if job.fix and report is not None and report.verdict == "refuted":
            step = yield child.begin(job.timeout + TO_REPORT, limit=job.timeout, home=home)
            ended = f"the search for a fix ended: {step.message or step.kind}"
            report = step.value[1] if step.kind == "value" else replace(report, advice=ended)
    return _report(job, graded, report, child.output), graded.kind


def steps(job: Job) -> Iterator[str | tuple[bool, Report]]:
    """Resolve the target and fill its parameters in the child, then grade it there, row by row and check by check.

    Yields:
        The file of the loss, then after each step whether it was the last, and the report as far as it has come; then
        the report with fixes, if the job asks for them.
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
    if job.fix:
        from kltest.grading.fixing.search import Fixing

        yield True, Fixing(loss, grading, grading.report()).run(job.timeout)


def _report(job: Job, step: Step, report: Report | None, output: Output) -> Report:
    """Return the report of a child that came to its end, or of one that was ended: what it had reached stands."""
    if step.kind == "value" and report is not None:
        report = replace(report, read=job.read, filled={}, source=None) if job.read else report
        report = replace(report, beside=job.beside)
        return _with_output(report, output)
    message = f"{job.name} {step.message}" if step.kind == "ended" else step.message
    if step.kind == "crashed":
        message = note_bug(message, step.trace)
    report = failed(job, message) if report is None else replace(report, verdict="error", error=message)
    report = replace(report, beside=job.beside)
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
