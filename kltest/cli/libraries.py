"""`kltest libraries`: install real libraries, each in an environment of its own, and grade all their settings there.

Exit codes: 0, everything was measured; 1, with --diff, something differs from the record; 3, a library could not be
installed, could not be imported or took its process down, or a setting was not graded that the record does not know as
refused (the others were measured, and its row says so); 130, interrupted, finished rows are
kept.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from kltest.adapters import Setting, find
from kltest.errors import UsageError, did_you_mean
from kltest.grading.forms import seconds
from kltest.render.tables import wrap
from kltest.render.words import one_line
from kltest.scoreboard import recorded
from kltest.scoreboard.history import history
from kltest.scoreboard.measurement import Measurement, check_patterns, libraries, requested
from kltest.scoreboard.rows import BoardRow, matches, summary


def listing(names: Sequence[str] = (), settings: Sequence[str] = ()) -> int:
    """Print the known settings, or those that fit patterns, and what was last recorded of them."""
    known = recorded.read()
    libraries = [find(name) for name, _ in requested(names)]
    check_patterns(settings, [setting.name for library in libraries for setting in library.settings])
    for library in libraries:
        rows = {each["setting"]: each for each in known if each["library"] == library.name}
        chosen = [setting for setting in library.settings if matches(setting.name, settings)]
        if not chosen:
            continue
        versions = sorted({each["version"] for each in rows.values()})
        measured = f"measured in {', '.join(versions)}" if versions else "not measured yet"
        covered = f"; releases since {library.since}" if library.since else ""
        print(f"{library.name} ({library.homepage}): {measured}{covered}")
        for setting in chosen:
            mark = " (default)" if setting.default else " (recipe)" if setting.recipe else ""
            print(f"  {setting.name}{mark}")
            words = f"(since {setting.since}) " if setting.since else ""
            words += one_line(summary(rows[setting.name])) if setting.name in rows else "–"
            print(*wrap(words, indent=" " * 6), sep="\n")
    return 0


def program(target: str) -> int:
    """Print the standalone program of `LIBRARY:SETTING`; UsageError if the adapter writes none."""
    from kltest.scoreboard.programs import standalone

    name, setting = _setting(target)
    row = _recorded(name, setting) or {"gradients": []}
    code = standalone(find(name), setting, (each["batch"] for each in row["gradients"]))
    if not code:
        raise UsageError(
            f"the adapter of {name} writes no programs; `kltest libraries {name} --setting '{setting.name}'` measures "
            "the setting and writes one if its function can be imported"
        )
    print(code)
    return 0


def report(target: str) -> int:
    """Print what is recorded of the setting `LIBRARY:SETTING`, with its program; nothing is sent."""
    from kltest.scoreboard.pages import facts

    name, setting = _setting(target)
    row = _recorded(name, setting)
    if row is None or not row["gradients"]:
        raise UsageError(f"nothing is recorded of {target}; `kltest libraries {name}` measures it")
    print(facts(row))
    return 0


def _recorded(library: str, setting: Setting) -> BoardRow | None:
    """The row of a setting in the newest version that is recorded; None if it was never measured."""
    wanted = find(library).name, setting.name
    return next((row for row in recorded.read() if (row["library"], row["setting"]) == wanted), None)


def _setting(target: str) -> tuple[str, Setting]:
    """An adapter's name or file, and one of its known settings."""
    name, colon, wanted = target.strip().partition(".py:") if ".py:" in target else target.strip().partition(":")
    name += ".py" if colon == ".py:" else ""
    if not wanted:
        raise UsageError(f"{target}: no setting is given; write LIBRARY:SETTING, such as trl:grpo/defaults")
    library = find(name)
    setting = library.setting(wanted)
    if setting is None:
        hint = did_you_mean(wanted, [each.name for each in library.settings])
        raise UsageError(f"{name} has no setting {wanted!r}; {hint}`kltest libraries --list {name}` shows them")
    return name, setting


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LIBRARY[==VERSION]...",
            help="Which libraries, in which versions (`newest`: whatever the package index has) [default: all]",
            show_default=False,
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="List known settings and what was recorded of them; install nothing.")
    ] = False,
    wanted_program: Annotated[
        str | None,
        typer.Option(
            "--program",
            metavar="LIBRARY:SETTING",
            help="Print a program that shows a setting's gradient without kltest.",
        ),
    ] = None,
    wanted_report: Annotated[
        str | None,
        typer.Option(
            "--report",
            metavar="LIBRARY:SETTING",
            help="Print what is recorded of a setting and the program that shows it, as one would file it upstream.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this setting, or those that fit a pattern (`grpo/*`); repeatable."),
    ] = None,
    checkout: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Clone a library that is on no package index from here (or this folder)."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The longest that a setting may take [default: its own]")
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE", help="Install this package beside the library as well; repeatable."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Say what changed since the record, or between releases that are named; exit 1."),
    ] = False,
    releases: Annotated[
        bool,
        typer.Option(
            "--history", help="Measure defaults and main settings of each minor release instead; what is done is kept."
        ),
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Make these the recorded results (in a checkout).")] = False,
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Where results go [default: results/libraries]")
    ] = None,
) -> int:
    if wanted_program is not None:
        return program(wanted_program)
    if wanted_report is not None:
        return report(wanted_report)
    if list_only:
        return listing(names or [], setting or [])
    longest = None if timeout is None else seconds(timeout, "--timeout")
    request = Measurement(tuple(setting or ()), longest, again, tuple(more or ()), releases, checkout)
    if releases:
        return history(names or [], request, output, record=record)
    return libraries(names or [], request=request, output=output, diff=diff, record=record)
