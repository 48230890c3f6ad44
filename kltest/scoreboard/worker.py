"""Grade all settings of a library that is installed here, each in a child process, a line of JSON for each.

    python -m kltest.scoreboard.worker LIBRARY [--setting NAME]… [--done NAME]… [--timeout SECONDS] [--history]

`kltest libraries` runs this inside a library's environment. A row is printed as soon as it is finished: none is lost
if the library takes this process down. What the library itself prints goes to standard error.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kltest.adapters import Adapter, Setting, find, installed_settings
from kltest.adapters.installed import unset
from kltest.errors import KltestError, UsageError
from kltest.grading.isolated import TRACES, Child, Children, Step, cores, terminated_as_interrupted
from kltest.grading.jobs import Job, failed, graded
from kltest.scoreboard.extras import extras
from kltest.scoreboard.programs import program
from kltest.scoreboard.rows import BoardRow, matches, row

# Packages whose versions may matter for the results.
COMPANIONS = ("torch", "transformers", "accelerate", "jax", "tensordict", "numpy")


def main(arguments: Sequence[str]) -> int:
    """Measure a library in this process; the answers are lines of JSON on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--setting", action="append", default=[])
    parser.add_argument("--done", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=None)
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args(arguments)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # Output of the library, that of its C code included, must not get between the answers.
        os.dup2(2, 1)
        with terminated_as_interrupted():
            for each in _measured(options):
                print(json.dumps(each, ensure_ascii=False, allow_nan=False), file=answers, flush=True)
    return 0


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the names of the settings, or why there are none, then a row of each that is not done, once finished."""
    library = find(options.library)
    try:
        library.load()
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        yield {"settings": [], "unimportable": f"{type(error).__name__}: {error}", "missing": missing}
        return
    there = {setting.name: setting for setting in installed_settings(library, history=options.history)}
    chosen = [name for name in there if matches(name, options.setting)]
    yield {"settings": chosen}
    left = [there[name] for name in chosen if name not in options.done]
    # Imported once, before children are forked; each setting reports a failed import when it is graded.
    for module in ("kltest.grading.grader", *library.imports) if left else ():
        with contextlib.suppress(Exception):
            import_module(module)
    with Children(cores()) as children:
        for setting in left:
            children.add(setting.name, _isolated(options, library, setting))
        for _, found in children.finished():
            yield found


def _isolated(options: argparse.Namespace, library: Adapter, setting: Setting) -> Generator[Child, Step, BoardRow]:
    """Write a setting's row in a child and a folder of its own, which is deleted; one that is killed loses its own row.

    A loss may kill the process that isolates it, and no other setting.
    """
    with (
        tempfile.TemporaryDirectory(prefix="setting-", ignore_cleanup_errors=True) as folder,
        Child(_rows, options, setting, folder) as child,
    ):
        step = yield child.begin()
    lost = f"the process that graded it {step.message}" if step.kind == "ended" else step.message
    return step.value if step.kind == "value" else _row(options, library, setting, lost)


def _rows(options: argparse.Namespace, setting: Setting, folder: str) -> Iterator[BoardRow]:
    os.chdir(folder)
    os.environ[TRACES] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield _row(options, find(options.library), setting)


def _row(options: argparse.Namespace, library: Adapter, setting: Setting, lost: str = "") -> BoardRow:
    """The row of a setting, with the program that shows its gradient but for histories; or that its result is lost."""
    shows, started = not (options.history or lost), time.monotonic()
    # Under a stale sampler too, whatever log-probs a setting takes; a recipe for fresh rollouts is held to these alone.
    both = shows and not (setting.recipe and "sampler" in setting.options)
    given: dict[str, Any] = {"sampler": "both"} if both else {}
    given |= {} if options.timeout is None else {"timeout": options.timeout}
    (job,) = Job.all_of(f"{options.library}:{setting.name}", given)
    shown: dict[str, Any] = {"program": "", "program_of_adapter": False}
    try:
        report = failed(job, f"{job.name}: {lost}") if lost else next(graded([job])).report
    except UsageError as error:
        report = failed(job, str(error))
    try:
        shown = program(library, setting, report) if shows else shown
    except KltestError as error:
        shown["program_note"] = str(error)
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
