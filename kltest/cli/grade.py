"""`kltest grade`: everything is checked first, then each target is graded in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kltest.cli import diff
from kltest.cli.destinations import Destination, destinations, write
from kltest.errors import UsageError
from kltest.grading import options
from kltest.grading.configuration import Configuration, Target, nearest
from kltest.grading.jobs import Job, graded, terminated_as_interrupted
from kltest.render.changes import Changes, compare
from kltest.report import EXIT_CODES, Report

NOTHING, INTERRUPTED = 5, 130
WORST_FIRST = ("error", "refuted", "inconclusive", "confirmed")
# An earlier report: its file, and what is in it.
Old = tuple[str, list[dict[str, Any]]]


def grade(
    targets: Sequence[str], given: Mapping[str, Any], outputs: Sequence[str], diff_with: str | None = None
) -> int:
    """Grade the targets (none: those of the configuration), write the reports, return the exit code.

    `diff_with` is the file of an earlier report; what changed since is told beside the reports.
    """
    asked = options.checked(given)
    for target in targets:
        if not target.strip():
            raise UsageError(
                "a target is empty; give a name of `kltest list`, package.module:function or file.py:function"
            )
    configuration = nearest(Path.cwd())
    where = destinations(outputs or configuration.outputs or ["text"])
    old = None if diff_with is None else (diff_with, diff.read(diff_with))
    jobs = _jobs(targets, asked, configuration)
    if not jobs:
        print(_nothing(configuration), file=sys.stderr)
        return NOTHING
    return _run(jobs, where, old)


def _jobs(targets: Sequence[str], asked: Mapping[str, Any], configuration: Configuration) -> list[Job]:
    chosen = [Target(text) for text in dict.fromkeys(targets)] or configuration.targets
    folder = str(configuration.path.parent) if configuration.path and not targets else None
    settings = [options.merged(configuration.options, target.options, asked) for target in chosen]
    return [
        job for target, given in zip(chosen, settings, strict=True) for job in Job.all_of(target.text, given, folder)
    ]


def _nothing(configuration: Configuration) -> str:
    where = f"{configuration.path} lists none in [tool.kltest]" if configuration.path else "there is no pyproject.toml"
    return (
        f"kltest: nothing to grade: no target was given, and {where}.\n"
        'Give one (`kltest grade k3-loss`), or write targets = ["package.module:function"] under [tool.kltest].'
    )


def _run(jobs: Sequence[Job], where: Sequence[Destination], old: Old | None = None) -> int:
    reports: list[Report] = []
    misused = False
    try:
        with terminated_as_interrupted():
            for report, kind in graded(jobs):
                reports.append(report)
                misused |= kind == "usage"
    except KeyboardInterrupt:
        if reports:
            write(reports, where, _changes(old, reports))
        missing = ", ".join(job.target for job in jobs[len(reports) :])
        print(f"kltest: interrupted; {len(reports)} of {len(jobs)} graded, not graded: {missing}", file=sys.stderr)
        return INTERRUPTED
    write(reports, where, _changes(old, reports))
    worst = min((report.verdict for report in reports), key=WORST_FIRST.index)
    return UsageError.exit_code if misused else EXIT_CODES[worst]


def _changes(old: Old | None, reports: Sequence[Report]) -> Changes | None:
    return None if old is None else compare(*old, reports)
