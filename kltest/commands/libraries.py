"""`kltest libraries`: install real libraries, each in an environment of its own, and grade all their settings there.

0: everything was measured; 1: with --diff, something is not as recorded; 3: a library could not be installed or took
its process down (the others were measured, and it has a row that says so); 130: interrupted, what is finished is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import kltest
from kltest.errors import KltestError, UsageError
from kltest.libraries import NAMES, door, recorded
from kltest.libraries.door import Door
from kltest.libraries.installation import Installed, exact_version, install
from kltest.libraries.rows import Row, absent, changes, summary
from kltest.libraries.scoreboard import lines
from kltest.reproduce.files import writable, write
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Failure, Store, digest

INTERRUPTED = 130
FOLDER = "results/libraries"


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
    rows: list[Row] = []
    failed = False
    with Store(folder / "runs.jsonl", _code()) as store:
        try:
            for library, version in asked:
                found = _measured(library, version, store, request)
                failed |= any(not each["setting"] for each in found)
                rows += found
        except KeyboardInterrupt:
            print(
                f"kltest: interrupted; what is finished is kept in {folder}: the same command goes on", file=sys.stderr
            )
            return INTERRUPTED
    _write(rows, folder)
    _say(rows)
    print(f"The scoreboard is in {folder}: libraries.md, libraries.html and the programs in reproductions.")
    told = changes(recorded.read(), rows) if diff else []
    if diff:
        print("\n".join(["", "since what is recorded:", *told] if told else ["", "nothing changed since recorded"]))
    if record:
        recorded.record(rows)
    return 3 if failed else int(bool(told))


def listing(names: Sequence[str] = ()) -> int:
    """What is known without installing anything: the settings of each door, and what was last recorded of them."""
    known = recorded.read()
    for library, _ in _asked(names):
        rows = {each["setting"]: each for each in known if each["library"] == library.name}
        versions = sorted({each["version"] for each in rows.values()})
        measured = f"measured in {', '.join(versions)}" if versions else "not measured yet"
        print(f"{library.name} ({library.homepage}): {measured}")
        for setting in library.settings:
            mark = " (default)" if setting.default else " (recipe)" if setting.recipe else ""
            print(f"  {setting.name}{mark}: {summary(rows[setting.name]) if setting.name in rows else '–'}")
    return 0


def _asked(names: Sequence[str]) -> list[tuple[Door, str | None]]:
    pairs = [name.partition("==") for name in names or NAMES]
    for name, equals, version in pairs:
        if equals and not version:
            raise UsageError(f"{name}==: no version is given; write {name}=={door(name).version}")
    return [(door(name), version or None) for name, _, version in dict.fromkeys(pairs)]


def _measured(library: Door, asked: str | None, store: Store, request: Request) -> list[Row]:
    """The rows of a library, those that are in the store not measured again."""
    version = asked or library.version
    try:
        version = exact_version(library, asked)
        _tell(f"{library.name} {version}: installing, unless it is there already")
        installed = install(library, version)
        return list(_rows(library, version, installed, store, request))
    except UsageError:
        raise
    except KltestError as error:
        _tell(f"{library.name} {version}: {error}")
        return [absent(library, version, str(error))]


def _rows(library: Door, version: str, installed: Installed, store: Store, request: Request) -> Iterator[Row]:
    answers = _answers(library, version, installed, store, request)
    names = next(answers)["settings"]
    if missing := sorted(set(request.settings) - set(names)):
        raise UsageError(f"{library.name} {version} has no setting {missing[0]!r}; it has {', '.join(names)}")
    done = {name: result for name in names if (result := _kept(store, library, version, name, request)) is not None}
    with Progress(f"{library.name} {version}", len(names), done=len(done)) as progress:
        for each in answers:
            configuration = _configuration(library, version, each["setting"])
            store.add([(configuration, [each])])
            done[each["setting"]] = each
            progress.advance(each["setting"])
    yield from (done[name] for name in names)


def _answers(
    library: Door, version: str, installed: Installed, store: Store, request: Request
) -> Iterator[dict[str, Any]]:
    """What the measuring process says, line by line; KltestError if it ends before its time."""
    command = installed.command("-m", "kltest.libraries.measure", library.name)
    for name in request.settings:
        command += ["--setting", name]
    for name in _finished(store, library, version, request):
        command += ["--done", name]
    if request.timeout is not None:
        command += ["--timeout", str(request.timeout)]
    log = installed.scratch / "measure.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=installed.scratch,
            env=installed.environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise KltestError(f"measuring ended with exit code {code}: {last} (all of it: {log})")


def _configuration(library: Door, version: str, setting: str) -> dict[str, str]:
    return {"library": library.name, "version": version, "setting": setting}


def _kept(store: Store, library: Door, version: str, setting: str, request: Request) -> Row | None:
    if request.again:
        return None
    result = store.result(_configuration(library, version, setting))
    return None if result is None or isinstance(result, Failure) or result[0]["error"] else result[0]


def _finished(store: Store, library: Door, version: str, request: Request) -> list[str]:
    """The settings that need not be measured again: what could not be graded is tried once more."""
    names = [
        each["setting"] for each in store.all_rows() if (each["library"], each["version"]) == (library.name, version)
    ]
    return [name for name in dict.fromkeys(names) if _kept(store, library, version, name, request) is not None]


def _code() -> str:
    """Changes with any line of kltest, so that no result of other code is taken for one of this."""
    root = Path(kltest.__file__).parent
    return digest(
        sorted((str(path.relative_to(root)), sha256(path.read_bytes()).hexdigest()) for path in root.rglob("*.py"))
    )


def _write(rows: Sequence[Row], folder: Path) -> None:
    from kltest.libraries import markdown, page

    write(folder / "libraries.md", markdown.render(rows))
    write(folder / "libraries.html", page.render(rows))
    for each in lines(rows):
        if each.program:
            write(folder / "reproductions" / each.program, each.row["program"])


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


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
