"""`kltest scan`: find the KL terms of a source tree, lift them and grade them, without a line from its owner."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kltest.errors import KltestError, UsageError

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kltest" / "scan"


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Files and folders [default: the current folder]", show_default=False),
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
        str | None, typer.Option(metavar="REF", help="Only terms on lines that differ from this commit of git.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 4 if a term was not run, not named or not decided.")
    ] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep results by content between runs.")] = True,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Terms graded at once [default: all cores].")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="For grading one variant.")] = 60.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what was lifted, and what was guessed.")
    ] = False,
) -> int:
    from kltest.scanning.report import FORMATS, text
    from kltest.scanning.scan import changed_since as lines_changed
    from kltest.scanning.scan import scan

    where = [(form, path) for form, _, path in (given.partition(":") for given in output or ["text"])]
    for form, _ in where:
        if form not in FORMATS:
            raise UsageError(f"--output: there is no format {form!r}; choose from {', '.join(FORMATS)}")
    known = _known(baseline) if baseline else []
    changed = lines_changed(changed_since) if changed_since else None
    found = scan(
        *(paths or [Path()]),
        jobs=jobs,
        timeout=timeout,
        cache=CACHE if cache else None,
        baseline=known,
        expect=_declared(expect),
        changed=changed,
        told=_progress if sys.stderr.isatty() else lambda done, total: None,
    )
    for form, path in where:
        written = text(found, _terminal(verbose)) if form == "text" else FORMATS[form](found)
        if path in ("", "-"):
            print(written, end="")
            continue
        try:
            Path(path).write_text(written, encoding="utf-8")
        except OSError as error:
            raise KltestError(f"{path} cannot be written: {error.strerror}") from None
    return found.exit_code(strict=strict, changed=changed is not None)


def _declared(expect: str | None) -> str | None:
    if expect is not None:
        from kltest.truth import parse

        parse(expect)
    return expect


def _known(path: Path) -> list[str]:
    """Return the keys of the findings of an earlier report; UsageError if it is none."""
    try:
        terms = json.loads(path.read_text(encoding="utf-8"))["terms"]
        return [
            f"{t['file']}|{t['function']}|{t['place']}|{t['variant']}|{t['formula']}|{','.join(t['errors'])}"
            for t in terms
            if t["status"] in ("finding", "known")
        ]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"--baseline {path} is no report of `kltest scan --output json:{path}`") from None


def _terminal(verbose: bool) -> Any:
    from kltest.cli.destinations import terminal

    return replace(terminal(), verbose=verbose)


def _progress(done: int, total: int) -> None:
    print(f"\rgraded {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
