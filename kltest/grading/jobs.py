"""Jobs: one target with its options each, graded in a child process of its own."""

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kltest.adapters import named
from kltest.errors import UsageError
from kltest.grading.isolation import Child, Kind, Output, Step, note_bug
from kltest.grading.options import DEFAULT_TIMEOUT, Options, checked
from kltest.loss.names import named as named_loss
from kltest.report import Report

WAITING = 8
"""Children that are kept between finding their target and grading it; more would hold too much memory."""
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
        """Return the jobs that a target stands for: one, or one for each setting of a library.

        `given` holds checked options. Raises UsageError for a library or a setting that is not there.
        """
        settings = [
            cls(name, setting.target, checked(setting.options_with(given), lambda option: option.name), folder)
            for name, setting in named(target, to_grade=True)
        ]
        return settings or [cls(target, target, given, folder)]


def graded(jobs: Sequence[Job]) -> Iterator[tuple[Report, Kind]]:
    """Yield a report for each job, in order. Raises UsageError before any grading if a target cannot be called.

    A misuse that shows only when the target is called comes as a report, of the kind "usage".
    """
    for job in jobs:
        if job.folder is not None and job.folder not in sys.path:
            sys.path.append(job.folder)
        named_loss(job.target)  # refuses unknown names, missing files and modules before torch is imported
    # Imported before children are forked, so that each has torch already.
    import kltest.grading.grader  # noqa: F401

    with ExitStack() as stack:
        waiting: list[tuple[Child, Step]] = []
        for job in jobs:
            child = stack.enter_context(Child(steps, job))
            step = child.step(job.timeout)
            if step.kind == "usage":
                raise UsageError(step.message)
            waiting.append((child, step))
            if len(waiting) > WAITING:
                child.close()
        for number, (job, (child, step)) in enumerate(zip(jobs, waiting, strict=True), 1):
            if len(jobs) > 1 and sys.stderr.isatty():
                print(f"grading {job.name} ({number} of {len(jobs)})", file=sys.stderr)
            if step.kind == "value" and number > WAITING:
                child = stack.enter_context(Child(steps, job))
                step = child.step(job.timeout)
            reached = None
            if step.kind == "value":
                step, reached = _run(job, child, step.value)
            child.close()
            yield _report(job, step, child.output, reached), step.kind


def _run(job: Job, child: Child, home: str) -> tuple[Step, Report | None]:
    """Grade in the child; the report is that of the last row or check that it finished."""
    reached, finished, deadline = None, False, time.monotonic() + job.timeout + TO_REPORT
    while not finished:
        step = child.step(max(deadline - time.monotonic(), 0.0), limit=job.timeout, home=home)
        if step.kind != "value":
            break
        finished, reached = step.value
    return step, reached


def steps(job: Job) -> Iterator[str | tuple[bool, Report]]:
    """Resolve the target and fill its parameters in the child, then grade it there, row by row and check by check.

    Yields:
        The file of the loss, then after each step whether it was the last, and the report as far as it has come.
    """
    import torch

    # Threads cost more than they gain in environments this small, and a forked process cannot use its parent's.
    torch.set_num_threads(1)
    from kltest.grading.grader import Grading, resolved
    from kltest.loss.callables import source_file

    options = Options(**{"name": job.name, **job.given, "timeout": job.timeout})
    loss = resolved(job.target, options)
    yield source_file(loss.function) or ""
    grading = Grading.of(job.name, options)
    for _ in grading.steps(loss):
        yield grading.finished, grading.report()


def _report(job: Job, step: Step, output: Output, reached: Report | None) -> Report:
    """Return the report of a child that came to its end, or of one that was ended: what it had reached stands."""
    if step.kind == "value" and reached is not None:
        return _with_output(reached, output)
    message = f"{job.name} {step.message}" if step.kind == "ended" else step.message
    if step.kind == "crashed":
        message = note_bug(message, step.trace)
    report = failed(job, message) if reached is None else replace(reached, verdict="error", error=message)
    if frame := re.search(r", in \S+ at (.+):(\d+)$", message):
        report = replace(report, source=(frame[1], int(frame[2])))
    return _with_output(report, output)


def failed(job: Job, message: str) -> Report:
    """Return the report of a target of which nothing is known but how it ended."""
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


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: children are stopped, and finished reports are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        with contextlib.suppress(TypeError):
            signal.signal(signal.SIGTERM, before)
