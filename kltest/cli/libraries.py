"""`kltest libraries`: install real libraries, each in an environment of its own, and grade all their settings there.

Exit codes: 0, everything was measured; 1, with --diff, something differs from the record; 3, a library could not be
installed, could not be imported or took its process down, or a setting was not graded that the record does not know as
refused (the others were measured, and its row says so); 130, interrupted, finished rows are stored.
"""

import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from kltest.adapters import find, split
from kltest.errors import UsageError, did_you_mean
from kltest.grading.forms import seconds
from kltest.render.tables import wrap
from kltest.render.words import one_line
from kltest.scoreboard import recorded
from kltest.scoreboard.history import history
from kltest.scoreboard.measurement import Measurement, check_patterns, libraries, requested
from kltest.scoreboard.rows import PARTS, matches, summary
from kltest.scoreboard.table import frame, right


def listing(names: Sequence[str] = (), settings: Sequence[str] = ()) -> int:
    """Print the known settings, or those that fit patterns, and what was last recorded of them."""
    known, policies = recorded.read(), recorded.read(parts=["policy"])
    libraries = [find(name) for name, _ in requested(names)]
    check_patterns(settings, [setting.name for library in libraries for setting in library.settings])
    for library in libraries:
        rows = {each["setting"]: each for each in known if each["library"] == library.name}
        chosen = [setting for setting in library.settings if matches(setting.name, settings)]
        if not chosen:
            continue
        versions = ", ".join(sorted({each["version"] for each in rows.values()}))
        measured = f"measured in {versions}" if versions else "not measured yet"
        covered = f"; releases since {library.since}" if library.since else ""
        print(f"{library.name} ({library.homepage}): {measured}{covered}")
        if there := [rows[setting.name] for setting in chosen if setting.name in rows]:
            number = len(library.settings)
            part = f"none of the settings listed ({len(chosen)} of {number})" if len(chosen) < number else "no setting"
            print(*wrap(right(frame(there, programs=False), part), indent="  "), sep="\n")
        for setting in chosen:
            mark = " (default)" if setting.default else " (recipe)" if setting.recipe else ""
            print(f"  {setting.name}{mark}")
            words = f"(since {setting.since}) " if setting.since else ""
            words += one_line(summary(rows[setting.name])) if setting.name in rows else "–"
            print(*wrap(words, indent=" " * 6), sep="\n")
            for row in policies:
                if (row["library"], row["setting"]) == (library.name, setting.name):
                    print(*wrap(f"without its KL: {one_line(summary(row))}", indent=" " * 6), sep="\n")
    return 0


def printed(target: str, *, reported: bool) -> int:
    """Print the standalone program of `LIBRARY:SETTING`, or, `reported`, all that is recorded of it, and the program.

    Raises:
        UsageError: the adapter writes no program, or nothing is recorded.
    """
    name, wanted = split(target)
    if not wanted:
        raise UsageError(f"{target}: no setting is given; write LIBRARY:SETTING, such as trl:grpo/defaults")
    library = find(name)
    setting = library.setting(wanted)
    # The newest version comes first.
    rows = [each for each in recorded.read() if (each["library"], each["setting"]) == (library.name, wanted)]
    gradients = rows[0]["gradients"] if rows else []
    if reported and not gradients:
        raise UsageError(f"nothing is recorded of {target}; `kltest libraries {shlex.quote(name)}` measures it")
    if reported:
        from kltest.scoreboard.pages import facts

        text = facts(rows[0])
    else:
        from kltest.scoreboard.programs import standalone

        text = standalone(library, setting, (each["batch"] for each in gradients))
    if not text:
        raise UsageError(
            f"the adapter of {name} writes no programs; `kltest libraries {shlex.quote(name)} "
            f"--setting {shlex.quote(wanted)}` measures the setting and writes one if its function can be imported"
        )
    print(text)
    return 0


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LIBRARY[==VERSION]...",
            help="Which libraries, in which versions (`newest`: whatever the package index has).",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every library, in gigabytes of disk and perhaps hours.")
    ] = False,
    list_only: Annotated[
        bool, typer.Option("--list", help="List known settings and what was recorded of them; install nothing.")
    ] = False,
    program: Annotated[
        str | None,
        typer.Option(
            metavar="LIBRARY:SETTING",
            help="Print a program that shows a setting's gradient without kltest.",
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
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
    part: Annotated[
        str,
        typer.Option(
            metavar="kl|policy", help="The part of each loss: its KL term, or what is ascended in whole groups without."
        ),
    ] = "kl",
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
    for target, reported in ((program, False), (report, True)):
        if target is not None:
            return printed(target, reported=reported)
    if list_only:
        return listing(names or [], setting or [])
    if bool(names) is every:
        raise UsageError(
            f"{'--all and names are both given' if every else 'no library is given'}: name some, such as trl verl, "
            "each of which is installed in an environment of its own; --list installs nothing and shows what is "
            "recorded; --all installs every one, in gigabytes of disk and perhaps hours"
        )
    longest = None if timeout is None else seconds(timeout, "--timeout")
    if part not in PARTS:
        raise UsageError(f"--part {part}: {did_you_mean(part, PARTS)}there are {' and '.join(PARTS)}")
    if releases and part != "kl":
        raise UsageError("--history measures KL terms; `kltest libraries NAME==VERSION --part policy` grades a release")
    request = Measurement(tuple(setting or ()), longest, again, tuple(more or ()), releases, checkout, part)
    if releases and diff:
        raise UsageError("--history measures releases one by one; --diff compares them without it: trl==0.16 trl==0.20")
    if releases:
        return history(names or [], request, output, record=record)
    return libraries(names or [], request=request, output=output, diff=diff, record=record)
