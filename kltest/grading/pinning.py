"""Pin losses: measure each in a child process, write the test file of all, and run it once before it is left behind."""

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from kltest.errors import KltestError, TargetError, UsageError
from kltest.files import write
from kltest.grading.isolated import Child, Children, Step, cores, without_kltest
from kltest.grading.jobs import Job
from kltest.grading.options import OPTIONS, Options
from kltest.loss.target import named

MOST_BYTES, MOST_SECONDS = 15_000, 3.0
"""A test file should be smaller than this, and take less."""


@dataclass(frozen=True)
class Written:
    """A file that was written and was green: its size, the seconds of a run, and in words what each setting follows."""

    path: Path
    size: int
    seconds: float
    follows: Mapping[str, Sequence[str]]


def pinning_jobs(targets: Sequence[str], given: Mapping[str, Any], arguments: Sequence[str], folder: Path) -> list[Job]:
    """Return a job for each target and each choice of arguments; NAME=VALUE given twice makes two settings.

    Raises:
        UsageError: A target does not exist, or an argument has no name.
    """
    values: dict[str, list[str]] = {}
    for text in dict.fromkeys(arguments):
        values.setdefault(text.partition("=")[0], []).append(text)
    found = []
    for target in dict.fromkeys(targets):
        named(target)
        for chosen in product(*values.values()):
            own = {**given, "arguments": OPTIONS["arguments"].form(list(chosen), "--arg")} if chosen else given
            for job in Job.all_of(target, own):
                found.append(Job(" ".join([_shown(job.name, folder), *chosen]), job.target, job.given))
    return found


def _shown(target: str, folder: Path) -> str:
    """The target without folders of this machine."""
    path, colon, names = target.rpartition(":")
    return f"{Path(os.path.relpath(path, folder)).as_posix()}{colon}{names}" if os.path.isabs(path) else target


def write_pins(jobs: Sequence[Job], output: Path) -> Written:
    """Write the test file that pins what these jobs follow; nothing is left behind unless it is green.

    Raises:
        UsageError: A loss cannot be pinned, or all together need too large a file.
        KltestError: A loss failed, or the file is not green.
    """
    # Imported before children are forked, so that each has torch already.
    from kltest.counterexample.pin import Pin, file_of

    folder = output.parent.resolve()
    pins: dict[int, Pin] = {}
    with Children(cores()) as children:
        for number, job in enumerate(jobs):
            children.add(number, _in_child(job, folder))
        for number, (step, job) in children.finished():
            pins[number] = step.result(job.name)
    ordered = [pins[number] for number in range(len(jobs))]
    text = file_of(ordered)
    if (size := len(text.encode())) > MOST_BYTES:
        raise UsageError(
            f"one file of {len(jobs)} pins would have {size:,} bytes, more than {MOST_BYTES:,}: write several files of "
            "fewer targets or --arg each"
        )
    unchecked = output.with_name(f"{output.stem}_{os.getpid()}_unchecked.py")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(unchecked, text)
        seconds = _run(unchecked, sum(job.timeout for job in jobs))
        os.replace(unchecked, output)
    finally:
        unchecked.unlink(missing_ok=True)
    return Written(output, size, seconds, {one.name: one.words for one in ordered})


def _in_child(job: Job, folder: Path) -> Generator[Child, Step, tuple[Step, Job]]:
    with Child(_steps, job, folder) as child:
        step = yield child.begin(job.timeout)
    return step, job


def _steps(job: Job, folder: Path) -> Iterator[Any]:
    """Yield the pin of a job, made in the child."""
    import torch

    torch.set_num_threads(1)
    from kltest.counterexample.pin import NotPinnedError, pin
    from kltest.grading.grader import Grading

    options = Options(**{**job.given, "name": job.name})
    try:
        findings = Grading.of(job.name, options).measured(job.target)
        if findings.observed.blocked and options.placement is None:
            # A value without a gradient is a cost in the reward. As a loss it would be pinned as nothing.
            with suppress(TargetError):  # a number for a whole batch cannot be one
                findings = Grading.of(job.name, replace(options, placement="both")).measured(job.target)
        yield pin(findings, job.name, job.target, folder)
    except NotPinnedError as reason:
        raise UsageError(f"{job.name} cannot be pinned: {reason}; nothing was written") from None


def _run(file: Path, timeout: float) -> float:
    """Run a file as a program that cannot import kltest; return the seconds that it took."""
    begun = time.monotonic()
    with Child(without_kltest, str(file), os.getcwd()) as child:
        step = child.step(timeout)
    if step.kind != "value":
        raise KltestError(f"the pins are not green on the day, so nothing was written: {step.message}")
    return time.monotonic() - begun
