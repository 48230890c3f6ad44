"""`kltest.scan`: find the KL terms of a source tree, lift and grade them, and say what each follows."""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kltest.errors import UsageError
from kltest.scanning.follow import tree_of
from kltest.scanning.judge import TIMEOUT, Result, judged
from kltest.scanning.lift import Lifted, lifted
from kltest.scanning.sources import sources
from kltest.scanning.terms import Term, terms
from kltest.scanning.tree import Tree

_EXPECT = re.compile(r"#\s*kltest:\s*expect\s*=\s*([\w@.*+\-]+)")
_IGNORE = re.compile(r"#\s*kltest:\s*ignore\[([\w,\s]+)\]\s*(.*)")
OPEN = frozenset({"not run", "unnamed", "inconclusive", "failed"})
"""States of terms of which nothing is held against anybody."""


@dataclass
class Row:
    """One variant of one term: where it stands, what it is, what it follows and what is wrong with it."""

    file: str
    line: int
    last: int
    function: str
    place: str
    variant: str
    formula: str
    result: Result
    guessed: bool = False
    declared: str = ""
    ignored: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    spot: str = ""

    @property
    def codes(self) -> list[str]:
        """Return the errors that no comment excuses."""
        return [code for code in self.result.codes if code not in self.ignored]

    @property
    def status(self) -> str:
        """Return passed, finding, known (in the baseline), or a state that holds nothing against anybody."""
        status = self.result.status
        if status == "finding" and self.result.codes and not self.codes:
            return "passed"
        return "known" if self.known and status == "finding" else status

    @property
    def key(self) -> str:
        """Return what a baseline knows the row by: no line numbers, which move."""
        return f"{self.file}|{self.function}|{self.place}|{self.variant}|{self.formula}|{','.join(self.codes)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        result = self.result
        result, own = (
            self.result,
            ("file", "line", "last", "function", "place", "variant", "formula", "guessed", "status"),
        )
        return {
            **{name: getattr(self, name) for name in own},
            "gradients": dict(result.gradients),
            "errors": self.codes,
            "warnings": list(result.warnings),
            "ignored": dict(self.ignored),
            "declared": self.declared or None,
            "why": result.why,
            "notes": result.lifted.notes,
            "source": result.lifted.source,
        }


@dataclass
class Scan:
    """The rows of a scan in the order of files and lines, how much was read, and a line for each file that was not."""

    rows: list[Row]
    files: int = 0
    lines: int = 0
    left_out: list[str] = field(default_factory=list)
    root: Path = field(default_factory=Path.cwd)

    @property
    def findings(self) -> list[Row]:
        """Return the rows that count: no term of the baseline, none that is excused."""
        return [row for row in self.rows if row.status == "finding"]

    def exit_code(self, *, strict: bool = False, changed: bool = False) -> int:
        """Return 1 for a finding, 4 with `strict` for what was not run or not named, 5 if there is no term at all."""
        if self.findings:
            return 1
        if strict and any(row.status in OPEN for row in self.rows):
            return 4
        return 0 if self.rows or changed else 5

    def to_dict(self) -> dict[str, Any]:
        """Return the scan as JSON has it, schema kltest.scan/1."""
        return {
            "schema": "kltest.scan/1", "files": self.files, "lines": self.lines,
            "terms": [row.to_dict() for row in self.rows], "left_out": self.left_out,
        }  # fmt: skip


def scan(
    *paths: str | Path,
    jobs: int | None = None,
    timeout: float = TIMEOUT,
    cache: Path | None = None,
    baseline: Iterable[str] = (),
    expect: str | None = None,
    changed: Mapping[str, Sequence[range]] | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Scan:
    """Find every KL term in source files, lift each into a function of rollout fields, and grade it.

    Nothing of the tree is imported. What is lifted runs in a child process, and only if it is tensor arithmetic.

    Args:
        paths: files and folders.
        jobs: how many terms are graded at once; by default as many as there are cores.
        timeout: seconds that grading one variant may take.
        cache: a folder in which results are kept by content.
        baseline: keys of rows that are known (`Row.key`); they are listed and count no longer.
        expect: what every term declares that has no comment of its own.
        changed: lines by file; only terms that stand on one of them are graded.
        told: called with how many variants are graded of how many.

    Returns:
        A Scan.

    Raises:
        UsageError: a path does not exist.
    """
    left_out: list[str] = []
    read = list(sources([Path(path) for path in paths], left_out))
    tree = tree_of(read)
    root = Path.cwd()
    found = [term for term in terms(tree) if changed is None or _is_changed(term, changed, root)]
    rows = [_row(tree, term, variant, root, expect) for term in found for variant in lifted(tree, term)]
    wanted = {id(row.result.lifted): row.declared or None for row in rows}
    known = frozenset(baseline)
    results = judged(
        [row.result.lifted for row in rows],
        declared=lambda variant: wanted[id(variant)],
        jobs=jobs or os.cpu_count() or 1,
        timeout=timeout,
        cache=cache,
        told=told,
    )
    for number, result in results:
        rows[number].result = result
        rows[number].known = rows[number].key in known
    return Scan(rows, len(read), sum(source.text.count("\n") for source in read), left_out, root)


def _row(tree: Tree, term: Term, variant: Lifted, root: Path, expect: str | None) -> Row:
    source = term.function.source
    lines = source.text.splitlines()[max(term.first - 2, 0) : term.last]
    said = next((match[1] for line in lines if (match := _EXPECT.search(line))), expect or "")
    ignored: dict[str, str] = {}
    for line in lines:
        if match := _IGNORE.search(line):
            ignored |= {code.strip(): match[2].strip() for code in match[1].split(",")}
    written = " ".join(" ".join(lines[1 if term.first > 1 else 0 :]).split())
    return Row(
        file=_relative(source.path, root),
        line=term.first,
        last=term.last,
        function=term.function.title,
        place=variant.place,
        variant=variant.variant,
        formula=variant.formula or written[:160],
        result=Result(variant, "not run"),
        guessed=any(seed.guessed for seed in term.seeds),
        declared=said,
        ignored=ignored,
        spot=source.place(term.first),
    )


def _relative(path: Path, root: Path) -> str:
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return path.as_posix()


def _is_changed(term: Term, changed: Mapping[str, Sequence[range]], root: Path) -> bool:
    for source, first, last in term.parts:
        for lines in changed.get(_relative(source.path, root), ()):
            if lines.start <= last and first < lines.stop:
                return True
    return False


def changed_since(reference: str) -> dict[str, list[range]]:
    """Return the lines that differ from a commit of git, by file relative to the current folder.

    Raises UsageError if git does not know it.
    """
    command = [
        "git",
        "diff",
        "--unified=0",
        "--relative",
        "--no-ext-diff",
        "--no-color",
        reference,
        "--",
        "*.py",
        "*.ipynb",
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise UsageError(f"--changed-since {reference}: git says: {done.stderr.strip().splitlines()[0]}")
    found: dict[str, list[range]] = {}
    file = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            file = line[6:] if line.startswith("+++ b/") else ""
        elif file and (match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)):
            start, count = int(match[1]), int(match[2] or 1)
            found.setdefault(file, []).append(range(start, start + max(count, 1)))
    return found
