"""Measure libraries, each in an environment of its own, and write the scoreboard of what was found.

A finished setting is stored at once, so that an interrupted measurement goes on from there.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from kltest.adapters import NAMES, find
from kltest.errors import INTERRUPTED, KltestError, UsageError
from kltest.files import PACKAGE, contents, writable, write
from kltest.grading.isolated import terminated_as_interrupted
from kltest.render.markdown import escape
from kltest.render.tables import wrap
from kltest.render.words import one_line, time_spent
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import NEWEST, exact_version, install
from kltest.scoreboard.rows import BoardRow, absent, changes, graded, matches, part_of
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Store, digest

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
        part: the part of each loss, "kl" or "policy".
        checkout: where git clones the library from, in place of its own address.
    """

    settings: tuple[str, ...] = ()
    timeout: float | None = None
    again: bool = False
    more: tuple[str, ...] = ()
    history: bool = False
    checkout: str | None = None
    part: str = "kl"


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
        check_checkout()
    wanted = requested(names, request.part)
    if request.checkout and not (len(wanted) == 1 and find(wanted[0][0]).repository):
        cloned = ", ".join(name for name in NAMES if find(name).repository)
        raise UsageError(f"--checkout is for one library that is cloned: {cloned}, or an adapter of your own")
    folder = writable(Path(output or FOLDER))
    found: dict[Requested, list[BoardRow]] = {}
    with Store(folder / "runs.jsonl", code()) as store, terminated_as_interrupted():
        try:
            for each in wanted:
                found[each] = measured(each, store, request)
        except KeyboardInterrupt:
            log(f"kltest: interrupted; what is finished is stored in {folder}; run the same command to continue")
            return INTERRUPTED
    rows = [row for each in wanted for row in found[each]]
    failed = [each for each in rows if not each["setting"]]
    if not failed:
        check_patterns(request.settings, [each["setting"] for each in rows])
    _show(rows, [*store.all_rows(), *failed], folder)
    known = recorded.read(parts=[request.part])
    changed = _changed(wanted, found, known, request.settings, folder) if diff else []
    refused = {(each["library"], each["setting"]) for each in known if each["error"]}
    if record:
        recorded.record(rows, whole=not request.settings)
    ungraded = [each for each in rows if not graded(each) and (each["library"], each["setting"]) not in refused]
    return 3 if ungraded else int(bool(changed))


def _changed(
    wanted: Sequence[Requested],
    found: Mapping[Requested, list[BoardRow]],
    known: Sequence[BoardRow],
    settings: Sequence[str],
    folder: Path,
) -> list[str]:
    """Print and write differences from the record, or between the releases of a library that is measured in several."""
    changed = []
    for name in dict.fromkeys(name for name, _ in wanted):
        rows = [found[each] for each in wanted if each[0] == name]
        for before, after in pairwise(rows) if len(rows) > 1 else [(known, rows[0])]:
            changed += changes(before, after, settings)
    head = "What changed" if changed else "Nothing changed"
    print("\n".join(["", head + ".", *changed]))
    items = "".join(f"- {escape(one_line(each))}\n" for each in changed)
    write(folder / "changes.md", f"# {head}\n" + ("\n" + items if items else ""))
    return changed


def check_checkout() -> None:
    """Raise UsageError if kltest does not run in a checkout, whose record can be replaced."""
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise UsageError(
            f"--record replaces a file of a checkout, and {CHECKOUT} is none; run it in one, installed by -e"
        )


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError for patterns that fit no setting."""
    missing = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in names)]
    if missing:
        raise UsageError(
            f"{' and '.join(sorted(missing))}: none of these libraries has such a setting; --list shows them"
        )


def requested(names: Sequence[str], part: str = "kl") -> list[Requested]:
    """Adapters and versions, each checked before any work is done; without names, those that can grade this part."""
    able = [name for name in NAMES if any(setting.has_row(part) for setting in find(name).settings)]
    pairs = [name.partition("==") for name in dict.fromkeys(names or able)]
    for name, equals, version in pairs:
        library = find(name)
        if not any(setting.has_row(part) for setting in library.settings):
            raise UsageError(
                f"--part {part} needs settings that score rewards: {', '.join(able)} have some, {name} none"
            )
        if equals and not version:
            raise UsageError(f"{name}==: no version is given; write {name}=={library.version}")
        if equals and version != NEWEST:
            exact_version(library, version)
    return [(name, version or None) for name, _, version in pairs]


def measured(each: Requested, store: Store, request: Measurement, within: Path | None = None) -> list[BoardRow]:
    """Install a library, below the folder `within` if not in the cache, and return its rows.

    Those in the store are not measured again. If the library failed, the last row has the error.
    """
    name, wanted = each
    library = find(name)
    library = replace(library, repository=request.checkout or library.repository)
    version, names, unkept = wanted or library.version, [], ""
    done: dict[str, BoardRow] = {}
    try:
        version = exact_version(library, wanted)
        log(f"{library.name} {version}: installing, unless it is there already")
        there = install(library, version, request.more, within=within)
        # Settings that could not be graded are tried once more.
        stored = [] if request.again else store.all_rows()
        asked_for = (library.name, version, request.part)
        here = [row for row in stored if (row["library"], row["version"], part_of(row)) == asked_for]
        done = {row["setting"]: row for row in here if graded(row)}
        path = str(Path(name).resolve()) if name.endswith(".py") else name
        work = {name: getattr(request, name) for name in ("part", "settings", "timeout", "history")}
        asked = json.dumps({"library": path, **work, "done": list(done)})
        answers = map(json.loads, there.lines("-m", "kltest.scoreboard.worker", asked))
        first = next(answers)
        if "unimportable" in first:
            raise KltestError(
                f"{library.distribution} cannot be imported in {there.python.parents[1]}: {first['unimportable']}; "
                f"--with {first['missing'] or 'PACKAGE'} adds a package"
            )
        names = first["settings"]
        with Progress(f"{library.name} {version}", len(names), done=len(done.keys() & names)) as progress:
            for row in answers:
                done[row["setting"]] = row
                try:
                    names_of_row = {"library": library.name, "version": version, "setting": row["setting"]}
                    store.add([({**names_of_row, "part": request.part}, [row])])
                except KltestError as error:
                    unkept = str(error)
                progress.advance(row["setting"])  # once it is stored
        if unkept:
            raise KltestError(unkept)
    except KltestError as error:
        log(f"{library.name} {version}: {error}")
        return [*(done[name] for name in names if name in done), absent(library, version, str(error))]
    return [done[name] for name in names]


def code() -> str:
    """A digest of kltest's own code, so that results of other code are not reused."""
    return digest([each for each in contents(PACKAGE) if each[0].endswith(".py")])


def _show(rows: Sequence[BoardRow], stored: Sequence[BoardRow], folder: Path) -> None:
    """Print the rows that were measured, and write the scoreboard of all rows in the store."""
    from kltest.scoreboard.pages import files
    from kltest.scoreboard.table import COLUMNS, frame, right

    for title, group in frame(rows, programs=False).groupby("title", sort=False):
        print(f"\n{title}", *wrap(right(group), indent="  "), sep="\n")
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


def log(words: str) -> None:
    """Print words on standard error at once."""
    print(words, file=sys.stderr, flush=True)
