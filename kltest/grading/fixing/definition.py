"""The definition of a function in its file: its text and tree, and the function run with a changed text."""

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from kltest.errors import KltestError
from kltest.loss.callables import inner_of


class NotChangeableError(KltestError):
    """The source of a function cannot be changed; the message says why."""


@dataclass(frozen=True)
class Edit:
    """New text for the characters [start, end) of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Editable:
    """A function and the file that defines it.

    Attributes:
        function: what runs; its code is exchanged to run a changed text, so that every way to it leads there. None for
            a function that is only read.
        path, text: the file, and what it held when it was read.
        node: the definition in the tree of the file.
    """

    function: FunctionType | None
    path: Path
    text: str
    node: ast.FunctionDef

    @classmethod
    def of(cls, function: Any) -> "Editable":
        """Find the definition of a callable; NotChangeableError if it is not a plain function of a file."""
        inner = inner_of(function)
        inner = getattr(inner, "__func__", inner)
        if not isinstance(inner, FunctionType):
            raise NotChangeableError("it is not a Python function")
        path = Path(inner.__code__.co_filename)
        try:
            data = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
            tree = ast.parse(data)
        except (OSError, SyntaxError, ValueError, LookupError):
            raise NotChangeableError("its source is not in a file") from None
        node = next((node for node in ast.walk(tree) if _defines(node, inner.__code__)), None)
        if not isinstance(node, ast.FunctionDef):
            line = inner.__code__.co_firstlineno
            raise NotChangeableError(f"{path.name} does not define it as a function at line {line}")
        if encoding not in ("utf-8", "ascii") or "\f" in text or "\r" in text.replace("\r\n", ""):
            raise NotChangeableError(f"{path.name} is not plain UTF-8")
        return cls(inner, path, text, node)

    @cached_property
    def starts(self) -> list[int]:
        """The place of the first character of each line in the text."""
        return [0, *accumulate(len(line) + 1 for line in self._lines)]

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the characters [start, end) of the text that a node takes."""
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def source(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def _place(self, line: int, column: int) -> int:
        # Columns of a syntax tree count the bytes of a line.
        return self.starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def changed(self, edits: Sequence[Edit]) -> str:
        """Return the text of the file with these edits, which do not overlap."""
        text = self.text
        for edit in sorted(edits, key=lambda one: (one.start, one.end), reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    def code(self, source: "str | ast.Module") -> CodeType:
        """Compile a changed text, or tree, of the file, and return the code of the function in it.

        NotChangeableError if that is no Python, or if the function became another kind of function.
        """
        try:
            whole = compile(source, str(self.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            raise NotChangeableError("the change is no Python") from None
        assert self.function is not None
        old = self.function.__code__
        for code in _codes(whole):
            if code.co_name == old.co_name and code.co_firstlineno == old.co_firstlineno:
                if code.co_freevars == old.co_freevars:
                    return code
                break
        raise NotChangeableError("the change makes another kind of function")

    @contextmanager
    def running(self, code: CodeType) -> Iterator[None]:
        """Run this code whenever the function is called."""
        assert self.function is not None
        before = self.function.__code__
        self.function.__code__ = code
        try:
            yield
        finally:
            self.function.__code__ = before


def _defines(node: ast.AST, code: CodeType) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
