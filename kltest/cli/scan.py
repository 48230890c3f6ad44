"""`kltest scan`: find the KL terms of a source tree, lift them and grade them, without a line from its owner."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kltest.errors import INTERRUPTED, UsageError
from kltest.sweeps.progress import Progress

if TYPE_CHECKING:
    from kltest.scanning.rows import Row


def command(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...",
            help="Files and folders, FILE:LINE for the terms of that line [default: the current folder]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT[:PATH]", help="text, json, markdown, github or sarif; repeatable [default: text]."
        ),
    ] = None,
    expect: Annotated[str | None, typer.Option(metavar="NAME", help="The gradient that every term declares.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Findings of this earlier report (--output json:FILE) count no longer."),
    ] = None,
    changed_since: Annotated[
        str | None, typer.Option(metavar="REF", help="Only terms that changed since the work left this commit of git.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Does nothing: nothing of a tree is run.", hidden=True)] = False,
    logged: Annotated[
        bool, typer.Option("--logged", help="Terms that are only logged, too: is the number a KL?")
    ] = False,
    fix: Annotated[
        str | None,
        typer.Option(
            metavar="[apply]",
            help="Show a change of the source with which a finding passes, as a unified diff; --fix=apply FILE:LINE "
            "writes it.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 4 if a term was not run, not named or not decided.")
    ] = False,
    allow_ungraded: Annotated[
        bool, typer.Option("--allow-ungraded", help="Exit 0, not 4, if nothing that was found could be graded.")
    ] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep results by content between runs.")] = True,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Terms graded at once [default: all cores].")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="For grading one variant.")] = 60.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show how each was graded, and what was guessed.")
    ] = False,
) -> int:
    looked_at, lines = _places(paths or ["."])
    from kltest.cli import fixes
    from kltest.cli.destinations import deliver, destinations
    from kltest.files import cache_folder
    from kltest.grading.configuration import nearest
    from kltest.grading.forms import combination
    from kltest.grading.isolated import terminated_as_interrupted
    from kltest.names import listed
    from kltest.scanning import changes, declarations
    from kltest.scanning.report import FORMATS, text
    from kltest.scanning.scan import Interrupted, scan

    where = destinations(output or ["text"], FORMATS)
    if expect is not None:
        combination(expect, "--expect")
    configuration = nearest(Path.cwd())
    rules = declarations.rules(configuration.scan, configuration.path) if configuration.path else None
    known = baseline or (Path(rules.baseline) if rules and rules.baseline else None)
    if fixes.asked(fix) and fix == fixes.APPLY and not lines:
        raise UsageError("--fix=apply changes one term at a time: name it as FILE:LINE")
    if lines and changed_since:
        raise UsageError("--changed-since and FILE:LINE both say which terms are meant; give one of them")
    changed = changes.changed_since(changed_since, looked_at) if changed_since else lines or None
    if run:
        print("kltest: --run does nothing: terms are graded without running the tree", file=sys.stderr)
    interrupted = False
    with Progress("kltest scan", 0) as bar, terminated_as_interrupted():
        try:
            found = scan(
                *looked_at,
                jobs=jobs,
                timeout=timeout,
                cache=cache_folder("KLTEST_SCAN_CACHE", "scan") if cache else None,
                baseline=declarations.baseline(known) if known else (),
                expect=expect,
                rules=rules,
                changed=changed,
                logged=logged,
                reading=lambda file, number, total: bar.say(f"reading {file} ({number} of {total})"),
                progress=lambda row, done, total: bar.advance(
                    words := f"{row.spot}: {row.follows[0]}", stays=words, total=total
                ),
            )
            if fix:
                _fix(found.findings, bar, timeout, jobs)
        except Interrupted as error:
            found, interrupted = error.scan, True
    if lines:
        spots = [one.rpartition(":") for one in paths or []]
        found.where = f"on {listed([f'line {line} of {name}' for name, _, line in spots if line.isdigit()])}"
    deliver(
        where,
        lambda to, shown: text(found, shown) if to.form == "text" else FORMATS[to.form](found),
        verbose=verbose,
    )
    for line in fixes.applied(found.findings) if fix == fixes.APPLY else ():
        print(f"kltest: {line}", file=sys.stderr)
    if interrupted:
        left = sum(row.status == "not graded" for row in found.rows)
        kept = "; the rest is kept, and the same command goes on from there" if cache else ""
        print(
            f"kltest: interrupted; {left} of {len(found.rows)} variants found so far not graded{kept}", file=sys.stderr
        )
        return INTERRUPTED
    return found.exit_code(strict=strict, changed=bool(changed_since), allow_ungraded=allow_ungraded)


def _places(texts: list[str]) -> tuple[list[Path], dict[str, list[range]]]:
    """Return the paths, and the lines of those that name one, by the real path of their file."""
    paths: list[Path] = []
    lines: dict[str, list[range]] = {}
    for text in texts:
        name, colon, line = text.rpartition(":")
        path = Path(name if colon and line.isdigit() and not Path(text).exists() else text)
        if not path.exists():
            raise UsageError(f"there is no file or folder {path}")
        paths.append(path)
        if str(path) != str(Path(text)):
            lines.setdefault(str(path.resolve()), []).append(range(int(line), int(line) + 1))
    if lines and len(lines) < len({path.resolve() for path in paths}):
        raise UsageError("give FILE:LINE for every path, or for none")
    return paths, lines


def _fix(rows: Sequence["Row"], bar: Progress, timeout: float, jobs: int | None) -> None:
    """Look for a fix of each finding."""
    from kltest.scanning import fixing
    from kltest.scanning.judge import Judge
    from kltest.scanning.store import Store

    with Judge(jobs or 1, timeout, Store(None)) as judge:
        for row in rows:
            bar.say(f"looking for a fix of {row.spot}")
            fixing.fix(row, judge)
