"""`kltest libraries`: install real libraries, each in an environment of its own, and grade all their settings there.

0: everything was measured; 1: with --diff, something is not as recorded; 3: a library could not be installed or took
its process down (the others were measured, and it has a row that says so); 130: interrupted, what is finished is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import kltest
from kltest.adapters import NAMES, door
from kltest.adapters.adapter import Door
from kltest.errors import KltestError, UsageError
from kltest.files import writable, write
from kltest.render.markdown import escape
from kltest.render.words import one_line
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import ALONE, NEWEST, Installed, exact_version, install
from kltest.scoreboard.measuring import Measuring
from kltest.scoreboard.rows import Row, absent, changes, summary
from kltest.scoreboard.table import lines
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Store, digest

INTERRUPTED = 130
MEASURING = ("environments", "truth", "targets", "moments", "grading", "libraries")
WORDS = ("cli.py", "docs.py", "guide.py", "markdown.py", "page.py", "scoreboard.py", "recorded.py")
"""What only says what was found."""
FOLDER = "results/libraries"
Asked = tuple[str, str | None]
"""A door, by its name or file, and the version that was asked for."""


@dataclass(frozen=True)
class Request:
    """What is asked of the libraries: only some settings, a limit of seconds for each, and whether to measure again."""

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
    """Measure the libraries (all, or those named, `NAME==VERSION`), write the scoreboard, say what was found."""
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
    missing = set(request.settings) - {each["setting"] for each in rows}
    if missing and not failed:
        raise UsageError(
            f"{' and '.join(sorted(missing))}: no library that was asked for has such a setting; --list shows them"
        )
    _write([*store.all_rows(), *failed], folder)
    _say(rows)
    print(f"The scoreboard is in {folder}: libraries.md, libraries.html and the programs in reproductions.")
    told = changes(recorded.read(), rows, request.settings) if diff else []
    if diff:
        _tell_changes(told, folder)
    if record:
        recorded.record(rows, whole=not request.settings)
    return 3 if failed else int(bool(told))


def listing(names: Sequence[str] = ()) -> int:
    """What is known without installing anything: the settings of each door, and what was last recorded of them."""
    known = recorded.read()
    for name, _ in _asked(names):
        library = door(name)
        rows = {each["setting"]: each for each in known if each["library"] == library.name}
        versions = sorted({each["version"] for each in rows.values()})
        measured = f"measured in {', '.join(versions)}" if versions else "not measured yet"
        print(f"{library.name} ({library.homepage}): {measured}")
        for setting in library.settings:
            mark = " (default)" if setting.default else " (recipe)" if setting.recipe else ""
            print(f"  {setting.name}{mark}: {summary(rows[setting.name]) if setting.name in rows else '–'}")
    return 0


def _asked(names: Sequence[str]) -> list[Asked]:
    """Doors and versions, each looked at before anything is done."""
    pairs = [name.partition("==") for name in dict.fromkeys(names or NAMES)]
    for name, equals, version in pairs:
        library = door(name)
        if equals and not version:
            raise UsageError(f"{name}==: no version is given; write {name}=={library.version}")
        if equals and version != NEWEST:
            exact_version(library, version)
    return [(name, version or None) for name, _, version in pairs]


def _installed(asked: Sequence[Asked]) -> Iterator[tuple[Asked, str, Installed | KltestError]]:
    """Door, version and environment, or why there is none; the next are installed while one is measured."""
    with ThreadPoolExecutor(1) as executor:
        try:
            futures = [executor.submit(_environment, *each) for each in asked]
            for each, future in zip(asked, futures, strict=True):
                yield (each, *future.result())
        finally:
            executor.shutdown(cancel_futures=True)


def _takes_long(asked: Asked) -> bool:
    """Whether a library brings what it depends on: others are measured while it is installed."""
    return not all(ALONE in call for call in door(asked[0]).installs)


def _environment(name: str, asked: str | None) -> tuple[str, Installed | KltestError]:
    library = door(name)
    version = asked or library.version
    try:
        version = exact_version(library, asked)
        _tell(f"{library.name} {version}: installing, unless it is there already")
        return version, install(library, version)
    except KltestError as error:
        return version, error


def _measured(name: str, version: str, there: Installed | KltestError, store: Store, request: Request) -> list[Row]:
    """The rows of a library, those that are in the store not measured again."""
    library = door(name)
    if isinstance(there, KltestError):
        _tell(f"{library.name} {version}: {there}")
        return [absent(library, version, str(there))]
    finished = _finished(store, library, version, request)
    arguments = [part for setting in request.settings for part in ("--setting", setting)]
    arguments += [part for setting in finished for part in ("--done", setting)]
    if request.timeout is not None:
        arguments += ["--timeout", str(request.timeout)]
    path = str(Path(name).resolve()) if name.endswith(".py") else name
    return _rows(library, version, Measuring(path, there, arguments), store, finished)


def _rows(library: Door, version: str, measuring: Measuring, store: Store, finished: Mapping[str, Row]) -> list[Row]:
    """The rows of the settings that are asked for, and one that says so if a measuring process came to grief."""
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
        _tell(f"{library.name} {version}: {error}")
        return [*(done[name] for name in names if name in done), absent(library, version, str(error))]
    return [done[name] for name in names]


def _configuration(library: Door, version: str, setting: str) -> dict[str, str]:
    return {"library": library.name, "version": version, "setting": setting}


def _finished(store: Store, library: Door, version: str, request: Request) -> dict[str, Row]:
    """The rows that need not be measured again, by setting: what could not be graded is tried once more."""
    if request.again:
        return {}
    return {
        each["setting"]: each
        for each in store.all_rows()
        if (each["library"], each["version"]) == (library.name, version) and not each["error"]
    }


def _code() -> str:
    """Changes with all that a measurement depends on, so that no result of other code is taken for one of this."""
    root = Path(kltest.__file__).parent
    sources = [*root.glob("*.py"), *(path for room in MEASURING for path in (root / room).rglob("*.py"))]
    read = [(str(path.relative_to(root)), path.read_bytes()) for path in sources if path.name not in WORDS]
    return digest(sorted((name, sha256(content).hexdigest()) for name, content in read))


def _write(rows: Sequence[Row], folder: Path) -> None:
    from kltest.scoreboard.pages import files

    for name, content in files(rows).items():
        write(folder / name, content)


def _say(rows: Sequence[Row]) -> None:
    library = ""
    for each in lines(rows):
        if each.cells["library"] != library:
            library = each.cells["library"]
            print(f"\n{library}")
        mark = " (default)" if each.default else " (recipe)" if each.recipe else ""
        print(f"  {each.setting}{mark}")
        for column in ("one step", "sequences", "off-policy", "checks", "logged KL"):
            if each.cells[column]:
                print(f"    {column + ':':12}{each.cells[column]}")
    print()


def _tell_changes(told: Sequence[str], folder: Path) -> None:
    head = "What changed since the recorded results" if told else "Nothing changed since the recorded results"
    print("\n".join(["", head + ".", *told]))
    items = [f"- {escape(one_line(each))}" for each in told]
    write(folder / "changes.md", "\n".join([f"# {head}", *([""] if items else []), *items]) + "\n")


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
