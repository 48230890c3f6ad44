"""The layers of the package: data flows one way. Imports inside functions and for type checkers count like others."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "kltest"

LAYERS = (
    ("errors", "version"),
    ("files", "names", "samplers"),
    ("environments", "sweeps"),
    ("rollout",),
    ("truth", "estimators"),
    ("symbolic",),
    ("loss",),
    ("moments",),
    ("samples",),
    ("language_models", "report"),
    ("identify",),
    ("counterexample",),
    ("checks",),
    ("render", "adapters"),
    ("grading",),
    (
        "training",
        "reproduce",
        "scoreboard",
        "scanning",
        "auditing",
        "comparing",
        "diagnosing",
        "finetune",
        "parametrize",
    ),
    ("integration", "preflighting"),
    ("pytest_plugin", "cli"),
    ("", "__main__"),
)
"""From the lowest to the highest, where "" is the package's own face. A room imports lower rooms and itself; neighbours
do not know each other."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
GRADER = {room for room, level in LEVEL.items() if level <= LEVEL["grading"]} - {"sweeps"}
"""Packages of grading: nothing in them imports sweeps."""


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by their dotted names."""
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def arrows(package: Path) -> set[tuple[str, str]]:
    """(importing, imported) modules of the package."""
    known = modules(package)
    found = set()
    for name, file in known.items():
        for node in imports(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            else:
                assert node.level == 0, f"{name} imports relatively"
                base = node.module or ""
                named = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
            found |= {(name, each) for each in named if each in known and each != name}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def faults(found: set[tuple[str, str]]) -> list[str]:
    """Return the imports that break the order of the layers."""
    wrong = []
    for source, target in sorted(found):
        here, there = room(source), room(target)
        if here == there:
            continue
        down = LEVEL[there] < LEVEL[here]
        if not down or (here in GRADER and there == "sweeps"):
            wrong.append(f"{source} -> {target}")
    return wrong


def circle(found: set[tuple[str, str]]) -> list[str]:
    """Modules that import one another, directly or by way of others; a package and its parts count as apart."""
    graph: dict[str, set[str]] = {}
    for one, other in found:
        if not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
            graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def found():
    return arrows(PACKAGE)


def test_every_room_has_a_layer():
    assert {room(name) for name in modules(PACKAGE)} == set(LEVEL)


def test_rooms_import_downward_only(found):
    assert faults(found) == []


def test_there_are_no_circles(found):
    assert circle(found) == []


def test_an_upward_import_and_a_circle_are_noticed():
    assert faults({("kltest.truth.values", "kltest.grading.options")}) == [
        "kltest.truth.values -> kltest.grading.options"
    ]
    assert faults({("kltest.estimators.spec", "kltest.truth.atlas")}), "neighbours do not know each other"
    loop = ["kltest.loss.a", "kltest.loss.b", "kltest.loss.c", "kltest.loss.a"]
    assert set(circle(set(pairwise(loop)))) == set(loop)
    assert circle({("kltest.loss", "kltest.loss.a"), ("kltest.loss.a", "kltest.loss")}) == []


@pytest.mark.parametrize("above", ["def f():", "if TYPE_CHECKING:", "class A:"])
def test_imports_are_seen_wherever_they_stand(above):
    tree = ast.parse(f"{above}\n    from kltest.grading import options\n")
    assert [node.module for node in imports(tree)] == ["kltest.grading"]
