"""Which tests execute a line; as a command, runs those of the mutated one: `python covering.py COVERING.json`."""

import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

import coverage

# Seconds of tests (as measured under coverage) spent on one mutant before it counts as not noticed.
BUDGET = 100.0


def importing(clone: Path) -> dict[str, str]:
    """The environment in which kltest is the clone's, in the processes that tests start as well."""
    return {**os.environ, "PYTHONPATH": str(clone.resolve())}


def measure(clone: Path, rooms: Iterable[str], suites: Iterable[str], output: Path) -> None:
    """Runs the suites once under coverage; writes the tests of every line and how long each test takes."""
    data, junit = output.with_suffix(".coverage"), output.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--no-header", *suites]
    command += [f"--cov={room}" for room in rooms] + ["--cov-context=test", "--cov-report="]
    command += [f"--junitxml={junit}", "-o", "junit_family=xunit1"]
    settings = output.with_suffix(".coveragerc")
    settings.write_text(f"[run]\ndata_file = {data}\n", encoding="utf-8")
    subprocess.run([*command, f"--cov-config={settings}"], check=True, cwd=clone, env=importing(clone))
    seconds = {
        f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0.0))
        for case in ElementTree.parse(junit).iter("testcase")
    }
    found = coverage.CoverageData(basename=str(data))
    found.read()
    numbers = {name: number for number, name in enumerate(seconds)}
    lines = {}
    for name in sorted(found.measured_files()):
        tests = {}
        for line, contexts in found.contexts_by_lineno(name).items():
            named = {context.rsplit("|", 1)[0] for context in contexts}
            tests[line] = sorted(numbers[test] for test in named if test in numbers)
        lines[str(Path(name).relative_to(clone.resolve()))] = tests
    output.write_text(json.dumps({"tests": list(seconds), "seconds": list(seconds.values()), "lines": lines}))


def choose(covering: dict, module: str, line: int) -> list[str]:
    """The tests that execute this line (the module, where it only runs at import), quick ones of every file first."""
    lines = covering["lines"].get(module, {})
    numbers = lines.get(str(line)) or sorted({number for tests in lines.values() for number in tests})
    files: dict[str, list[int]] = {}
    for number in sorted(numbers, key=covering["seconds"].__getitem__):
        files.setdefault(covering["tests"][number].split("::")[0], []).append(number)
    chosen, spent = [], 0.0
    for number in itertools.chain.from_iterable(itertools.zip_longest(*files.values())):
        if number is not None and spent < BUDGET:
            chosen.append(covering["tests"][number])
            spent += covering["seconds"][number]
    return chosen


def main() -> int:
    """In a clone with one mutant: the exit status of pytest over the tests that could notice it."""
    difference = subprocess.run(["git", "diff", "-U0"], capture_output=True, text=True, check=True).stdout
    module = re.search(r"^\+\+\+ b/(.*)$", difference, re.MULTILINE)
    hunk = re.search(r"^@@ -(\d+)", difference, re.MULTILINE)
    if module is None or hunk is None:
        raise SystemExit("covering.py runs in a clone that holds a mutant: git sees no change here")
    chosen = choose(json.loads(Path(sys.argv[1]).read_text()), module[1], int(hunk[1]))
    if not chosen:
        return 0
    # In the order chosen: pytest runs arguments of several files in the order given.
    arguments = Path(sys.argv[1]).with_name(f"{Path.cwd().name}.arguments")
    arguments.write_text("\n".join(chosen), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", f"@{arguments}"]
    return subprocess.run(command, check=False, env=importing(Path.cwd())).returncode


if __name__ == "__main__":
    sys.exit(main())
