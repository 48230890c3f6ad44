"""Jobs: one target with its options each, graded in a child process of its own."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from kltest.adapters import named
from kltest.errors import KltestError, UsageError
from kltest.grading.cache import entry, find, imported, keep
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
    def entry(self) -> Path:
        """The file of the cache that has its report."""
        return entry(self.name, self.target, sorted(self.given.items()), self.folder)

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


class Graded(NamedTuple):
    """The report of the job of this number, and how grading ended: "usage" is a misuse that shows only in a call."""

    number: int
    report: Report
    kind: Kind


def graded(jobs: Sequence[Job], *, cached: bool = False) -> Iterator[Graded]:
    """Yield the report of each job as it is finished; as many are graded at once as there are cores.

    With `cached`, targets that have not changed since they were graded are not graded again.

    Raises:
        UsageError: A target cannot be called; nothing has been graded then.
    """
    fresh: dict[int, Job] = {}
    for number, job in enumerate(jobs):
        if cached and (report := find(job.entry)):
            print(f"kltest: {job.name} has not changed: its report is that of the cache", file=sys.stderr)
            yield Graded(number, report, "value")
        else:
            fresh[number] = job
    if fresh:
        yield from _graded(fresh, cached=cached)


def _graded(jobs: Mapping[int, Job], *, cached: bool) -> Iterator[Graded]:
    for job in jobs.values():
        if job.folder is not None and job.folder not in sys.path:
            sys.path.append(job.folder)
        named_loss(job.target)  # refuses unknown names, missing files and modules before torch is imported
    # Imported before children are forked, so that each has torch already.
    import kltest.grading.grader  # noqa: F401

    cores = len(os.sched_getaffinity(0))
    running: dict[Future[Reached], tuple[int, Child]] = {}

    def finished(least: int) -> Iterator[Graded]:
        """Yield what has ended, waiting until fewer than `least` are left."""
        while len(running) >= least:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, child = running.pop(future)
                child.close()
                reached = future.result()
                yield Graded(number, _report(jobs[number], child, reached, cached), reached.step.kind)

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(cores))
        waiting: list[tuple[Child, Step]] = []
        for job in jobs.values():
            child = stack.enter_context(Child(steps, job))
            step = child.step(job.timeout)
            if step.kind == "usage":
                raise UsageError(step.message)
            waiting.append((child, step))
            if len(waiting) > WAITING:
                child.close()
        stack.callback(lambda: _stop({future: child for future, (_, child) in running.items()}))
        for count, ((number, job), (child, step)) in enumerate(zip(jobs.items(), waiting, strict=True), 1):
            if len(jobs) > 1 and sys.stderr.isatty():
                print(f"grading {job.name} ({count} of {len(jobs)})", file=sys.stderr)
            if step.kind == "value" and count > WAITING:
                child = Child(steps, job)
                step = child.step(job.timeout)
            running[pool.submit(_run, job, child, step)] = (number, child)
            yield from finished(cores)
        yield from finished(1)


def _stop(running: "Mapping[Future[Reached], Child]") -> None:
    """End children, then the threads that wait for them, before anything that these use is closed."""
    for child in running.values():
        child.kill()
    wait(running)
    for child in running.values():
        child.close()


class Reached(NamedTuple):
    """The last step of a child, the last report before it, and the files it had imported if it came to its end."""

    step: Step
    report: Report | None = None
    files: list[str] | None = None


def _run(job: Job, child: Child, step: Step) -> Reached:
    """Grade in the child that has resolved its target; the report is that of the last row or check that it finished."""
    if step.kind != "value":
        return Reached(step)
    reached, home, deadline = Reached(step), step.value, time.monotonic() + job.timeout + TO_REPORT
    while reached.files is None:
        step = child.step(max(deadline - time.monotonic(), 0.0), limit=job.timeout, home=home)
        if step.kind != "value":
            return reached._replace(step=step)
        files, report = step.value
        reached = Reached(step, report, files)
    return reached


def steps(job: Job) -> Iterator[str | tuple[list[str] | None, Report]]:
    """Resolve the target and fill its parameters in the child, then grade it there, row by row and check by check.

    Yields:
        The file of the loss, then after each step the report as far as it has come, with None until the last step,
        and then with the files that were imported.
    """
    import torch

    # Threads cost more than they gain in environments this small, and a forked process cannot use its parent's.
    torch.set_num_threads(1)
    from kltest.grading.grader import Grading, resolved
    from kltest.loss.callables import source_file

    options = Options(**{"name": job.name, **job.given, "timeout": job.timeout})
    loss = resolved(job.target, options)
    yield (home := source_file(loss.function) or "")
    grading = Grading.of(job.name, options)
    for _ in grading.steps(loss):
        yield imported(home) if grading.finished else None, grading.report()


def _report(job: Job, child: Child, reached: Reached, cached: bool) -> Report:
    """Return the report of a child that came to its end, or of one that was ended: what it had reached stands."""
    step, report = reached.step, reached.report
    if step.kind == "value" and report is not None:
        report = _with_output(report, child.output)
        if cached and reached.files is not None and report.verdict != "error" and not report.unfinished:
            try:
                keep(job.entry, reached.files, report)
            except KltestError as error:
                print(f"kltest: the report of {job.name} is not kept for --cache: {error}", file=sys.stderr)
        return report
    message = f"{job.name} {step.message}" if step.kind == "ended" else step.message
    if step.kind == "crashed":
        message = note_bug(message, step.trace)
    report = failed(job, message) if report is None else replace(report, verdict="error", error=message)
    if frame := re.search(r", in \S+ at (.+):(\d+)$", message):
        report = replace(report, source=(frame[1], int(frame[2])))
    return _with_output(report, child.output)


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
