"""Searching a source tree: its KL terms as rows that are not graded yet, kept by the content of the files."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from kltest.scanning import search
from kltest.scanning.core.entries import Tree
from kltest.scanning.core.finds import Find, finds
from kltest.scanning.core.variants import told
from kltest.scanning.declarations import comments
from kltest.scanning.rows import Row
from kltest.scanning.search import relative
from kltest.scanning.sources import parsed
from kltest.symbolic.words import says_kl


class Search(search.Search):
    """The terms of some files by the symbolic evaluator; `unread` are names that say KL of which nothing was found.

    Nothing of the tree is run, whatever `run` says, and what is only logged is no term, whatever `logged` says.
    """

    name = "terms"
    kept = ("lines", "left_out", "loose", "unread")
    unread: Sequence[str] = ()

    def _searched(self) -> Iterator[Row]:
        sources = {str(source.path): source for source in parsed(self._files, self.left_out)}
        tree = Tree(sources)
        found = finds(tree)
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
        self.loose = [
            (source.place(line), words)
            for name, source in sources.items()
            for line, _, words in said[name]
            if (name, line) not in used
        ]
        self.unread = [*tree.lost, *_unread(tree, found)]
        self._keep(rows)

    def _rows(self, tree: Tree, find: Find, said: Sequence[tuple[int, str]]) -> Iterator[Row]:
        source = tree.sources[find.file]
        first, last = min(find.lines), max(find.lines)
        for variant in told(find.made):
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
                used=variant.used,
                called=variant.called,
                comments=[(source.place(line), words) for line, words in said],
                parts=list(_spans(tree, find)),
                depends=list(_functions(tree, find)),
            )


def _unread(tree: Tree, found: Sequence[Find]) -> Iterator[str]:
    """Yield the functions whose names say KL in which nothing was recognised."""
    lines = {(find.file, line) for find in found for line in find.lines} | {
        one for find in found for one in find.others
    }
    for name, places in tree.places.items():
        for place in places:
            own = any((name, line) in lines for line in range(place.first, place.last + 1))
            if not own and says_kl(place.title.rpartition(".")[2]):
                yield f"{tree.sources[name].place(place.first)} {place.title}"


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
                source = tree.sources[span[0]]
                yield str(source.path.resolve()), source.line(span[1]), source.line(span[2])
            span = (file, line, line) if file else None


def _functions(tree: Tree, find: Find) -> Iterator[tuple[str, int, int]]:
    """Yield the lines of the function of a term, and of those parts of it that stand elsewhere."""
    source = tree.sources[find.file]
    place = find.function
    first, last = (place.first, place.last) if place.last else (min(find.lines), max(find.lines))
    yield str(source.path.resolve()), source.line(first), source.line(last)
    yield from _spans(tree, find)
