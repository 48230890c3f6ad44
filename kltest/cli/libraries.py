"""`kltest libraries`: install real libraries, each in an environment of its own, and grade all their settings there.

Exit codes: 0, everything was measured; 1, with --diff, something differs from the record; 3, a library could not be
installed or took its process down (the others were measured, and its row says so); 130, interrupted, finished rows are
kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer

import kltest
from kltest.adapters import NAMES, find
from kltest.adapters.adapter import Adapter, Setting
from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.files import writable, write
from kltest.grading.forms import seconds
from kltest.render.markdown import escape
from kltest.render.tables import wrap
from kltest.render.words import one_line
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import ALONE, NEWEST, Installed, exact_version, install
from kltest.scoreboard.measuring import Measuring
from kltest.scoreboard.rows import Row, absent, changes, matches, summary
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Store, digest

INTERRUPTED = 130
MEASURING = (
    *("environments", "truth", "loss", "moments", "language_models", "identify", "counterexample", "checks"),
    *("adapters", "grading", "scoreboard"),
)
"""Rooms that a measurement depends on."""
SHOWING = ("table.py", "pages.py", "recorded.py")
"""Files of these rooms that only show results."""
FOLDER = "results/libraries"
Asked = tuple[str, str | None]
"""An adapter, by its name or file, and the version to measure, None for the one of the adapter."""


@dataclass(frozen=True)
class Request:
    """Settings to measure (names or patterns, all if empty), seconds for each, and if finished ones are repeated."""

    settings: tuple[str, ...] = ()
    timeout: float | None = None
    again: bool = False


def libraries(
    names: Sequence[str] = (),
    *,
    request: Request = Request(),
    output: str | None = None,
    diff: bool = False,
    record: bool = False,
) -> int:
    """Measure the libraries (all, or those named, `NAME==VERSION`), write the scoreboard, print what was found."""
    asked = _asked(names)
    folder = writable(Path(output or FOLDER))
    found: dict[Asked, list[Row]] = {}
    with Store(folder / "runs.jsonl", _code()) as store:
        try:
            for each, version, there in _installed(sorted(asked, key=_takes_long)):
                found[each] = _measured(each[0], version, there, store, request)
        except KeyboardInterrupt:
            print(
                f"kltest: interrupted; what is finished is kept in {folder}: the same command goes on", file=sys.stderr
            )
            return INTERRUPTED
    rows = [row for each in asked for row in found[each]]
    failed = [each for each in rows if not each["setting"]]
    if not failed:
        _check_patterns(request.settings, [each["setting"] for each in rows])
    _write([*store.all_rows(), *failed], folder)
    _print(rows)
    print(f"The scoreboard is in {folder}: libraries.md, libraries.html and the standalone programs in programs.")
    changed = changes(recorded.read(), rows, request.settings) if diff else []
    if diff:
        _print_changes(changed, folder)
    if record:
        recorded.record(rows, whole=not request.settings)
    return 3 if failed else int(bool(changed))


def listing(names: Sequence[str] = (), settings: Sequence[str] = ()) -> int:
    """Print the known settings, or those that fit patterns, and what was last recorded of them."""
    known = recorded.read()
    libraries = [find(name) for name, _ in _asked(names)]
    _check_patterns(settings, [setting.name for library in libraries for setting in library.settings])
    for library in libraries:
        rows = {each["setting"]: each for each in known if each["library"] == library.name}
        chosen = [setting for setting in library.settings if matches(setting.name, settings)]
        if not chosen:
            continue
        versions = sorted({each["version"] for each in rows.values()})
        measured = f"measured in {', '.join(versions)}" if versions else "not measured yet"
        print(f"{library.name} ({library.homepage}): {measured}")
        for setting in chosen:
            mark = " (default)" if setting.default else " (recipe)" if setting.recipe else ""
            print(f"  {setting.name}{mark}")
            words = one_line(summary(rows[setting.name])) if setting.name in rows else "–"
            print(*wrap(words, indent=" " * 6), sep="\n")
    return 0


def program(target: str) -> int:
    """Print the standalone program of `LIBRARY:SETTING`; UsageError if the adapter writes none."""
    name, setting = _setting(target)
    text = find(name).standalone
    code = text(setting) if text else ""
    if not code:
        raise UsageError(
            f"the adapter of {name} writes no programs; `kltest libraries {name} --setting '{setting.name}'` measures "
            "the setting and writes one if its function can be imported"
        )
    print(code, end="")
    return 0


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


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    missing = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in names)]
    if missing:
        raise UsageError(
            f"{' and '.join(sorted(missing))}: none of these libraries has such a setting; --list shows them"
        )


def _asked(names: Sequence[str]) -> list[Asked]:
    """Adapters and versions, each checked before any work is done."""
    pairs = [name.partition("==") for name in dict.fromkeys(names or NAMES)]
    for name, equals, version in pairs:
        library = find(name)
        if equals and not version:
            raise UsageError(f"{name}==: no version is given; write {name}=={library.version}")
        if equals and version != NEWEST:
            exact_version(library, version)
    return [(name, version or None) for name, _, version in pairs]


def _installed(asked: Sequence[Asked]) -> Iterator[tuple[Asked, str, Installed | KltestError]]:
    """Adapter, version and environment or the error; the next are installed while one is measured."""
    with ThreadPoolExecutor(1) as executor:
        try:
            futures = [executor.submit(_environment, *each) for each in asked]
            for each, future in zip(asked, futures, strict=True):
                yield (each, *future.result())
        finally:
            executor.shutdown(cancel_futures=True)


def _takes_long(asked: Asked) -> bool:
    """Return True if a library is installed with its dependencies: others are measured meanwhile."""
    return not all(ALONE in call for call in find(asked[0]).installs)


def _environment(name: str, asked: str | None) -> tuple[str, Installed | KltestError]:
    library = find(name)
    version = asked or library.version
    try:
        version = exact_version(library, asked)
        _log(f"{library.name} {version}: installing, unless it is there already")
        return version, install(library, version)
    except KltestError as error:
        return version, error


def _measured(name: str, version: str, there: Installed | KltestError, store: Store, request: Request) -> list[Row]:
    """The rows of a library; those that are in the store are not measured again."""
    library = find(name)
    if isinstance(there, KltestError):
        _log(f"{library.name} {version}: {there}")
        return [absent(library, version, str(there))]
    finished = _finished(store, library, version, request)
    arguments = [part for setting in request.settings for part in ("--setting", setting)]
    arguments += [part for setting in finished for part in ("--done", setting)]
    if request.timeout is not None:
        arguments += ["--timeout", str(request.timeout)]
    path = str(Path(name).resolve()) if name.endswith(".py") else name
    return _rows(library, version, Measuring(path, there, arguments), store, finished)


def _rows(library: Adapter, version: str, measuring: Measuring, store: Store, finished: Mapping[str, Row]) -> list[Row]:
    """The rows of the settings to measure, and one with the error if a measuring process failed."""
    names: list[str] = []
    done: dict[str, Row] = {}
    try:
        answers = measuring.answers()
        names = next(answers)["settings"]
        done = {name: finished[name] for name in names if name in finished}
        with Progress(f"{library.name} {version}", len(names), done=len(done)) as progress:
            for each in answers:
                store.add([(_configuration(library, version, each["setting"]), [each])])
                done[each["setting"]] = each
                progress.advance(each["setting"])
    except KltestError as error:
        _log(f"{library.name} {version}: {error}")
        return [*(done[name] for name in names if name in done), absent(library, version, str(error))]
    return [done[name] for name in names]


def _configuration(library: Adapter, version: str, setting: str) -> dict[str, str]:
    return {"library": library.name, "version": version, "setting": setting}


def _finished(store: Store, library: Adapter, version: str, request: Request) -> dict[str, Row]:
    """The rows that need not be measured again, by setting; those that could not be graded are tried once more."""
    if request.again:
        return {}
    return {
        each["setting"]: each
        for each in store.all_rows()
        if (each["library"], each["version"]) == (library.name, version) and not each["error"]
    }


def _code() -> str:
    """A digest of all code that a measurement depends on, so that results of other code are not reused."""
    root = Path(kltest.__file__).parent
    sources = [*root.glob("*.py"), *(path for room in MEASURING for path in (root / room).rglob("*.py"))]
    read = [(str(path.relative_to(root)), path.read_bytes()) for path in sources if path.name not in SHOWING]
    return digest(sorted((name, sha256(content).hexdigest()) for name, content in read))


def _write(rows: Sequence[Row], folder: Path) -> None:
    from kltest.scoreboard.pages import files

    for name, content in files(rows).items():
        write(folder / name, content)


def _print(rows: Sequence[Row]) -> None:
    from kltest.scoreboard.table import COLUMNS, frame

    for title, group in frame(rows).groupby("title", sort=False):
        print(f"\n{title}")
        for line in group.to_dict("records"):
            print(f"  {line['setting']}" + (f" ({line['mark']})" if line["mark"] else ""))
            for column in ("one_step", "sequences", "off_policy", "checks", "logged"):
                if line[column]:
                    print(f"    {COLUMNS[column] + ':':12}{line[column]}")
    print()


def _print_changes(changed: Sequence[str], folder: Path) -> None:
    head = "What changed since the recorded results" if changed else "Nothing changed since the recorded results"
    print("\n".join(["", head + ".", *changed]))
    items = [f"- {escape(one_line(each))}" for each in changed]
    write(folder / "changes.md", "\n".join([f"# {head}", *([""] if items else []), *items]) + "\n")


def _log(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


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
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this setting, or those that fit a pattern (`grpo/*`); repeatable."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The longest that a setting may take [default: its own]")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Say what changed since the recorded results; exit 1 if anything did.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Make these the recorded results (in a checkout).")] = False,
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Where results go [default: results/libraries]")
    ] = None,
) -> int:
    """Install real libraries and grade all their settings."""
    if wanted_program is not None:
        return program(wanted_program)
    if list_only:
        return listing(names or [], setting or [])
    request = Request(tuple(setting or ()), None if timeout is None else seconds(timeout, "--timeout"), again)
    return libraries(names or [], request=request, output=output, diff=diff, record=record)
