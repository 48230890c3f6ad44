"""The Python of a source tree as text: files and the cells of notebooks; nothing is imported or executed."""

import ast
import io
import json
import os
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kltest.errors import UsageError

SKIPPED = frozenset({"node_modules", "site-packages", "__pycache__", "build", "dist"})
"""Folders that hold other people's or generated code, left out unless they are named themselves."""
LARGEST = 5_000_000
"""Bytes of the largest file that is read."""


@dataclass
class Source:
    """One file that parses: its tree, its lines, and for a notebook the cell and line of each line of the text."""

    path: Path
    text: str
    tree: ast.Module
    cells: list[tuple[int, int]] = field(default_factory=list)

    def place(self, line: int) -> str:
        """Return where a line of the text stands, as FILE:LINE, or FILE:cell N:LINE for a notebook."""
        if self.cells and line <= len(self.cells):
            return f"{self.path}:cell {self.cells[line - 1][0]}:{self.cells[line - 1][1]}"
        return f"{self.path}:{line}"


def sources(paths: Iterable[Path], left_out: list[str]) -> Iterator[Source]:
    """Yield the files below the paths that parse, each once; add a line to `left_out` for each that does not.

    Raises UsageError for a path that does not exist.
    """
    for path in _files(paths, left_out):
        try:
            yield _read(path)
        except SyntaxError as error:
            left_out.append(f"{path}:{error.lineno or 1}: no Python of this version: {error.msg}")
        except OSError as error:
            left_out.append(f"{path}: {error.strerror}")
        except RecursionError:
            left_out.append(f"{path}: nested too deeply to be read")
        except (UnicodeError, LookupError, ValueError) as error:
            left_out.append(f"{path}: not readable as text: {error}")


def _files(paths: Iterable[Path], left_out: list[str]) -> Iterator[Path]:
    seen: set[str] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no file or folder {path}")
        for file in [path] if path.is_file() else _below(path, left_out):
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _below(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """Yield the files of a folder in order; a folder reached twice through symbolic links is walked once."""
    walked: set[str] = set()

    def refused(error: OSError) -> None:
        left_out.append(f"{error.filename}: {error.strerror}")

    for place, folders, files in os.walk(folder, onerror=refused, followlinks=True):
        real = os.path.realpath(place)
        if real in walked:
            folders[:] = []
            continue
        walked.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED)
        yield from (Path(place, name) for name in sorted(files) if name.endswith((".py", ".ipynb")))


def _read(path: Path) -> Source:
    content = path.read_bytes()
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    if path.suffix == ".ipynb":
        text, cells = _notebook(content)
    else:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text, cells = content.decode(encoding), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        return Source(path, text, ast.parse(text, filename=str(path)), cells)


def _notebook(content: bytes) -> tuple[str, list[tuple[int, int]]]:
    """Return the code of a notebook as one text, and the cell and line of each of its lines; magics are left out."""
    lines: list[str] = []
    cells: list[tuple[int, int]] = []
    for number, cell in enumerate(json.loads(content).get("cells", []), 1):
        if cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        text = source if isinstance(source, str) else "".join(source)
        written = ["" if line.lstrip().startswith(("%", "!", "?")) else line for line in text.splitlines()]
        try:
            ast.parse("\n".join(written))
        except SyntaxError:
            continue
        lines += written
        cells += [(number, line) for line in range(1, len(written) + 1)]
    return "\n".join(lines) + "\n", cells
