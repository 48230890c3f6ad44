"""Find the line at which a loss failed: the user's own frame, not torch's or ours."""

import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from kltest.errors import TargetError

_LONGEST_TEXT = 2000
_FOREIGN = tuple(str(Path(str(file)).resolve().parent) + os.sep for file in (torch.__file__, numpy.__file__, __file__))
# Code that calls libraries raises complete sentences, which need no line.
_CALLS = str(Path(__file__).resolve().parents[1] / "adapters") + os.sep
_STDLIB = tuple(str(Path(sysconfig.get_path(kind)).resolve()) + os.sep for kind in ("stdlib", "platstdlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})


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


@contextmanager
def raised_as(error_for: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Raise another error for whatever code of somebody else raises, but for an interrupt."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise error_for(error) from error


def failure(what: str, error: BaseException, home: str | None = None) -> FailedError:
    """Return the error to raise for an exception out of a loss's code; `home` is the loss's own file, if known."""
    frame = own_frame(error, home)
    if isinstance(error, SystemExit):
        return FailedError(f"{what} left the process (SystemExit with code {error.code!r}).", frame)
    return FailedError(f"{what} raised {type(error).__name__}:" if frame else f"{what} raised {describe(error)}", frame)


def describe(error: BaseException) -> str:
    """Return type and text of an exception, as Python prints them, cut if they would fill the screen."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if "numpy()" in text and "requires grad" in text:
        text += "\nNumPy's numbers have no gradient: write the loss in torch, or in JAX (see `kltest.jax_loss`)."
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("kltest."):
        text += f"\nInstall {error.name.partition('.')[0]} in the environment that kltest runs in, {sys.prefix}."
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " …"


def own_frame(error: BaseException, home: str | None = None) -> Frame | None:
    """Return the innermost frame of the user's code: in the loss's file or beside it, else outside torch and Python."""
    if isinstance(error, SyntaxError) and error.filename:
        source = (error.text or "").strip()
        return Frame(error.filename, error.lineno or 0, "<module>", source, describe(error).splitlines()[-1])
    steps = traceback.extract_tb(error.__traceback__)[::-1]
    own = [step for step in steps if _beside(step.filename, home)] or [s for s in steps if not _foreign(s.filename)]
    if not own:
        return None
    return Frame(own[0].filename, own[0].lineno or 0, own[0].name, own[0].line or "", describe(error))


def _beside(file: str, home: str | None) -> bool:
    """Return True for the loss's own file and for files of the same package or folder."""
    if home is None or file.startswith("<") or str(Path(home).resolve()).startswith(_CALLS):
        return False
    path, own = Path(file).resolve(), Path(home).resolve()
    folder = own.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    inside = folder in path.parents and not _PACKAGES & {*path.relative_to(folder).parts}
    return path == own or (inside and not _foreign(file))


def _foreign(file: str) -> bool:
    path = Path(file).resolve()
    installed = bool(_PACKAGES & {*path.parts})
    return (
        file.startswith("<")
        or str(path).startswith((*_FOREIGN, _CALLS))
        or (str(path).startswith(_STDLIB) and not installed)
    )
