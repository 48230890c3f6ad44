"""Fixes of terms that were found: the file as it would be, searched and graded again; nothing of it is run."""

import ast
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kltest.errors import KltestError
from kltest.grading.fixing.changes import KEEP_THE_VALUE, Rewrite, Rewrites
from kltest.grading.fixing.definition import Editable
from kltest.grading.fixing.search import all_same, fix_of, follows_nearly
from kltest.grading.fixing.seen import CLOSED, LOOKED_AT, Body, Seen
from kltest.identify.case import Case
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.scanning.entries import Entry, Tree, functions
from kltest.scanning.finds import keyed
from kltest.scanning.judge import Judge, options
from kltest.scanning.measured import FAILURES, Rollouts, computed_of, filled, vanishes
from kltest.scanning.rows import NAME, Row
from kltest.scanning.search import Search
from kltest.scanning.sources import Source, parsed
from kltest.scanning.store import Store
from kltest.symbolic.values import INPUT, Node, nodes_in, reached
from kltest.symbolic.words import is_logged

# Seconds of search for each term; a change that was begun is finished.
SECONDS = 60.0
Files = Mapping[Path, bytes]


def fix(row: Row, judge: Judge, seconds: float = SECONDS) -> None:
    """Write into a row the smallest change of its function with which the term passes, or why there is none.

    The files that the term depends on are searched again with the change in place: the term is to pass as graded, and
    every other term of these files is to stay what it was. What the term is to follow is what is declared, else the
    gradient of next tokens for a term of a loss, of whole rollouts for one of a reward, else the other of the two.
    """
    both = ["reverse_kl", "local_reverse_kl"]
    wanted = [row.declared] if row.declared else both if row.place in ("reward", "advantage") else both[::-1]
    tried, deadline = 0, time.monotonic() + seconds
    for name, term in product(wanted, list(_Term.all_of(row))):
        for change in _changes(term.body, name):
            if time.monotonic() > deadline:
                break
            tried += 1
            after = term.after(change)
            if after is None or not _follows(after, name):
                continue
            graded = next(judge.judged([replace(after, declared=row.declared, ignored=row.ignored)]))
            if graded.state == "passed":
                keeps = change.kind in (*KEEP_THE_VALUE, "detach")
                value = "what is logged stays" if keeps else "its value changes, what is logged stays"
                row.fixes = [fix_of(term.body.definition, change, value)]
                return
    row.advice = f"no fix inside of its functions was found ({tried} changes were tried)"


@dataclass(frozen=True)
class _Term:
    """A term in its function, with the files that it depends on, all of their terms, and what the function logs."""

    path: Path
    files: Files
    rows: Sequence[Row]
    own: Row
    body: Body
    logged: Sequence[torch.Tensor]

    @classmethod
    def all_of(cls, row: Row) -> "Iterator[_Term]":
        """Yield the term in its function, and in those that make something of it, as far as each is read by itself."""
        home = str(Path(row.file).resolve())
        names = dict.fromkeys([home, *(file for file, _, _ in row.depends)])
        files = {Path(name): Path(name).read_bytes() for name in names}
        rows = list(Search(list(files.items()), Store(None)))
        own = next((one for one in rows if _is_same(one, row)), None)
        seen = set()
        for file, line in [(home, row.line), *((file, line) for file, line, _ in row.depends)]:
            path = Path(file)
            read = _read(files, path, line) if own and path.suffix == ".py" else None
            if own and read and (file, read[0].definition.node.lineno) not in seen:
                seen.add((file, read[0].definition.node.lineno))
                yield cls(path, files, rows, own, *read)

    def after(self, change: Rewrite) -> Row | None:
        """Return the term with a change in place; None if another term changes, or what is logged."""
        text = self.body.definition.changed(change.edits)
        try:
            ast.parse(text)
        except SyntaxError:
            return None
        files = {**self.files, self.path: text.encode()}
        after = list(Search(list(files.items()), Store(None)))
        found = [next((new for new in after if _is_same(new, old)), None) for old in self.rows]
        if len(after) != len(self.rows) or None in found:
            return None
        for old, new in zip(self.rows, found, strict=True):
            if new and old is not self.own and (new.source, new.why) != (old.source, old.why):
                return None
        row = found[self.rows.index(self.own)]
        read = _read(files, self.path, self.body.definition.node.lineno)
        if row is None or row.why or read is None or not all_same(read[1], self.logged):
            return None
        return row


def _changes(body: Body, name: str) -> list[Rewrite]:
    """Return the changes of expressions that move with the reference, and normalised logits."""
    spans = {body.definition.span(seen.node) for seen in body.expressions if seen.of_reference or seen.of_sampler}
    found = Rewrites(body, {name: 1.0}).all()
    return [one for one in found if one.kind == "normalised" or any(_replaces(edit, spans) for edit in one.edits)]


def _replaces(edit: Any, spans: set[tuple[int, int]]) -> bool:
    return edit.start == edit.end or (edit.start, edit.end) in spans


def _is_same(one: Row, other: Row) -> bool:
    """Return True for rows of one term, whose lines may have moved."""
    return (one.function, one.place, one.variant) == (other.function, other.place, other.variant) and (
        Path(one.file).resolve() == Path(other.file).resolve()
    )


def _follows(row: Row, name: str) -> bool:
    """Return True if the lifted term follows a gradient up to scale on short rollouts, which is quick to see."""
    place = {**options(row.place), "credit": options(row.place).get("credit")}
    space: dict[str, Any] = {}
    exec(compile(row.source, "<term>", "exec"), space)  # arithmetic that kltest wrote itself
    try:
        loss = bind(space[NAME], Call(place["placement"], place["credit"]))  # type: ignore[arg-type]
        return follows_nearly(loss, {name: 1.0}, Case("ragged", "current"))
    except KltestError:
        return False


@dataclass
class _Reader:
    """Records what the expressions of one function are while it is followed."""

    node: ast.FunctionDef
    values: dict[ast.expr, list[Any]] = field(default_factory=dict)
    scopes: dict[ast.stmt, dict[str, Any]] = field(default_factory=dict)
    statements: dict[ast.expr, ast.stmt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for statement in _statements(self.node):
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.expr):
                    self.statements |= dict.fromkeys(_expressions(part), statement)

    def follow(self, tree: Tree, source: Source) -> Entry | None:
        """Follow the function, and return what it is as an entry; None if it is none of the file's own."""
        scope = tree.scope(str(source.path))
        known = functions(scope.variables, str(source.path)) if scope else ()
        function, kind = next(((f, kind) for f, kind in known if f.definition is self.node), (None, None))
        if function is None:
            return None
        evaluator, value = tree.evaluator, tree.evaluator.value

        def seen(expression: ast.expr) -> Any:
            own = evaluator.frame.function is not None and evaluator.frame.function.definition is self.node
            if own and (statement := self.statements.get(expression)) is not None:
                self.scopes.setdefault(statement, dict(evaluator.frame.scope.variables))
            found = value(expression)
            if own:
                self.values.setdefault(expression, []).append(found)
            return found

        evaluator.value = seen  # type: ignore[method-assign]
        try:
            return tree.entered(source, function, kind)
        finally:
            del evaluator.value


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not isinstance(child, CLOSED):
            yield child
        if not isinstance(child, CLOSED):
            yield from _statements(child)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.expr) and not isinstance(node, CLOSED):
        yield node
    if not isinstance(node, CLOSED):
        for child in ast.iter_child_nodes(node):
            yield from _expressions(child)


@dataclass(frozen=True)
class _Fields:
    """Fields of random rollouts."""

    rollouts: Rollouts

    def peek(self, name: str) -> torch.Tensor:
        """Return a field."""
        return self.rollouts.field(name)


def _read(files: Files, path: Path, line: int) -> tuple[Body, list[torch.Tensor]] | None:
    """Return the expressions of the function around a line by their values on random rollouts, and what it logs.

    None if it is not read alone.
    """
    sources = {str(source.path): source for source in parsed(files.items(), [])}
    source = sources[str(path)]
    around = [one for one in ast.walk(source.tree) if isinstance(one, ast.FunctionDef) and _holds(one, line)]
    if not around:
        return None
    reader = _Reader(max(around, key=lambda one: one.lineno))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = reader.follow(Tree(sources), source)
        if entry is None:
            return None
        rollouts = Rollouts(2)
        found = [one for pair in enumerate(reader.values.items()) if (one := _seen(reader, entry, rollouts, *pair))]
        scopes = {at: _known(entry, names, rollouts) for at, names in reader.scopes.items()}
        logged = [_computed(entry, node, rollouts) for node in nodes_in(list(_logged(entry)))]
    definition = Editable(None, path, source.text, reader.node)
    return Body(definition, _Fields(rollouts), found, scopes), [one[0].detach().double() for one in logged if one]


def _logged(entry: Entry) -> Iterator[Any]:
    """Yield what a function logs: entries of dictionaries, names of metrics, what it returns beside its loss."""
    dictionaries = [part for node in entry.graph.nodes for part in node.arguments if isinstance(part, dict)]
    yield from (value for name, value in keyed([*dictionaries, entry.returned]) if name not in ("loss", "total_loss"))
    yield from (one.value for one in entry.stores if is_logged(one.name))
    if isinstance(entry.returned, tuple):
        yield from entry.returned[1:]


def _holds(function: ast.FunctionDef, line: int) -> bool:
    return function.lineno <= line <= (function.end_lineno or function.lineno)


def _seen(
    reader: _Reader, entry: Entry, rollouts: Rollouts, order: int, pair: tuple[ast.expr, list[Any]]
) -> Seen | None:
    expression, values = pair
    statement = reader.statements.get(expression)
    if len(values) != 1 or statement is None or not isinstance(expression, LOOKED_AT):
        return None
    computed = _computed(entry, values[0], rollouts)
    if computed is None:
        return None
    value, names, node = computed
    one = Seen(expression, statement, value.detach(), value.requires_grad, order)
    one.of_reference = any(name.startswith("ref_") for name in names)
    one.of_sampler = (
        not one.of_reference and any(name.startswith("old_") for name in names) and "advantage" not in names
    )
    one.is_kl = one.of_reference and "advantage" not in names and vanishes(entry.roles, node)
    return one


def _computed(entry: Entry, value: Any, rollouts: Rollouts) -> tuple[torch.Tensor, set[str], Node] | None:
    """Return what a value is on rollouts, in its first configuration, and the fields that it is made of."""
    if not isinstance(value, Node):
        return None
    case = next(iter(entry.unfolding.cases(value)), None)
    if case is None or not isinstance(case.node, Node):
        return None
    try:
        of_fields = filled(entry.roles, case.node, {})
        found = computed_of(of_fields, rollouts)
    except FAILURES:
        return None
    names = {str(one.arguments[0]) for one in reached(of_fields) if one.operation == INPUT}
    return (found, names, case.node) if found.dtype.is_floating_point else None


def _known(entry: Entry, names: Mapping[str, Any], rollouts: Rollouts) -> dict[str, Any]:
    """Return the names of a statement with what they are on rollouts, as tensors where that is known."""
    found = {}
    for name, value in names.items():
        computed = _computed(entry, value, rollouts)
        found[name] = value if computed is None else computed[0]
    return found
