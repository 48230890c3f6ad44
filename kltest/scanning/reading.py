"""Functions that cannot be called, read instead: their KL terms as the scan finds them, a job of grading each."""

import ast
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kltest.errors import UsageError
from kltest.files import relative
from kltest.grading.grader import grade
from kltest.grading.jobs import Job
from kltest.loss.importing import source_of
from kltest.loss.target import named
from kltest.render.screen import followed
from kltest.report import WORST_FIRST, Report, Variant
from kltest.scanning.entries import option, places_in
from kltest.scanning.judge import NORMALISED, options
from kltest.scanning.rows import NAME, Row
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store
from kltest.symbolic.values import walked

# The program of a function that computes with numbers, and how it is told that it was called so.
NUMBERS = """from kltest.loss.numbers import of_numbers

{name} = of_numbers({target!r})
"""
OF_NUMBERS = (
    "called with one rollout at a time, as numbers by what its objects' entries are called. Nothing flows through "
    "numbers: if what it returns is subtracted from rewards or advantages, --placement reward says so, with --credit"
)
# What only a call shows: what it writes into, keeps, does in a backward pass of its own, and logs.
NOT_READ = ("KL505", "KL507", "KL511", "KL6")
# Modules of the same checkout that are read with a file, at most: its callers, and what it and they import.
MOST, CALLERS = 40, 8
# Files by which the folder of a checkout is known.
MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


def read(job: Job, folder: Path, why: str = "") -> list[Job]:
    """Return a job for each variant of the KL terms that a function computes, or puts into its loss.

    The variants that decide come first: the default ones, and those that a call site uses. Where nothing says which is
    the default, all of them decide. A job of each of the others says in `beside` why it does not.

    Args:
        job: of a function of a file or a module.
        folder: where the programs that are graded are written.
        why: why it is not called, for the report.

    Raises:
        UsageError: it has no file, or no term of it was found that can be graded.
    """
    loss = named(job.target)
    path, name = loss.path or (source_of(loss.module) if loss.module else None), loss.names
    if path is None:
        raise UsageError(f"{job.name}: only a function of a file can be read")
    reader = _Reader(path, name)
    rows = reader.rows()
    found = [row for row in rows if not row.why]
    if not found:
        reason = rows[0].why if rows else "no KL term was found in it"
        if why and not rows and reader.is_of_numbers():
            program = folder / f"numbers_{sum(1 for _ in folder.iterdir())}.py"
            program.write_text(NUMBERS.format(name=NAME, target=f"{path}:{name}"), encoding="utf-8")
            return [replace(job, target=f"{program}:{NAME}", fix=False, read=OF_NUMBERS)]
        raise UsageError(f"{job.name} cannot be read from its source either: {reason}")
    told = [(row, *reader.told(row, rows)) for row in found]
    told.sort(key=lambda one: bool(one[1]))
    return list(_jobs(job, told, folder, why))


def instead(job: Job, report: Report, folder: Path) -> list[Job]:
    """Return what is graded of a loss that could not be called; nothing if it has arguments, or is not there.

    Raises:
        UsageError: it cannot be read either.
    """
    if not report.error or job.given.get("arguments") or not is_defined(job.target):
        return []
    return read(job, folder, "--call says why")


def folded(reports: Iterable[Report]) -> list[Report]:
    """Return the reports of what decides, and with each the variants behind it that decide nothing."""
    found: list[Report] = []
    for report in reports:
        if not report.beside:
            found.append(report)
        elif found:
            follows = report.error.partition("\n")[0] or followed(report)
            variant = Variant(report.target, report.verdict, follows, report.beside)
            found[-1] = replace(found[-1], variants=[*found[-1].variants, variant])
    return found


def graded(target: str, name: str, given: Mapping[str, Any], why: str) -> Report | None:
    """Grade a function from its source in this process, as `kltest.grading.readers.READERS` say.

    Of several variants that decide, the report is that of the worst, with the others among its variants.
    """
    if why and not is_defined(target):
        return None
    with tempfile.TemporaryDirectory(prefix="kltest-read-") as folder:
        reports = []
        for job in read(Job(name, target, given), Path(folder), why):
            report = grade(job.target, name=job.name, call=True, **job.given)
            reports.append(replace(report, read=job.read, filled={}, source=None, beside=job.beside))
    worst, *others = sorted(folded(reports), key=lambda one: WORST_FIRST.index(one.verdict))
    more = [Variant(one.target, one.verdict, followed(one), "") for one in others]
    return replace(worst, variants=[*more, *(each for one in (worst, *others) for each in one.variants)])


def is_defined(target: str) -> bool:
    """Return True for a function or method that stands in a file."""
    loss = named(target)
    path = loss.path or (source_of(loss.module) if loss.module else None)
    return path is not None and loss.names in {place.title for place in places_in(_tree(path))}


def _jobs(job: Job, told: Sequence[tuple[Row, str, str]], folder: Path, why: str) -> Iterator[Job]:
    before = sum(1 for _ in folder.iterdir())
    for number, (row, beside, which) in enumerate(told, before):
        program = folder / f"read_{number}.py"
        program.write_text(row.source, encoding="utf-8")
        ignored = [*job.given.get("ignore", ()), *NORMALISED["ignore"], *NOT_READ]
        given = {name: value for name, value in job.given.items() if name != "arguments"}
        given = {**options(row.place), **given, "ignore": tuple(ignored)}
        name = f"{job.name} [{row.variant}]" if row.variant else job.name
        read = f"from its source, not called{why and f' ({why})'}: {row.formula} ({row.spot}){which and f'; {which}'}"
        yield replace(job, name=name, target=f"{program}:{NAME}", given=given, fix=False, read=read, beside=beside)


class _Reader:
    """Reads one function of a file, with its callers and the modules that it and they import."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._known: dict[Path, dict[str, set[str]]] = {}

    def rows(self) -> list[Row]:
        """Return the terms that the function computes or puts into its loss; else those of functions that it calls."""
        callers = list(_callers(self.path, self.name.partition(".")[0]))
        files = {self.path: self.path.read_bytes()} | dict(callers)
        waiting = list(files)
        for one in waiting:  # it grows
            new = [each for each in dict.fromkeys(_imported(one, files[one])) if each not in files]
            new = new[: max(MOST - len(files), 0)]
            files |= {each: each.read_bytes() for each in new}
            waiting += new
        files |= dict(_defining(self.path, files))
        search = Search(
            list(files.items()),
            Store(None),
            entered=[self.path, *(one for one, _ in callers)],
            asked=self.name.rpartition(".")[2],
        )
        every = [row for row in search if row.place != "logged"]
        own = [row for row in every if self._computes(row) or any(map(self._is_own, row.used))]
        reached = self._reached(self.path, self.name.rpartition(".")[2])
        return own or [row for row in every if self._is_here(row) and row.function.rpartition(".")[2] in reached]

    def is_of_numbers(self) -> bool:
        """Return True for a function that computes with numbers of Python, or speaks of one of its file that does."""
        functions = [one for one in ast.walk(_tree(self.path)) if isinstance(one, ast.FunctionDef)]
        spoken = {one.name: {each.id for each in ast.walk(one) if isinstance(each, ast.Name)} for one in functions}
        return "float" in _closed(spoken, self.name)

    def told(self, row: Row, rows: Sequence[Row]) -> tuple[str, str]:
        """Return why a variant of a term decides nothing, and what is said of one that does decide.

        Args:
            row: the variant.
            rows: all variants of all terms.
        """
        term = [one for one in rows if (one.file, one.spot) == (row.file, row.spot)]
        uses = {use: self._against(row, use, term) for use in row.against}
        own = [against for use, (against, _) in uses.items() if self._is_own(use)]
        mine = min(own or [against for against, _ in uses.values()], key=len, default=[])
        sites = [use for use, found in uses.items() if not any(found) and self._is_call_site(use, row)]
        others = [one for one in term if one is not row and self._may_be_default(one, term)]
        if (mine or not own) and sites:
            return "", f"used by {sites[0].replace(f'{self.path.parent}/', '')}"
        if excluded := self._excluded(row, rows):
            return ", ".join(excluded), ""
        if len(term) == 1:
            return "", ""
        if mine and others:
            return ", ".join(mine), ""
        if mine or len(others) + 1 == len(term):
            return "", "nothing says which variant is the default: each decides"
        return "", "the default" if not others else "as far as it is known, the default"

    def _excluded(self, row: Row, rows: Sequence[Row]) -> Sequence[str]:
        """Return the options that are others by default, where the function computes other lines instead by default."""
        mine = min((against[0] for use, against in row.against.items() if self._is_own(use)), key=len, default=())
        for one in rows if mine else ():
            chosen = any(one.choices.get(name, words) != words for name, words in row.choices.items())
            own = [against[0] for use, against in one.against.items() if self._is_own(use)]
            if chosen and not one.why and one.place == row.place and own and not any(own):
                return mine
        return ()

    def _may_be_default(self, row: Row, term: Sequence[Row]) -> bool:
        """Return True for a variant that can be graded, and that no known default excludes where it is defined."""
        own = [use for use in row.against if self._is_own(use)] or list(row.against)
        return not row.why and any(not self._against(row, use, term)[0] for use in own)

    def _against(self, row: Row, use: str, term: Sequence[Row]) -> list[list[str]]:
        """Return the options of a variant whose default is another at a use, and those without a known default.

        What holds of all variants of the term says nothing.
        """
        there = [one.against[use] for one in term if use in one.against]
        return [
            [words for words in row.against[use][at] if any(words not in one[at] for one in there)] for at in (0, 1)
        ]

    def _computes(self, row: Row) -> bool:
        return row.function == self.name and self._is_here(row)

    def _is_here(self, row: Row) -> bool:
        return Path(row.file).resolve() == self.path

    def _is_own(self, use: str) -> bool:
        """Return True for a use by the function itself."""
        return use.startswith((f"{self.name}, {self.path}:", f"{self.name}, {relative(self.path, Path.cwd())}:"))

    def _is_call_site(self, use: str, row: Row) -> bool:
        """Return True for a use by another function: of a term that the function holds, or by way of the function."""
        if self._is_own(use):
            return False
        title, _, place = use.rpartition(", ")
        reached = self._reached(Path(place.rpartition(":")[0]), title.rpartition(".")[2])
        return self._computes(row) or self.name.rpartition(".")[2] in reached

    def _reached(self, path: Path, name: str) -> set[str]:
        """Return the names that a function of a file calls, directly or through others of its file, and its own."""
        if path not in self._known:
            self._known[path] = _calls(path)
        return _closed(self._known[path], name)


def _closed(known: Mapping[str, Collection[str]], name: str) -> set[str]:
    """Return a name, and all names that it leads to."""
    return set(walked([name], lambda one: known.get(one, ())))


def _tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it cannot be read."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _calls(path: Path) -> dict[str, set[str]]:
    """Return the names that each function of a file calls; nothing of one that cannot be read."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
            names = {getattr(one, "attr", getattr(one, "id", "")) for one in called}
            found.setdefault(node.name, set()).update(names)
    return found


def _checkout(path: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of the checkout that a file is in."""
    root = next((one for one in path.parents if any((one / mark).exists() for mark in MARKS)), None)
    return contents([root] if root else sorted(path.parent.glob("*.py")), [])


def _defining(path: Path, files: Mapping[Path, bytes]) -> Iterator[tuple[Path, bytes]]:
    """Yield files of the same checkout that define options which a file reads and no file here does, the nearest."""
    wanted = _read_options(_tree(path)) - {name for one in files for name in _options(_tree(one))}
    spellings = {
        name: [form.encode() for form in (f"--{name}", f"--{name.replace('_', '-')}", f"{name}:")] for name in wanted
    }
    found: dict[str, tuple[Path, bytes]] = {}
    for file, content in _checkout(path) if wanted else ():
        near = [name for name in wanted if any(form in content for form in spellings[name])]
        for name in _options(_tree(file)).intersection(near) if near and not _is_test(file) else ():
            if name not in found or _shared(file, path) > _shared(found[name][0], path):
                found[name] = file.resolve(), content
    yield from dict(found.values()).items()


def _read_options(tree: ast.Module) -> set[str]:
    """Return the attributes that a file reads of what it does not import, and does not call."""
    nodes = list(ast.walk(tree))
    called = {one.func for one in nodes if isinstance(one, ast.Call)}
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for one in nodes
        if isinstance(one, ast.Import | ast.ImportFrom)
        for alias in one.names
    }
    read = [one for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)]
    return {one.attr for one in read if one not in called and getattr(one.value, "id", "") not in imported}


def _options(tree: ast.Module) -> set[str]:
    """Return the options for which a file has a constant for a default."""
    found = map(option, ast.walk(tree))
    return {name for name, default in found if isinstance(default, ast.Constant) and default.value is not None}


def _shared(one: Path, other: Path) -> int:
    """Count the folders that two files have in common."""
    return len(Path(os.path.commonpath([one.resolve(), other])).parts)


def _callers(path: Path, name: str) -> Iterator[tuple[Path, bytes]]:
    """Yield files of the same checkout that speak of a function or class by its name."""
    number = 0
    for file, content in _checkout(path):
        if name.encode() in content and file.suffix == ".py" and file.resolve() != path and not _is_test(file):
            yield file.resolve(), content
            number += 1
        if number == CALLERS:
            return


def _is_test(file: Path) -> bool:
    return file.name.startswith("test_") or "tests" in file.parts


def _imported(path: Path, content: bytes) -> Iterator[Path]:
    """Yield the files of its checkout that a file imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        roots = [path.parents[level - 1]] if 0 < level <= len(path.parents) else list(path.parents)[:6]
        for name, root in ((name, root) for name in names if name for root in roots):
            module = root.joinpath(*name.split("."))
            yield from (one for one in (module.with_suffix(".py"), module / "__init__.py") if one.is_file())
