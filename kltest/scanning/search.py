"""Searching a source tree: its KL terms as rows that are not graded yet, kept by the content of the files."""

import ast
import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kltest.errors import KltestError
from kltest.files import installation, write
from kltest.scanning.declarations import comments
from kltest.scanning.follow import tree_of
from kltest.scanning.lift import Lifted, lifted
from kltest.scanning.rows import Row
from kltest.scanning.sources import Source, parsed
from kltest.scanning.terms import Term, terms
from kltest.scanning.tree import Tree


class Search:
    """The terms of some files. Iterating lifts them one by one; `left` terms of them are not lifted yet.

    `loose` are comments that stand on no term, with their places. With `run` what is more than arithmetic is lifted,
    and with `logged` what is only logged.
    """

    # What tells the searches of one store apart, and what is kept of one beside its rows.
    name = "search"
    kept: tuple[str, ...] = ("lines", "left_out", "loose")

    def __init__(
        self, files: Sequence[tuple[Path, bytes]], store: "Store", *, run: bool = False, logged: bool = False
    ) -> None:
        root = Path.cwd()
        digests = [(str(path), hashlib.sha256(content).hexdigest()) for path, content in files]
        self._store, self._key = store, store.key(self.name, str(root), digests, run, logged)
        self.known = store.read(self._key)
        self.left, self.lines, self.left_out, self.loose = 0, 0, [], []  # type: ignore[var-annotated]
        if self.known:
            for name in self.kept:
                setattr(self, name, self.known[name])
            return
        self._files, self._root, self._run, self._logged = files, root, run, logged

    def __iter__(self) -> Iterator[Row]:
        if self.known:
            for number, row in enumerate(self.known["rows"], 1):
                self.left = len(self.known["rows"]) - number
                yield Row(**row)
            return
        with _uncollected():
            yield from self._searched()

    def _searched(self) -> Iterator[Row]:
        sources = list(parsed(self._files, self.left_out))
        tree = tree_of(sources)
        found = terms(tree, logged=self._logged)
        self.lines = sum(source.text.count("\n") for source in sources)
        said = {id(source): list(comments(source)) for source in sources}
        rows, used = [], set()
        for number, term in enumerate(found, 1):
            self.left = len(found) - number
            own = [(line, words) for line, words in _on(term, said[id(term.function.source)])]
            used |= {(id(term.function.source), line) for line, _ in own}
            for variant in lifted(tree, term, run=self._run):
                row = self._row(tree, term, variant, own)
                rows.append(asdict(row))  # before it is graded
                yield row
        self.loose = [
            (source.place(line), words)
            for source in sources
            for line, _, words in said[id(source)]
            if (id(source), line) not in used
        ]
        self._keep(rows)

    def _keep(self, rows: Sequence[dict[str, Any]]) -> None:
        self._store.write(self._key, {**{name: getattr(self, name) for name in self.kept}, "rows": rows})

    def _row(self, tree: Tree, term: Term, variant: Lifted, said: Sequence[tuple[int, str]]) -> Row:
        source = term.function.source
        written = " ".join(" ".join(source.text.splitlines()[term.first - 1 : term.last]).split())
        place = source.place
        where = f", in line {place(variant.at).rpartition(':')[2]}" if variant.at > 1 else ""
        return Row(
            file=relative(source.path, self._root),
            line=source.line(term.first),
            last=source.line(term.last),
            spot=place(term.first),
            function=term.function.title,
            place=variant.place,
            variant=variant.variant,
            formula=variant.formula or written[:160],
            source=variant.source,
            why=f"{variant.refused}{where}",
            notes=list(dict.fromkeys(variant.notes)),
            guess="; ".join(dict.fromkeys(seed.guess for seed in term.seeds if seed.guess)),
            runs_more=variant.runs_more,
            halved=term.place == "both" and variant.place == "loss",
            comments=[(place(line), words) for line, words in said],
            parts=_lines(term.parts),
            depends=_lines(_functions(tree, term, variant)),
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stop looking for garbage in syntax trees, of which nothing is: it takes half of the time of a search."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def relative(path: Path, root: Path) -> str:
    """Return a path from the root, as it is if it lies elsewhere."""
    resolved = path.resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path.as_posix()


def _on(term: Term, said: Sequence[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Yield the comments on the lines of a term, and those alone on the lines above it.

    A helper is said to be something on its first line, too.
    """
    spans = [(term.first, term.last), *([(term.function.line,) * 2] if term.place == "helper" else [])]
    alone = {line for line, whole, _ in said if whole}
    for first, last in spans:
        while first - 1 in alone:
            first -= 1
        yield from ((line, words) for line, _, words in said if first <= line <= last)


def _lines(parts: Iterable[tuple[Source, int, int]]) -> list[tuple[str, int, int]]:
    return [(str(source.path.resolve()), source.line(first), source.line(last)) for source, first, last in parts]


def _functions(tree: Tree, term: Term, variant: Lifted) -> Iterator[tuple[Source, int, int]]:
    """Yield the lines of the function of a variant, and of the helpers that shape it or were lifted with it."""
    function = term.function
    yield function.source, min(term.first, function.line), max(term.last, function.last)
    yield from term.parts[1:]
    for node in ast.parse(variant.source).body:
        for helper in tree.called(getattr(node, "name", ""), function.source):
            yield helper.source, helper.line, helper.last


class Store:
    """JSON by the content of what it was made from, in a folder; nothing is kept without one."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def key(self, *content: Any) -> str:
        """Return a key of the content, which is another one with another kltest or other packages."""
        return hashlib.sha256(json.dumps([installation(), *content]).encode()).hexdigest()

    def read(self, key: str) -> dict[str, Any] | None:
        """Return what is kept; None if there is nothing that can be read."""
        if self.folder is None:
            return None
        try:
            return json.loads((self.folder / f"{key}.json").read_text())  # type: ignore[no-any-return]
        except (OSError, ValueError):
            return None

    def write(self, key: str, value: Any) -> None:
        """Keep a value; a folder that cannot be written saves nothing."""
        if self.folder is not None:
            try:
                write(self.folder / f"{key}.json", json.dumps(value))
            except (OSError, KltestError):
                self.folder = None
