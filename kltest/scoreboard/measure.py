"""Grade all settings of a library that is installed here, each in a child process, a line of JSON for each.

    python -m kltest.scoreboard.measure LIBRARY [--setting NAME]… [--done NAME]… [--timeout SECONDS] [--history]

`kltest libraries` runs this inside a library's environment. A row is printed as soon as it is finished: none is lost
if the library takes this process down. What the library itself prints goes to standard error.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import joblib

from kltest.adapters import find, installed_settings
from kltest.adapters.installed import unset
from kltest.errors import KltestError, UsageError
from kltest.grading.isolation import TRACES, describe
from kltest.grading.jobs import Job, failed, graded, terminated_as_interrupted
from kltest.scoreboard.extras import extras
from kltest.scoreboard.programs import program
from kltest.scoreboard.rows import Row, matches, row

# Packages whose versions may matter for the results.
COMPANIONS = ("torch", "transformers", "accelerate", "jax", "tensordict", "numpy")
# Seconds between two looks at which of the processes were killed; one that ends by itself is noticed at once.
PATIENCE = 1.0


def main(arguments: Sequence[str]) -> int:
    """Measure a library in this process; the answers are lines of JSON on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--setting", action="append", default=[])
    parser.add_argument("--done", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=None)
    parser.add_argument("--history", action="store_true")
    asked = parser.parse_args(arguments)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # Output of the library, that of its C code included, must not get between the answers.
        os.dup2(2, 1)
        with terminated_as_interrupted():
            for each in _measured(asked, answers):
                print(json.dumps(each, ensure_ascii=False, allow_nan=False), file=answers, flush=True)
    return 0


def _measured(asked: argparse.Namespace, answers: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the names of the settings, or why there are none, then a row of each that is not done, once finished."""
    library = find(asked.library)
    try:
        library.load()
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        yield {"settings": [], "unimportable": f"{type(error).__name__}: {error}", "missing": missing}
        return
    there = installed_settings(library, history=asked.history)
    chosen = [setting.name for setting in there if matches(setting.name, asked.setting)]
    yield {"settings": chosen}
    left = [setting for setting in chosen if setting not in asked.done]
    for module in ("kltest.grading.grader", *library.imports) if left else ():
        # Each setting reports a failed import when it is graded.
        with contextlib.suppress(Exception):
            import_module(module)
    yield from _graded(asked, left, answers)


def _graded(asked: argparse.Namespace, settings: Sequence[str], answers: IO[str]) -> Iterator[Row]:
    """Yield a row of each setting, graded in a process and a folder of its own; one that is killed loses its own row.

    What a setting leaves in its folder, that of temporary files too, is deleted before the next one is begun.
    """
    # Forked, so that all share the imports.
    fork, left, parent = get_context("fork"), list(settings), os.getppid()
    running: dict[Connection, tuple[str, Any, str]] = {}
    try:
        while (left or running) and os.getppid() == parent:  # nobody reads the answers of one whose parent was killed
            while left and len(running) < joblib.cpu_count():
                ours, theirs = fork.Pipe(duplex=False)
                setting, folder = left.pop(0), tempfile.mkdtemp(prefix="setting-")
                process = fork.Process(target=_send_row, args=(asked, setting, folder, answers, theirs))
                process.start()
                theirs.close()
                running[ours] = setting, process, folder
            wait(running, PATIENCE)
            for ours, (setting, process, folder) in list(running.items()):
                # What a killed process forked keeps its end of the pipe open.
                found = None
                if not ours.poll() and process.exitcode is None:
                    continue
                with contextlib.suppress(EOFError, OSError):
                    found = ours.recv() if ours.poll() else None
                del running[ours]
                _end(process, folder)
                yield found or _row(asked, setting, f"the process that graded it ended, with code {process.exitcode}")
    finally:
        for _, process, folder in running.values():
            process.terminate()
            _end(process, folder)


def _end(process: Any, folder: str) -> None:
    process.join(PATIENCE)
    process.kill()
    process.join()
    shutil.rmtree(folder, ignore_errors=True)


def _send_row(asked: argparse.Namespace, setting: str, folder: str, answers: IO[str], connection: Connection) -> None:
    """Grade a setting in a process of its own and send its row."""
    # It must not keep the answers open if the process that forked it ends early.
    answers.close()
    os.chdir(folder)
    os.environ[TRACES] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        found = _row(asked, setting)
    except Exception as error:
        traceback.print_exc()
        found = _row(asked, setting, describe(error))
    connection.send(found)


def _row(asked: argparse.Namespace, wanted: str, lost: str = "") -> Row:
    """The row of a setting, with the program that shows its gradient but for histories; or that its result is lost."""
    name, shows, timeout = asked.library, not (asked.history or lost), asked.timeout
    library = find(name)
    setting = next(each for each in installed_settings(library) if each.name == wanted)
    started = time.monotonic()
    # Under a stale sampler too, whatever log-probs a setting takes; a recipe for fresh rollouts is held to these alone.
    both = shows and not (setting.recipe and "sampler" in setting.options)
    given = {"sampler": "both"} if both else {}
    (job,) = Job.all_of(f"{name}:{wanted}", {**given, **({} if timeout is None else {"timeout": timeout})})
    shown: dict[str, Any] = {"program": "", "program_of_adapter": False}
    try:
        try:
            report = failed(job, f"{job.name}: {lost}") if lost else next(graded([job])).report
        except UsageError as error:
            report = failed(job, str(error))
        try:
            shown = program(library, setting, report) if shows else shown
        except KltestError as error:
            shown["program_note"] = str(error)
    except KeyboardInterrupt:
        # The child has been ended; the next setting must not begin.
        os._exit(1)
    others = {
        "version": _version(library.distribution) or "?",
        "versions": report.versions | {package: found for package in COMPANIONS if (found := _version(package))},
        "known": setting in library.settings,
        "unset": unset(setting.coefficient),
        **(extras(job, report) if shows else {}),
        "seconds": round(time.monotonic() - started, 1),
        "calls": report.calls,
        "calling": round(report.calling, 1),
    }
    return row(library, setting, report, **others, **shown)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
