"""The unexplained mutants of report.jsonl in the present code and tests: `python tests/mutation/again.py`.

A mutant whose line has changed since is gone. Stoppable: what is decided is in report.jsonl.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import covering
import report
from run import ROOMS, ROOT, SUITES, TIMEOUT


def mutated(row: report.Row, source: str) -> str | None:
    """The source with the mutant in it; None where its lines are no longer there.

    Short lines stand in many places: that one is meant whose neighbours are most like those that it had.
    """
    hunk = str(row["diff"]).splitlines()
    changed = [number for number, line in enumerate(hunk) if line[:1] in ("-", "+")]
    lines = source.splitlines()
    for around in range(max(changed[0], len(hunk) - 1 - changed[-1]), -1, -1):
        near = hunk[max(0, changed[0] - around) : changed[-1] + around + 1]
        old, new = ([line[1:] for line in near if line[:1] in (" ", sign)] for sign in "-+")
        where = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
        if where:
            at = min(where, key=lambda at: abs(at + 1 - int(str(row["line"]))))
            return "\n".join([*lines[:at], *new, *lines[at + len(old) :]]) + "\n"
    return None


def decide(row: report.Row, clone: Path, tests: Path) -> str:
    """What has become of a mutant: noticed since, gone, or still not noticed."""
    subprocess.run(["git", "checkout", "--quiet", "."], check=True, cwd=clone)
    module = clone / str(row["module"])
    source = mutated(row, module.read_text(encoding="utf-8")) if module.exists() else None
    if source is None:
        return "gone"
    module.write_text(source, encoding="utf-8")
    command = [sys.executable, str(covering.__file__), str(tests)]
    try:
        code = subprocess.run(command, cwd=clone, timeout=TIMEOUT, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        return "noticed since"
    return "noticed since" if code else "not noticed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to work and to go on from; kept")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="again-"))
    folder.mkdir(parents=True, exist_ok=True)
    clones: Queue[Path] = Queue()
    for number in range(arguments.jobs):
        if not (clone := folder / f"clone-{number}").exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        clones.put(clone)
    tests = folder / "covering.json"
    if not tests.exists():
        covering.measure(folder / "clone-0", ROOMS, SUITES, tests)
    rows, known, writing = report.read(), report.reasons(), threading.Lock()

    def work(row: report.Row) -> None:
        clone = clones.get()
        try:
            found = decide(row, clone, tests)
        finally:
            clones.put(clone)
        with writing:
            row["again"] = found
            report.write(rows)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(work, [row for row in rows if report.state(row, known) == "unexplained"]))


if __name__ == "__main__":
    main()
