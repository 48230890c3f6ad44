"""Jobs: one target with its options each, graded in a child process of its own."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kltest.adapters import named
from kltest.errors import UsageError
from kltest.grading import options
from kltest.grading.bugs import note_bug
from kltest.grading.isolation import Child, Kind, Output, Step
from kltest.report import Report

WAITING = 8
LINES_SHOWN, LINE_SHOWN = 5, 100


@dataclass(frozen=True)
class Job:
    """One target with all its options, ready to be graded; its module is looked for in `folder` too."""

    target: str
    timeout: float = options.DEFAULT_TIMEOUT
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None

    @classmethod
    def of(cls, target: str, given: Mapping[str, Any], folder: str | None = None) -> Job:
        """From checked options under the names of the command line."""
        settings = {name.replace("-", "_"): value for name, value in given.items() if name != "timeout"}
        if "arg" in settings:
            settings["arguments"] = settings.pop("arg")
        return cls(target, given.get("timeout", cls.timeout), settings, folder)

    @classmethod
    def all_of(cls, target: str, given: Mapping[str, Any], folder: str | None = None) -> list[Job]:
        """The jobs that a target stands for: one, or one for each setting of a library."""
        jobs = []
        for name, setting in named(target):
            patience = {key: setting.options[key] for key in ("timeout",) if key in setting.options}
            jobs.append(cls.of(name, {**patience, **given}, folder))
        return jobs or [cls.of(target, given, folder)]


def graded(jobs: Sequence[Job]) -> Iterator[tuple[Report, Kind]]:
    """A report a job, in order; UsageError before any grading if a target cannot be found or called.

    A misuse that shows only when the target is called comes as a report, of the kind "usage".
    """
    _import_once()
    with ExitStack() as stack:
        waiting: list[tuple[Child, Step]] = []
        for job in jobs:
            child = stack.enter_context(Child(steps, job.target, dict(job.settings), job.folder))
            step = child.step(job.timeout)
            if step.kind == "usage":
                raise UsageError(step.message)
            waiting.append((child, step))
            if len(waiting) > WAITING:
                child.close()
        for number, (job, (child, step)) in enumerate(zip(jobs, waiting, strict=True), 1):
            if len(jobs) > 1 and sys.stderr.isatty():
                print(f"grading {job.target} ({number} of {len(jobs)})", file=sys.stderr)
            if step.kind == "value" and number > WAITING:
                child = stack.enter_context(Child(steps, job.target, dict(job.settings), job.folder))
                step = child.step(job.timeout)
            if step.kind == "value":
                step = child.step(job.timeout)
            child.close()
            yield _report(job, step, child.output), step.kind


def steps(target: str, settings: Mapping[str, Any], folder: str | None = None) -> Iterator[Report | None]:
    """In the child: first find the target and fit its parameters, then, when told to, grade it."""
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    import torch

    # Threads would cost more than they gain in worlds this small, and a forked process cannot use its parent's.
    torch.set_num_threads(1)
    from kltest.grading.grader import grade as grade_here
    from kltest.loss.outcome import Call
    from kltest.loss.resolve import resolve

    named_by = target
    for _, setting in named(target):
        target, settings = setting.target, setting.options_with(settings)
        settings.pop("timeout", None)
    call = {name: settings[name] for name in ("placement", "credit", "arguments") if name in settings}
    loss = resolve(target, Call(**call))
    yield None
    yield grade_here(loss, name=named_by, **{key: value for key, value in settings.items() if key not in call})


def _import_once() -> None:
    """Before the children are forked, so that each has torch already."""
    import kltest.grading.grader  # noqa: F401


def _report(job: Job, step: Step, output: Output) -> Report:
    if step.kind == "value":
        return _with_output(step.value, output)
    message = f"{job.target} {step.message}" if step.kind == "ended" else step.message
    if step.kind == "crashed":
        message = note_bug(message, step.trace)
    return _with_output(failed(job, message), output)


def failed(job: Job, message: str) -> Report:
    """A report for a target of which nothing is known but how it ended."""
    from kltest.grading.grader import versions
    from kltest.truth import parse, plain

    return Report(
        target=job.target,
        expect=plain(parse(job.settings.get("expect", "reverse_kl"))),
        placement=job.settings.get("placement", "loss"),
        seed=job.settings.get("seed", 0),
        versions=versions(),
        verdict="error",
        reduction="per-row",
        dtype="float64",
        error=message,
    )


def _with_output(report: Report, output: Output) -> Report:
    """What the target printed stays out of the report, but that it did is said, and shown where that may help."""
    if not output.lines:
        return report
    count = f"the target printed {output.lines} line{'s' if output.lines > 1 else ''}"
    last = " ⏎ ".join(line[:LINE_SHOWN] for line in output.last(LINES_SHOWN))
    note = f"{count}; the last: {last}" if report.verdict == "error" else f"{count}, not shown here"
    return replace(report, notes=[*report.notes, note])


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM stops the children and keeps what is finished, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        with contextlib.suppress(TypeError):
            signal.signal(signal.SIGTERM, before)
