"""Grade all settings of a library that is installed here, each in a child process, a line of JSON for each.

    python -m kltest.scoreboard.measure LIBRARY [--setting NAME]… [--done NAME]… [--claims FOLDER] [--timeout SECONDS]

`kltest libraries` runs this inside a library's environment. A row is printed as soon as it is finished: none is lost
if the library takes this process down. What the library itself prints goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kltest.adapters import find, installed_settings
from kltest.adapters.adapter import Adapter, Setting
from kltest.errors import KltestError, UsageError
from kltest.grading.jobs import Job, failed, graded, terminated_as_interrupted
from kltest.report import Report
from kltest.scoreboard.programs import Program, program
from kltest.scoreboard.rows import matches, row

COMPANIONS = ("torch", "transformers", "accelerate", "jax", "tensordict", "numpy")
"""Packages whose versions may matter for the results."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--setting", action="append", default=[])
    parser.add_argument("--done", action="append", default=[])
    parser.add_argument("--claims", type=Path, default=None)
    parser.add_argument("--timeout", type=float, default=None)
    asked = parser.parse_args(arguments)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # Output of the library, that of its C code included, must not get between the answers.
        os.dup2(2, 1)
        with terminated_as_interrupted():
            for each in measured(asked.library, asked.setting, asked.done, asked.claims, asked.timeout):
                print(json.dumps(each, ensure_ascii=False, allow_nan=False), file=answers, flush=True)
    return 0


def measured(
    name: str,
    names: Sequence[str] = (),
    done: Sequence[str] = (),
    claims: Path | None = None,
    timeout: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the names of the settings, then a row of each that is not done.

    Args:
        name: the adapter's name, or its file.
        names: settings to measure, or patterns of their names; all if empty.
        done: settings that need not be measured.
        claims: folder in which processes that share the settings leave a file for each that they take.
        timeout: seconds for a setting, its own if None.
    """
    library = find(name)
    chosen = [setting for setting in installed_settings(library) if matches(setting.name, names)]
    yield {"settings": [setting.name for setting in chosen]}
    beside = {package: found for package in COMPANIONS if (found := _version(package))}
    left = [setting for setting in chosen if setting.name not in done]
    for module in library.imports if left else ():
        # Each setting reports a failed import when it is graded.
        with contextlib.suppress(Exception):
            import_module(module)
    for number, setting in enumerate(left):
        if claims and not _claimed(claims / str(number)):
            continue
        started = time.monotonic()
        report = _graded(f"{name}:{setting.name}", timeout)
        yield row(
            library,
            setting,
            report,
            _program(library, setting, report),
            version=_version(library.distribution) or "?",
            versions={**report.versions, **beside},
            known=setting in library.settings,
            seconds=time.monotonic() - started,
        )


def _graded(target: str, timeout: float | None) -> Report:
    (job,) = Job.all_of(target, {"timeout": timeout} if timeout is not None else {})
    try:
        ((report, _),) = graded([job])
    except UsageError as error:
        return failed(job, str(error))
    return report


def _program(library: Adapter, setting: Setting, report: Report) -> Program:
    try:
        return program(library, setting, report)
    except KltestError as error:
        return Program(note=str(error))


def _claimed(file: Path) -> bool:
    """Take a setting; return False if another process has it."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
