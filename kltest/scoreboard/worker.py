"""Grade all settings of a library that is installed here, each in a child process, a line of JSON for each.

    python -m kltest.scoreboard.worker REQUEST

REQUEST is JSON: {"library": "trl", "part": "kl", "settings": [], "done": [], "timeout": null, "history": false}.
`kltest libraries` runs this inside a library's environment. A row is printed as soon as it is finished: none is lost if
the library takes this process down. What the library itself prints goes to standard error.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from kltest.adapters import Adapter, Setting, find, installed_settings
from kltest.adapters.installed import unset
from kltest.errors import UsageError
from kltest.grading.isolated import TRACES, Child, Children, Step, cores, terminated_as_interrupted
from kltest.grading.jobs import Job, failed, graded
from kltest.scoreboard.extras import extras
from kltest.scoreboard.programs import program
from kltest.scoreboard.rows import BoardRow, matches, row
from kltest.version import version_of

# Packages whose versions may matter for the results.
COMPANIONS = ("torch", "transformers", "accelerate", "jax", "tensordict", "numpy")


def main(request: str) -> int:
    """Measure a library in this process; the answers are lines of JSON on standard output."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # Output of the library, that of its C code included, must not get between the answers.
        os.dup2(2, 1)
        with terminated_as_interrupted():
            for each in _measured(SimpleNamespace(**json.loads(request))):
                print(json.dumps(each, ensure_ascii=False, allow_nan=False), file=answers, flush=True)
    return 0


def _measured(request: SimpleNamespace) -> Iterator[dict[str, Any]]:
    """Yield the names of the settings, or why there are none, then a row of each that is not done, once finished."""
    library = find(request.library)
    try:
        library.load()
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        yield {"settings": [], "unimportable": f"{type(error).__name__}: {error}", "missing": missing}
        return
    there = installed_settings(library, history=request.history)
    chosen = [setting for setting in there if setting.has_row(request.part) and matches(setting.name, request.settings)]
    yield {"settings": [setting.name for setting in chosen]}
    left = [setting for setting in chosen if setting.name not in request.done]
    # Imported once, before children are forked; each setting reports a failed import when it is graded.
    for module in ("kltest.grading.grader", *library.imports) if left else ():
        with contextlib.suppress(Exception):
            import_module(module)
    with Children(cores()) as children:
        for setting in left:
            children.add(setting.name, _isolated(request, library, setting))
        for _, found in children.finished():
            yield found


def _isolated(request: SimpleNamespace, library: Adapter, setting: Setting) -> Generator[Child, Step, BoardRow]:
    """Write a setting's row in a child and a folder of its own, which is deleted; one that is killed loses its own row.

    A loss may kill the process that isolates it, and no other setting.
    """
    with (
        tempfile.TemporaryDirectory(prefix="setting-", ignore_cleanup_errors=True) as folder,
        Child(_rows, request, setting, folder) as child,
    ):
        step = yield child.begin()
    lost = f"the process that graded it {step.message}" if step.kind == "ended" else step.message
    return step.value if step.kind == "value" else _row(request, library, setting, lost)


def _rows(request: SimpleNamespace, setting: Setting, folder: str) -> Iterator[BoardRow]:
    os.chdir(folder)
    os.environ[TRACES] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield _row(request, find(request.library), setting)


def _row(request: SimpleNamespace, library: Adapter, setting: Setting, lost: str = "") -> BoardRow:
    """The row of a setting, with the program that shows its gradient but for histories; or that its result is lost."""
    shows, started, kl = not (request.history or lost), time.monotonic(), request.part == "kl"
    # Under a stale sampler too, whatever log-probs a setting takes; a recipe for fresh rollouts is held to these alone.
    both = kl and shows and not (setting.recipe and "sampler" in setting.options)
    given: dict[str, Any] = {"part": request.part}
    given |= {"sampler": "both"} if both else {} if kl else {"sampler": "current"}
    given |= {} if request.timeout is None else {"timeout": request.timeout}
    (job,) = Job.all_of(f"{request.library}:{setting.name}", given)
    try:
        report = failed(job, f"{job.name}: {lost}") if lost else next(graded([job])).report
    except UsageError as error:
        report = failed(job, str(error))
    others: dict[str, Any] = {"program": "", "program_of_adapter": False}
    if shows:
        others = (program(library, setting, report) if kl else others) | extras(job, report)
    return row(
        library,
        setting.for_part(request.part),
        report,
        part=request.part,
        version=version_of(library.distribution) or "?",
        versions=report.versions | {package: found for package in COMPANIONS if (found := version_of(package))},
        known=setting in library.settings,
        unset=unset(setting.coefficient) if kl else [],
        seconds=round(time.monotonic() - started, 1),
        calls=report.calls,
        calling=round(report.calling, 1),
        **others,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
