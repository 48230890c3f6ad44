"""Searching a source tree: its KL terms as rows that are not graded yet, kept by the content of the files."""

import gc
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from kltest.files import relative
from kltest.scanning.declarations import comments
from kltest.scanning.entries import Place, Tree, assigned
from kltest.scanning.finds import Find, finds
from kltest.scanning.rows import Row
from kltest.scanning.sources import parsed
from kltest.scanning.store import Store
from kltest.scanning.variants import defaults, told
from kltest.symbolic.words import says_kl

KEPT = ("lines", "left_out", "loose", "unread")
"""What is kept of a search beside its rows."""


class Search:
    """The terms of some files. Iterating lifts them one by one; `left` terms of them are not lifted yet.

    `loose` are comments that stand on no term, with their places, and `unread` names that say KL of which nothing was
    found. With `logged` what is only logged is a term, too. Functions of the files `entered` are looked at, of all if
    there are none, and others where those call them; one function may have been `asked` for by name. `reading` is
    called with the file of each function that is followed, its number, and how many there are. Interrupted, it yields
    what it has found before it raises that.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, bytes]],
        store: Store,
        *,
        logged: bool = False,
        entered: Collection[Path] = (),
        asked: str = "",
        reading: Callable[[str, int, int], None] = lambda file, number, total: None,
    ) -> None:
        self._reading = reading
        self._files, self._root, self._store, self._logged = files, Path.cwd(), store, logged
        self._entered, self._asked = [str(path) for path in entered], asked
        digests = [(str(path), hashlib.sha256(content).hexdigest()) for path, content in files]
        self._key = store.key("terms", str(self._root), digests, logged, self._entered, asked)
        self.known = store.read(self._key)
        self.left, self.lines = 0, 0
        self.left_out: list[str] = []
        self.loose: Sequence[tuple[str, str]] = []
        self.unread: Sequence[str] = []
        for name, value in (self.known or {}).items():
            if name in KEPT:
                setattr(self, name, value)

    def __iter__(self) -> Iterator[Row]:
        if self.known:
            for number, row in enumerate(self.known["rows"], 1):
                self.left = len(self.known["rows"]) - number
                yield Row(**row)
            return
        with _uncollected():
            yield from self._searched()

    def _searched(self) -> Iterator[Row]:
        sources = {str(source.path): source for source in parsed(self._files, self.left_out)}
        tree = Tree(sources, [file for file in self._entered if file in sources], self._asked)
        found = finds(
            tree,
            logged=self._logged,
            reading=lambda file, number: self._reading(relative(Path(file), self._root), number, len(sources)),
        )
        self.lines = sum(source.text.count("\n") for source in sources.values())
        said = {name: list(comments(source)) for name, source in sources.items()}
        rows, used = [], set()
        for number, find in enumerate(found, 1):
            self.left = len(found) - number
            own = list(_on(find, said[find.file]))
            used |= {(find.file, line) for line, _ in own}
            for row in self._rows(tree, find, own):
                rows.append(asdict(row))  # before it is graded
                yield row
        if tree.interrupted:  # what it found is told, and nothing of it kept as all of it
            raise KeyboardInterrupt
        self.loose = [
            (source.place(line), words)
            for name, source in sources.items()
            for line, _, words in said[name]
            if (name, line) not in used
        ]
        self.unread = [*tree.lost, *_unread(tree, found)]
        self._store.write(self._key, {**{name: getattr(self, name) for name in KEPT}, "rows": rows})

    def _rows(self, tree: Tree, find: Find, said: Sequence[tuple[int, str]]) -> Iterator[Row]:
        source = tree.sources[find.file]
        first, last = min(find.lines), max(find.lines)
        variants = told(find.made)
        for variant in variants:
            yield Row(
                file=relative(source.path, self._root),
                line=source.line(first),
                last=source.line(last),
                spot=source.place(first),
                function=find.function.title,
                place=variant.place,
                variant=variant.name,
                formula=variant.formula,
                source=variant.program,
                why=variant.why,
                notes=variant.notes,
                form=variant.form,
                used=[use for use in variant.used if not use.startswith(f"{find.function.title}, ")],
                called=variant.called,
                choices=variant.choices,
                against=variant.against,
                defaults=defaults(variant, variants),
                comments=[(source.place(line), words) for line, words in said],
                parts=list(_spans(tree, find)),
                depends=list(_depends(tree, find)),
            )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stop looking for garbage among syntax trees and graphs: it takes much of the time of a search."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():  # of what graphs are computed with
            warnings.simplefilter("ignore")
            yield
    finally:
        if collects:
            gc.enable()


def _unread(tree: Tree, found: Sequence[Find]) -> Iterator[str]:
    """Yield the functions and variables, but of tests, whose names say KL and in which nothing was recognised.

    A variable that is stored as a metric is recognised as that, and one that is made of no log-probs is none of a KL.
    """
    lines = tree.logged | {(find.file, line) for find in found for line in find.lines}
    lines |= {one for find in found for one in (*find.others, *find.depends)}
    for name, places in tree.places.items():
        source, silent = tree.sources[name], set()
        for place in places:
            own = any((name, line) in lines for line in range(place.first, place.last + 1))
            if not own and says_kl(place.name) and not place.is_test:
                silent.add(place)
                yield f"{source.place(place.first)} {place.title}"
        variables: dict[tuple[Place, str], int] = {}
        for variable, first, last in assigned(source.tree):
            around = next((one for one in places if one.first <= first <= one.last), None)
            own = any((name, line) in lines for line in range(first, last + 1))
            if around and around not in silent and not (own or around.is_test) and says_kl(variable):
                variables.setdefault((around, variable), first)
        yield from (f"{source.place(line)} {one.title}: {variable}" for (one, variable), line in variables.items())


def _on(find: Find, said: Sequence[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Yield the comments on the lines of a term or on the first of its function, and those alone above them."""
    alone = {line for line, whole, _ in said if whole}
    wanted = {*find.lines, find.function.first}
    for line in sorted(wanted):
        while line - 1 in alone:
            line -= 1
            wanted.add(line)
    yield from ((line, words) for line, _, words in said if line in wanted)


def _spans(tree: Tree, find: Find) -> Iterator[tuple[str, int, int]]:
    """Yield the lines of a term by file, those that follow each other together."""
    lines = sorted({(find.file, line) for line in find.lines}) + sorted(find.others)
    span: tuple[str, int, int] | None = None
    for file, line in [*lines, ("", 0)]:
        if span and (file, line) == (span[0], span[2] + 1):
            span = file, span[1], line
        else:
            if span:
                yield _in_file(tree, *span)
            span = (file, line, line) if file else None


def _depends(tree: Tree, find: Find) -> Iterator[tuple[str, int, int]]:
    """Yield the lines of the functions that a term is computed in, and of those that make something of it."""
    found: dict[tuple[str, int, int], None] = {}
    for file, line in sorted({*find.depends, *((find.file, line) for line in find.lines)}):
        own = (one for one in tree.places.get(file, ()) if one.first <= line <= one.last)
        found[file, *next(((one.first, one.last) for one in own), (line, line))] = None
    yield from (_in_file(tree, *span) for span in found)


def _in_file(tree: Tree, name: str, first: int, last: int) -> tuple[str, int, int]:
    source = tree.sources[name]
    return str(source.path.resolve()), source.line(first), source.line(last)
