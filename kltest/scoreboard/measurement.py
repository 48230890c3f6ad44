"""Measure libraries, each in an environment of its own, and write the scoreboard of what was found.

A finished setting is stored at once, so that an interrupted measurement goes on from there.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from kltest.adapters import NAMES, Adapter, find
from kltest.errors import KltestError, UsageError
from kltest.files import PACKAGE, writable, write
from kltest.grading.isolated import terminated_as_interrupted
from kltest.render.markdown import escape
from kltest.render.words import one_line, time_spent
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import NEWEST, Installed, borrows, complaints, exact_version, install
from kltest.scoreboard.rows import BoardRow, absent, changes, graded, matches
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Store, digest

# Rooms that a measurement depends on.
MEASURING = (
    *("environments", "truth", "loss", "moments", "language_models", "identify", "counterexample", "checks"),
    *("adapters", "grading", "scoreboard"),
)
# Files of these rooms that only show results.
SHOWING = ("classes.py", "table.py", "pages.py", "recorded.py")
FOLDER = "results/libraries"
CHECKOUT = PACKAGE.parent
# An adapter, by its name or file, and the version to measure, None for the one of the adapter.
Requested = tuple[str, str | None]


@dataclass(frozen=True)
class Measurement:
    """A measurement to make.

    Args:
        settings: names or patterns, all if empty.
        timeout: seconds for each.
        again: repeat finished ones.
        more: packages to install beside a library.
        history: only the settings that are measured in each release.
        checkout: where git clones the library from, in place of its own address.
    """

    settings: tuple[str, ...] = ()
    timeout: float | None = None
    again: bool = False
    more: tuple[str, ...] = ()
    history: bool = False
    checkout: str | None = None


def libraries(
    names: Sequence[str] = (),
    *,
    request: Measurement = Measurement(),
    output: str | None = None,
    diff: bool = False,
    record: bool = False,
) -> int:
    """Measure the libraries (all, or those named, `NAME==VERSION`), write the scoreboard, print what was found."""
    if record:
        recorded.checked(recorded.PATH, CHECKOUT)
    wanted = requested(names)
    if request.checkout and not (len(wanted) == 1 and find(wanted[0][0]).repository):
        cloned = ", ".join(name for name in NAMES if find(name).repository)
        raise UsageError(f"--checkout is for one library that is cloned: {cloned}, or an adapter of your own")
    folder = writable(Path(output or FOLDER))
    found: dict[Requested, list[BoardRow]] = {}
    with Store(folder / "runs.jsonl", code()) as store, terminated_as_interrupted():
        try:
            # The next ones are installed while one is measured; those with dependencies, which take long, come last.
            with ThreadPoolExecutor(1) as executor:
                installed = partial(environment, request=request)
                order = sorted(wanted, key=lambda each: not borrows(find(each[0])))
                made = executor.map(installed, order)
                for each, (version, there) in zip(order, made, strict=True):
                    found[each] = measured(each[0], version, there, store, request)
        except KeyboardInterrupt:
            log(f"kltest: interrupted; what is finished is kept in {folder}: the same command goes on")
            return 130
    rows = [row for each in wanted for row in found[each]]
    failed = [each for each in rows if not each["setting"]]
    if not failed:
        check_patterns(request.settings, [each["setting"] for each in rows])
    _show(rows, [*store.all_rows(), *failed], folder)
    changed = _changed(wanted, found, request) if diff else []
    if diff:
        _print_changes(changed, folder)
    refused = {(each["library"], each["setting"]) for each in recorded.read() if each["error"]}
    if record:
        recorded.record(rows, whole=not request.settings)
    ungraded = [each for each in rows if not graded(each) and (each["library"], each["setting"]) not in refused]
    return 3 if ungraded else int(bool(changed))


def _changed(wanted: Sequence[Requested], found: Mapping[Requested, list[BoardRow]], request: Measurement) -> list[str]:
    """Differences from the record, or from release to release of a library that is measured in several."""
    found_changes = []
    for name in dict.fromkeys(name for name, _ in wanted):
        rows = [found[each] for each in wanted if each[0] == name]
        for before, after in pairwise(rows) if len(rows) > 1 else [(recorded.read(), rows[0])]:
            found_changes += changes(before, after, request.settings)
    return found_changes


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError for patterns that fit no setting."""
    missing = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in names)]
    if missing:
        raise UsageError(
            f"{' and '.join(sorted(missing))}: none of these libraries has such a setting; --list shows them"
        )


def requested(names: Sequence[str]) -> list[Requested]:
    """Adapters and versions, each checked before any work is done."""
    pairs = [name.partition("==") for name in dict.fromkeys(names or NAMES)]
    for name, equals, version in pairs:
        library = find(name)
        if equals and not version:
            raise UsageError(f"{name}==: no version is given; write {name}=={library.version}")
        if equals and version != NEWEST:
            exact_version(library, version)
    return [(name, version or None) for name, _, version in pairs]


def environment(
    each: Requested, request: Measurement, within: Path | None = None
) -> tuple[str, Installed | KltestError]:
    """Return the version and its environment, below the folder `within` if not in the cache; or the error."""
    name, wanted = each
    library = find(name)
    library = replace(library, repository=request.checkout) if request.checkout else library
    version = wanted or library.version
    try:
        version = exact_version(library, wanted)
        log(f"{library.name} {version}: installing, unless it is there already")
        return version, install(library, version, request.more, within=within)
    except KltestError as error:
        return version, error


def measured(
    name: str, version: str, there: Installed | KltestError, store: Store, request: Measurement
) -> list[BoardRow]:
    """The rows of a library, and one with the error if it failed; those in the store are not measured again."""
    library = find(name)
    names: list[str] = []
    unkept = ""
    # What could not be graded is tried once more.
    done = {
        each["setting"]: each
        for each in ([] if request.again else store.all_rows())
        if (each["library"], each["version"]) == (library.name, version) and graded(each)
    }
    try:
        if isinstance(there, KltestError):
            raise there
        options = [f"--setting={setting}" for setting in request.settings] + [f"--done={setting}" for setting in done]
        options += [] if request.timeout is None else [f"--timeout={request.timeout}"]
        options += ["--history"] if request.history else []
        path = str(Path(name).resolve()) if name.endswith(".py") else name
        answers = map(json.loads, there.lines("-m", "kltest.scoreboard.worker", path, *options))
        first = next(answers)
        if "unimportable" in first:
            raise KltestError(_unimportable(library, there, first))
        names = first["settings"]
        with Progress(f"{library.name} {version}", len(names), done=len(done.keys() & names)) as progress:
            for each in answers:
                done[each["setting"]] = each
                try:
                    store.add([({"library": library.name, "version": version, "setting": each["setting"]}, [each])])
                except KltestError as error:
                    unkept = str(error)
                progress.advance(each["setting"])  # once it is stored
        if unkept:
            raise KltestError(unkept)
    except KltestError as error:
        log(f"{library.name} {version}: {error}")
        return [*(done[name] for name in names if name in done), absent(library, version, str(error))]
    return [done[name] for name in names]


def _unimportable(library: Adapter, there: Installed, answer: BoardRow) -> str:
    """One sentence on a library that cannot be imported, with its environment and the installer's own words."""
    hint = f"; --with {answer['missing']} adds a package" if answer["missing"] else "; --with PACKAGE adds a package"
    words = "" if borrows(library) else complaints(there)
    return (
        f"{library.distribution} cannot be imported in {there.python.parents[1]}: {answer['unimportable']}"
        f"{f' ({words})' if words else ''}{hint}"
    )


def code() -> str:
    """A digest of all code that a measurement depends on, so that results of other code are not reused."""
    root = PACKAGE
    sources = [*root.glob("*.py"), *(path for room in MEASURING for path in (root / room).rglob("*.py"))]
    read = [(str(path.relative_to(root)), path.read_bytes()) for path in sources if path.name not in SHOWING]
    return digest(sorted((name, sha256(content).hexdigest()) for name, content in read))


def _show(rows: Sequence[BoardRow], stored: Sequence[BoardRow], folder: Path) -> None:
    """Print the rows that were measured, and write the scoreboard of all rows in the store."""
    from kltest.scoreboard.pages import files
    from kltest.scoreboard.table import COLUMNS, frame

    for title, group in frame(rows, programs=False).groupby("title", sort=False):
        print(f"\n{title}")
        for line in group.to_dict("records"):
            print(f"  {line['setting']}" + (f" ({line['mark']})" if line["mark"] else ""))
            for column in ("one_step", "sequences", "off_policy", "checks", "logged"):
                if line[column]:
                    print(f"    {COLUMNS[column] + ':':12}{line[column]}")
            row = line["row"]
            spent = time_spent(*(row.get(name, 0) for name in ("seconds", "calling", "calls")))
            for name, words in (("unfinished", row.get("unfinished")), ("time", spent)):
                if words:
                    print(f"    {name + ':':12}{words}")
    for name, content in files(stored).items():
        write(folder / name, content)
    print(f"\nThe scoreboard is in {folder}: libraries.md, libraries.html and the standalone programs in programs.")


def _print_changes(changed: Sequence[str], folder: Path) -> None:
    head = "What changed" if changed else "Nothing changed"
    print("\n".join(["", head + ".", *changed]))
    items = [f"- {escape(one_line(each))}" for each in changed]
    write(folder / "changes.md", "\n".join([f"# {head}", *([""] if items else []), *items]) + "\n")


def log(words: str) -> None:
    """Print words on standard error at once."""
    print(words, file=sys.stderr, flush=True)
