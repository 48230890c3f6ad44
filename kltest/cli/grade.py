"""`kltest grade`: check the question, grade each target in a process of its own, and write the reports.

The options come from `kltest.grading.options`.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from kltest.cli import fixes
from kltest.cli.destinations import Destination, destinations, show, with_page, write
from kltest.cli.parameters import given, take
from kltest.errors import INTERRUPTED, UsageError
from kltest.grading.configuration import NO_CACHE, Configuration, Target, nearest
from kltest.grading.isolated import terminated_as_interrupted
from kltest.grading.jobs import Job, graded
from kltest.grading.options import OPTIONS, merged
from kltest.render.changes import compare, read
from kltest.report import EXIT_CODES, WORST_FIRST, Report

NOTHING = 5
# The file of an earlier report, and its contents.
Old = tuple[str, list[dict[str, Any]]]


def _known_targets(incomplete: str) -> Iterator[tuple[str, str]]:
    """Registered estimators, for the completion of a shell."""
    from kltest.estimators import registry

    return ((name, entry.spec.formula) for name, entry in registry(None).items() if name.startswith(incomplete))


def command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help="A name of `kltest list`, package.module:function, path/to/file.py:function, or an installed library "
            "(trl, verl, …) or one of its settings. Without one, the targets of [tool.kltest] in pyproject.toml.",
            show_default=False,
            autocompletion=_known_targets,
        ),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option(metavar="OLD.json", help="Say what changed since this report (--output json:OLD.json)."),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT[:PATH]",
            help="text, json, junit, markdown, github, html or sarif, to standard output "
            "or a file; repeatable [default: text].",
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the report as a page in the browser; --output html:PATH keeps it.")
    ] = False,
    fix: Annotated[
        str | None,
        typer.Option(
            metavar="[apply]",
            help="Show a change of the source with which it is confirmed, as a unified diff; --fix=apply writes it.",
        ),
    ] = None,
    call: Annotated[bool, typer.Option("--call", help="Call the loss; never read its source instead.")] = False,
    read_only: Annotated[
        bool,
        typer.Option("--read", help="Read the source of the loss, and do not call it [default: where it cannot be]."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print the whole report: every environment, fixes with code, notes, an example."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line a target.")] = False,
    cache: Annotated[
        bool | None, typer.Option("--cache/--no-cache", hidden=True, help="Deprecated, without effect.")
    ] = None,
    allow_stale_excuses: Annotated[
        bool, typer.Option("--allow-stale-excuses", hidden=True, help="Deprecated: --allow-unexpected-passes.")
    ] = False,
    **options: Any,
) -> int:
    if allow_stale_excuses:
        print("kltest: --allow-stale-excuses is deprecated; write --allow-unexpected-passes", file=sys.stderr)
        options["allow_unexpected_passes"] = True
    if cache is not None:
        print(f"kltest: --{'' if cache else 'no-'}cache {NO_CACHE}", file=sys.stderr)
    chosen = given(options)
    configuration = nearest(Path.cwd())
    for words in configuration.deprecated:
        print(f"kltest: {words}", file=sys.stderr)
    if verbose and quiet:
        raise UsageError("--verbose and --quiet exclude each other; give one of them")
    verbosity = {"verbose": verbose, "quiet": quiet} if verbose or quiet else configuration.verbosity
    outputs = output or configuration.outputs or ["text"]
    page = None
    if open_page:
        outputs, page = with_page(outputs)
    where = destinations(outputs)
    old = None if diff is None else (diff, read(diff))
    jobs = _jobs(targets or [], chosen, configuration, fix=fixes.asked(fix))
    if not jobs:
        print(_nothing(configuration), file=sys.stderr)
        return NOTHING
    if call and read_only:
        raise UsageError("--call and --read exclude each other; give one of them")
    with tempfile.TemporaryDirectory(prefix="kltest-read-") as folder:
        programs = Path(folder)
        if read_only:
            from kltest.scanning import reading

            jobs = [one for job in jobs for one in reading.read(job, programs)]
        code = _run(jobs, where, old, verbosity, None if call else programs, apply=fix == fixes.APPLY)
    if page and page.is_file():
        show(page)
    return code


take(command, [option for option in OPTIONS.values() if option.flag])


def _jobs(targets: Sequence[str], given: Mapping[str, Any], configuration: Configuration, *, fix: bool) -> list[Job]:
    chosen = [Target(text) for text in dict.fromkeys(targets)] or configuration.targets
    folder = str(configuration.path.parent) if configuration.path and not targets else None
    settings = [merged(configuration.options, target.options, given) for target in chosen]
    return [
        job
        for target, own in zip(chosen, settings, strict=True)
        for job in Job.all_of(target.text, own, folder, fix=fix)
    ]


def _nothing(configuration: Configuration) -> str:
    where = f"{configuration.path} lists none in [tool.kltest]" if configuration.path else "there is no pyproject.toml"
    return (
        f"kltest: nothing to grade: no target was given, and {where}.\n"
        'Give one (`kltest grade k3-loss`), or write targets = ["package.module:function"] under [tool.kltest].'
    )


def _run(
    jobs: Sequence[Job],
    where: Sequence[Destination],
    old: Old | None,
    verbosity: Mapping[str, bool],
    programs: Path | None,
    *,
    apply: bool,
) -> int:
    """Grade, write the reports, and return the exit code.

    Programs made of the source of losses that cannot be called lie in the folder `programs`; without one none are made.
    """

    def instead(job: Job, report: Report) -> list[Job]:
        if programs is None:
            return []
        from kltest.scanning import reading

        return reading.instead(job, report, programs)

    found: dict[float, Report] = {}
    misused = interrupted = False
    try:
        with terminated_as_interrupted():
            for number, report, kind in graded(jobs, instead):
                found[number] = report
                misused |= kind == "usage" and not report.beside
    except KeyboardInterrupt:
        interrupted = True
    reports = [report for _, report in sorted(found.items(), key=itemgetter(0))]
    if any(report.beside for report in reports):
        from kltest.scanning import reading

        reports = reading.folded(reports)
    if reports:
        write(reports, where, None if old is None else compare(*old, reports), **verbosity)
    for line in fixes.applied(reports) if apply else ():
        print(f"kltest: {line}", file=sys.stderr)
    if interrupted:
        missing = ", ".join(job.name for number, job in enumerate(jobs) if number not in found)
        print(f"kltest: interrupted; {len(reports)} of {len(jobs)} graded, not graded: {missing}", file=sys.stderr)
        return INTERRUPTED
    worst = min((report.verdict for report in reports), key=WORST_FIRST.index)
    return UsageError.exit_code if misused else EXIT_CODES[worst]
