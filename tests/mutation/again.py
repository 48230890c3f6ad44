"""The mutants of report.json that lived, in the present code and tests: `python tests/mutation/again.py`.

A mutant whose line has changed since is gone. Stoppable: what is decided is in report.json.
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


def decide(row: report.Row, clone: Path, tests: Path) -> str:
    """What has become of a mutant: noticed since, gone, or still not noticed."""
    subprocess.run(["git", "checkout", "--quiet", "."], check=True, cwd=clone)
    module, (old, new) = clone / str(row["module"]), report.changed(row)
    lines = module.read_text(encoding="utf-8").splitlines() if module.exists() else []
    stripped = [line.strip() for line in lines]
    where = [at for at, line in enumerate(stripped) if line == old]
    if not where:
        return "gone"
    at = min(where, key=lambda at: abs(at + 1 - int(str(row["line"]))))
    lines[at] = lines[at].replace(old, new)
    module.write_text("\n".join(lines) + "\n", encoding="utf-8")
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
    rows, writing = report.read(), threading.Lock()

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
        list(pool.map(work, [row for row in rows if row["outcome"] != "killed" and "again" not in row]))


if __name__ == "__main__":
    main()
