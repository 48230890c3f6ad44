"""Modules of a source tree, found by the names under which its files import each other."""

import ast
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import PurePath


class Modules:
    """The files of a tree: a path relative to its root, and what parses it.

    Where the packages of a tree begin is not known, so that `a.b` is any file that ends with `a/b.py`, the one nearest
    to the file that imports it.
    """

    def __init__(self, files: Mapping[str, Callable[[], ast.Module | None]]) -> None:
        self.files = files

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in self.files:
            path = PurePath(file)
            found.setdefault(path.parent.name if path.stem == "__init__" else path.stem, []).append(file)
        return found

    def find(self, importer: str, name: str) -> str | None:
        """Return the file of a module by its dotted name, which may begin with dots, as a file imports it."""
        dots = len(name) - len(name.lstrip("."))
        parts = tuple(part for part in name.lstrip(".").split(".") if part)
        if dots:
            return self._at(PurePath(*PurePath(importer).parts[: -dots or None], *parts))
        candidates = [file for file in self._by_stem.get(parts[-1], ()) if _parts(file)[-len(parts) :] == parts]
        return min(candidates, key=lambda file: (-_shared(file, importer), len(file), file), default=None)

    def _at(self, path: PurePath) -> str | None:
        return next((f for f in (f"{path}.py", f"{path / '__init__.py'}") if f in self.files), None)


def _parts(file: str) -> tuple[str, ...]:
    path = PurePath(file)
    return path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts


def _shared(one: str, other: str) -> int:
    """Count the folders that two files have in common."""
    pairs = zip(PurePath(one).parts, PurePath(other).parts, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
