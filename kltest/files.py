"""Files that are either the old or the new version, never half of one, with the same bytes for the same content."""

import ast
import csv
import fcntl
import io
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from glob import escape
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from shutil import copymode
from typing import IO, Any, BinaryIO

from kltest.errors import KltestError, UsageError

PACKAGE = Path(__file__).parent
"""The folder of kltest's own code."""


def writable(folder: Path) -> Path:
    """The folder, made if need be; UsageError if nothing can be written there. Asked before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to the output folder {folder}: {error.strerror}. Give another one with --output"
        ) from error
    return folder


@contextmanager
def held(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Keep others out of a folder: all of them, or with `shared` those that would have it alone.

    The lock belongs to the process and ends with it, however it ends; the empty file that stays behind holds nothing.

    Raises:
        UsageError: another process holds the folder.
    """
    with (folder / ".lock").open("a") as file:
        lock(file, folder, shared=shared)
        yield


def lock(file: IO[Any], folder: Path, *, shared: bool = False) -> None:
    """Lock an open file until it is closed; UsageError, naming a folder, if another process has it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        raise UsageError(
            f"another kltest is writing to {folder}; wait for it to end, or give another --output"
        ) from error


def relative(path: Path, root: Path) -> str:
    """Return a path from the root, as it is if it lies elsewhere."""
    resolved = path.resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path.as_posix()


def cache_folder(variable: str, name: str) -> Path:
    """Return the folder that an environment variable names, else one of that name in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(variable) or Path(cache) / "kltest" / name)


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each file below a folder with a digest of its content, in order; no caches, and nothing hidden by a dot."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and "__pycache__" not in parts and not any(part.startswith(".") for part in parts):
            yield "/".join(parts), sha256(path.read_bytes()).hexdigest()


@cache
def installation() -> str:
    """Return a digest of kltest's own files, of the version of every installed package, of Python and of the machine.

    What was computed under one digest is not taken for a result under another.
    """
    versions = sorted((each.name, each.version) for each in metadata.distributions())
    own = list(contents(Path(__file__).parent))
    return sha256(repr((own, versions, sys.version, platform.machine())).encode()).hexdigest()


def write(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> Path:
    """Replace a file's content in one step, and remove what killed processes left of earlier attempts.

    `content` may be a function that writes it to a file, for what is too large to be in memory twice.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{escape(path.name)}.*"):
            if left.suffix[1:].isdigit() and not _alive(int(left.suffix[1:])):
                left.unlink(missing_ok=True)
        with temporary.open("wb") as file:
            data(file) if callable(data) else file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            copymode(path, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        # torch.save wraps what the file raises.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise KltestError(f"cannot write {path}: {cause.strerror}") from error
    finally:
        with suppress(NotADirectoryError):
            temporary.unlink(missing_ok=True)
    return path


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # another user's process is alive
        return not isinstance(error, ProcessLookupError)
    return True


@lru_cache
def template(path: Path) -> Any:
    """Return a Jinja2 template for text that is not escaped, as a program; it may include others of its folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(path.parent)
    plain = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return plain.get_template(path.name)


def literal(text: str, kinds: Any = object) -> Any:
    """Return the value of Python that a text writes down if it is of one of the `kinds`, else the text itself."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, kinds) else text


def mapped(value: Any, change: Callable[[Any], Any], without: Sequence[str] = ()) -> Any:
    """Return plain data with every value in it changed, lists for tuples, `without` these keys at any depth."""
    if isinstance(value, Mapping):
        return {name: mapped(item, change, without) for name, item in value.items() if name not in without}
    if isinstance(value, list | tuple):
        return [mapped(item, change, without) for item in value]
    return change(value)


def finite(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are None."""
    return mapped(value, lambda one: None if isinstance(one, float) and not math.isfinite(one) else one)


def as_json(value: Any) -> str:
    """Indented, keys in their own order, no NaN."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row under a header; dictionaries become JSON, None is empty, numbers keep all their digits."""
    file = io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: _cell(value) for column, value in row.items()} for row in rows)
    return file.getvalue()


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for people; nothing for no rows."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_escaped(row.get(column, "")) for column in columns] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _escaped(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
