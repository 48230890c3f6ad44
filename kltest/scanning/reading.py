"""Functions that cannot be called, read instead: their KL terms as the scan finds them, a job of grading each."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kltest.errors import UsageError
from kltest.grading.jobs import Job
from kltest.loss.importing import source_of
from kltest.loss.target import named
from kltest.scanning.judge import NORMALISED, options
from kltest.scanning.rows import NAME, Row
from kltest.scanning.search import Search
from kltest.scanning.store import Store

# Modules of the same checkout that a file imports, which are read with it, at most.
MOST = 40


def read(job: Job, folder: Path, why: str = "") -> list[Job]:
    """Return a job for each variant of the KL terms that a function computes, or puts into its loss.

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
    every = [row for row in Search(list(_files(path)), Store(None)) if row.place != "logged"]
    rows = [row for row in every if _is_of(row, name, path)] or list(_called(every, name, path))
    open_ = [row for row in rows if row.why]
    found = [row for row in rows if not row.why]
    if not found:
        reason = open_[0].why if open_ else "no KL term was found in it"
        raise UsageError(f"{job.name} cannot be read from its source either: {reason}")
    return list(_jobs(job, found, folder, why))


def _jobs(job: Job, rows: list[Row], folder: Path, why: str) -> Iterator[Job]:
    before = sum(1 for _ in folder.iterdir())
    for number, row in enumerate(rows, before):
        program = folder / f"read_{number}.py"
        program.write_text(row.source, encoding="utf-8")
        ignored = [*job.given.get("ignore", ()), *NORMALISED["ignore"]]
        given = {name: value for name, value in job.given.items() if name != "arguments"}
        given = {**options(row.place), "sampler": "current" if row.fresh else "both", **given, "ignore": tuple(ignored)}
        name = f"{job.name} [{row.variant}]" if row.variant else job.name
        read = f"from its source, not called{why and f' ({why})'}: {row.formula} ({row.spot})"
        yield replace(job, name=name, target=f"{program}:{NAME}", given=given, fix=False, read=read)


def _is_of(row: Row, name: str, path: Path) -> bool:
    """Return True for a term that a function computes, or that it puts into its loss."""
    own = row.function == name and Path(row.file).resolve() == path.resolve()
    return own or any(use.startswith((f"{name}, {path.resolve()}", f"{name}, {path}")) for use in row.used)


def _called(rows: Sequence[Row], name: str, path: Path) -> Iterator[Row]:
    """Yield the terms of those functions of the same file that a function calls, directly or through others."""
    calls: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
            names = {getattr(one, "attr", getattr(one, "id", "")) for one in called}
            calls.setdefault(node.name, set()).update(names)
    reached, left = set(), [name.rpartition(".")[2]]
    while left:
        one = left.pop()
        if one in calls and one not in reached:
            reached.add(one)
            left += calls[one]
    for row in rows:
        if row.function.rpartition(".")[2] in reached and Path(row.file).resolve() == path.resolve():
            yield row


def _files(path: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield a file, and those of its checkout that it imports."""
    content = path.read_bytes()
    yield path, content
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    found: dict[Path, None] = {}
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
            found |= dict.fromkeys(one for one in (module.with_suffix(".py"), module / "__init__.py") if one.is_file())
    for one in list(found)[:MOST]:
        if one.resolve() != path.resolve():
            yield one, one.read_bytes()
