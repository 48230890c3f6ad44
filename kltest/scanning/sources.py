"""The Python of a source tree as text: files and the cells of notebooks; nothing is imported or executed."""

import ast
import io
import json
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kltest.errors import UsageError

SKIPPED = frozenset({"node_modules", "site-packages", "__pycache__", "build", "dist"})
"""Folders that hold other people's or generated code, left out unless they are named themselves."""
LARGEST = 5_000_000
"""Bytes of the largest file that is read."""
_OTHER = re.compile(r"%%(?!time$|timeit$|capture$)")
"""Magics of cells in another language."""


@dataclass
class Source:
    """One file that parses: its tree and its text; for a notebook also cell, line in it and line of the file."""

    path: Path
    text: str
    tree: ast.Module
    cells: list[tuple[int, int, int]] = field(default_factory=list)

    def place(self, line: int) -> str:
        """Return where a line of the text stands, as FILE:LINE, or FILE:cell N:LINE for a notebook."""
        if self.cells:
            cell, own, _ = self.cells[min(line, len(self.cells)) - 1]
            return f"{self.path}:cell {cell}:{own}"
        return f"{self.path}:{line}"

    def line(self, line: int) -> int:
        """Return the line of the file on which a line of the text stands."""
        return self.cells[min(line, len(self.cells)) - 1][2] if self.cells else line


def contents(
    paths: Iterable[Path], left_out: list[str], excluded: Callable[[Path], bool] = lambda path: False
) -> Iterator[tuple[Path, bytes]]:
    """Yield the Python files and notebooks below the paths, each once, as bytes; add a line to `left_out` for others.

    Raises UsageError for a path that does not exist.
    """
    seen: set[str] = set()
    for path in paths:
        for file in _files(path, left_out):
            real = os.path.realpath(file)
            if real in seen or excluded(file):
                continue
            seen.add(real)
            try:
                told = file.stat()
                if not stat.S_ISREG(told.st_mode):  # a pipe would be waited for
                    left_out.append(f"{file}: no regular file")
                elif told.st_size > LARGEST:
                    left_out.append(f"{file}: it has more than {LARGEST:,} bytes")
                else:
                    yield file, file.read_bytes()
            except OSError as error:
                left_out.append(f"{file}: {error.strerror}")


def parsed(files: Iterable[tuple[Path, bytes]], left_out: list[str]) -> Iterator[Source]:
    """Yield the files that parse; add a line to `left_out` for each that does not."""
    for path, content in files:
        try:
            yield _parsed(path, content)
        except SyntaxError as error:
            left_out.append(f"{path}:{error.lineno or 1}: no Python of this version: {error.msg}")
        except (RecursionError, MemoryError):  # the parser gives up on nesting in either way
            left_out.append(f"{path}: nested too deeply to be read")
        except json.JSONDecodeError as error:
            left_out.append(f"{path}:{error.lineno}: no notebook: {error.msg}")
        except (ValueError, LookupError) as error:
            left_out.append(f"{path}: not readable as text: {error}")


def _files(path: Path, left_out: list[str]) -> Iterator[Path]:
    if not os.path.lexists(path):
        raise UsageError(f"there is no file or folder {path}")
    if path.is_dir():
        yield from _below(path, left_out)
    elif _is_python(path.name):
        yield path
    else:
        left_out.append(f"{path}: neither Python (.py) nor a notebook (.ipynb)")


def _is_python(name: str) -> bool:
    return name.endswith((".py", ".ipynb"))


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
        yield from (Path(place, name) for name in sorted(files) if _is_python(name))


def _parsed(path: Path, content: bytes) -> Source:
    if path.suffix == ".ipynb":
        text, cells = _notebook(content.decode("utf-8-sig"))
    else:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text, cells = content.decode(encoding), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        return Source(path, text, ast.parse(text, filename=str(path)), cells)


def _notebook(written: str) -> tuple[str, list[tuple[int, int, int]]]:
    """Return the code of a notebook as one text, and cell, line in it and line of the file of each of its lines.

    Magics are left out, and so are cells that do not parse.
    """
    lines: list[str] = []
    places: list[tuple[int, int, int]] = []
    notebook = json.loads(written)
    cells = notebook.get("cells", []) if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("it is JSON, but no notebook")
    position = 0
    for number, cell in enumerate(cells, 1):
        source = cell.get("source", "") if isinstance(cell, dict) else ""
        parts = source.splitlines(keepends=True) if isinstance(source, str) else [str(part) for part in source]
        spots = []
        position = max(written.find('"source"', position), position)
        for part in parts:
            # A line of the cell is a string of the JSON, unless the whole cell is one.
            found = max(
                written.find(json.dumps(part), position), written.find(json.dumps(part, ensure_ascii=False), position)
            )
            position = max(found, position)
            spots.append(written.count("\n", 0, position) + 1)
        magic = parts[0].split()[:1] if parts else []
        if not isinstance(cell, dict) or cell.get("cell_type") != "code" or (magic and _OTHER.match(magic[0])):
            continue
        code = ["" if part.lstrip().startswith(("%", "!", "?")) else part.rstrip("\r\n") for part in parts]
        try:
            ast.parse("\n".join(code))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        lines += code
        places += [(number, line, spot) for line, spot in enumerate(spots, 1)]
    return "\n".join(lines) + "\n", places
