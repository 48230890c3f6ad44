"""Find the line at which a loss failed: the user's own frame, not torch's or ours."""

from __future__ import annotations

import linecache
import os
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy
import torch

from kltest.errors import TargetError

_LONGEST_TEXT = 2000
_FOREIGN = tuple(str(Path(str(file)).resolve().parent) + os.sep for file in (torch.__file__, numpy.__file__, __file__))
_CALLS = str(Path(__file__).resolve().parents[1] / "adapters") + os.sep
"""Calls of libraries are nobody's own code: what they raise is a sentence that needs no line."""
_STDLIB = tuple(str(Path(sysconfig.get_path(kind)).resolve()) + os.sep for kind in ("stdlib", "platstdlib"))
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Frame:
    """A line of somebody's code and the exception that passed through it."""

    file: str
    line: int
    function: str
    source: str
    exception: str

    def __str__(self) -> str:
        exception = textwrap.indent(self.exception, "  ", lambda line: True)
        return f"  {self.file}:{self.line}, in {self.function}\n    {self.source}\n{exception}"


class FailedError(TargetError):
    """A loss whose own code failed; `frame` is the innermost line of that code, None if there is none to show."""

    def __init__(self, message: str, frame: Frame | None = None) -> None:
        super().__init__(f"{message}\n{frame}" if frame else message)
        self.frame = frame


def failure(what: str, error: BaseException, home: str | None = None) -> FailedError:
    """Return the error to raise for an exception out of a loss's code; `home` is the loss's own file, if known."""
    if isinstance(error, SystemExit):
        frame = own_frame(error, home)
        return FailedError(f"{what} left the process (SystemExit with code {error.code!r}).", frame)
    frame = own_frame(error, home)
    return FailedError(f"{what} raised {type(error).__name__}:" if frame else f"{what} raised {describe(error)}", frame)


def describe(error: BaseException) -> str:
    """Return type and text of an exception, as Python prints them, cut if they would fill the screen."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " …"


def own_frame(error: BaseException, home: str | None = None) -> Frame | None:
    """Return the innermost frame of the user's code: in the loss's file or beside it, else outside torch and Python."""
    if isinstance(error, SyntaxError) and error.filename:
        source = (error.text or "").strip()
        return Frame(error.filename, error.lineno or 0, "<module>", source, describe(error).splitlines()[-1])
    steps = list(_steps(error.__traceback__))
    for belongs in (lambda file: _beside(file, home), lambda file: not _foreign(file)):
        for file, line, function in reversed(steps):
            if belongs(file):
                return Frame(file, line, function, linecache.getline(file, line).strip(), describe(error))
    return None


def _steps(trace: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, trace.tb_lineno, code.co_name
        trace = trace.tb_next


def _beside(file: str, home: str | None) -> bool:
    """Return True for the loss's own file and for files of the same package or folder."""
    if home is None or file.startswith("<") or _resolved(home).startswith(_CALLS):
        return False
    if _resolved(file) == _resolved(home):
        return True
    folder = Path(_resolved(home)).parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    inside = _resolved(file).startswith(str(folder) + os.sep)
    installed = any(part in Path(_resolved(file)).relative_to(folder).parts for part in _PACKAGES) if inside else True
    return inside and not installed and not _foreign(file)


def _foreign(file: str) -> bool:
    if file.startswith("<"):
        return True
    path = _resolved(file)
    installed = any(part in Path(path).parts for part in _PACKAGES)
    return path.startswith((*_FOREIGN, _CALLS)) or (path.startswith(_STDLIB) and not installed)


def _resolved(file: str) -> str:
    return str(Path(file).resolve())
