"""Grade published libraries, each in a virtual environment of its own, and compare with what theory says.

    python tests/real/grade_published.py [--real liger,openrlhf,verl | all] [--environments FOLDER]

Needs Python with pip and the package index, nothing else; prints a line for each setting, exits 1 if any disagrees.
Environments are kept in FOLDER (else $KLTEST_REAL_ENVIRONMENTS, else the user's cache folder) and used again as long
as the versions are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from published import LIBRARIES, Case, Combination, Library

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
COMPANIONS = ("numpy", "scipy", "typer", "pandas", "matplotlib")
TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""On coefficients: identification accepts residuals of 1e-9 and 1e-4, which a close pair of names can magnify."""


class UnreachableError(RuntimeError):
    """Nothing was installed, because no package index answers."""


@dataclass(frozen=True)
class Installed:
    """An interpreter with kltest and a library; `beside` is the folder that holds the library, if it is not its own."""

    python: Path
    beside: Path | None = None

    def run(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """The interpreter called in a folder, with no other packages than its own and those beside it."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        path = {"PYTHONPATH": str(self.beside)} if self.beside else {}
        environment = {**kept, **path, "OMP_NUM_THREADS": "1"}
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)

    def pip(self, *arguments: str) -> None:
        """`pip install`; UnreachableError where it found no index to ask, RuntimeError for any other failure."""
        done = self.run("-m", "pip", "install", "--quiet", "--retries", "2", *arguments, folder=ROOT)
        if done.returncode:
            kind = UnreachableError if "connection broken by" in done.stderr else RuntimeError
            raise kind(_told(["pip", "install", *arguments], done))


def prepare(name: str, library: Library, folder: Path) -> Installed:
    """A virtual environment with torch, the library and this checkout of kltest; built if it is not there."""

    def build(home: Path) -> None:
        venv.create(home, with_pip=True)
        for packages in ((TORCH,), *library.installs, COMPANIONS, ("--no-deps", "--editable", str(ROOT))):
            inside(home).pip(*packages)

    def inside(home: Path) -> Installed:
        return Installed(home / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))

    recipe = [TORCH, COMPANIONS, library.installs, sys.version, str(ROOT)]
    return inside(_kept(folder, name, recipe, build))


def lay_beside(name: str, library: Library, folder: Path) -> Installed:
    """The running interpreter, its torch and its kltest, and the library alone in a folder beside it.

    For a library that is installed without dependencies; any other gets an environment of its own.
    """
    if not all("--no-deps" in packages for packages in library.installs):
        return prepare(name, library, folder)
    here = Installed(Path(sys.executable))

    def build(home: Path) -> None:
        for packages in library.installs:
            here.pip("--target", str(home), *packages)

    recipe = ["beside", library.installs, sys.version]
    return Installed(here.python, _kept(folder, name, recipe, build))


def grade(installed: Installed, case: Case, folder: Path) -> dict:
    """The report of `kltest grade` on a case, run in an empty folder as a user would."""
    command = ["-m", "kltest.cli", "grade", case.target, "--expect", case.expect, "--output", "json:-"]
    for key, value in case.arguments.items():
        command += ["--arg", f"{key}={value}"]
    command += ["--timeout", "600"]
    done = installed.run(*command, folder=folder)
    codes = {"confirmed": 0, "refuted": 1}
    if done.returncode not in codes.values():
        raise RuntimeError(_told(command, done))
    report = json.loads(done.stdout)
    if codes[report["verdict"]] != done.returncode:
        raise RuntimeError(f"{case.title}: verdict {report['verdict']} and exit code {done.returncode}")
    return report


def grade_together(installed: Installed, cases: Sequence[Case], folder: Path) -> list[dict]:
    """The reports of `kltest.grade` on some cases, all in one process."""
    answer = folder / "reports.json"
    asked = [(case.target, case.expect, case.arguments) for case in cases]
    done = installed.run("-c", _TOGETHER, json.dumps(asked), str(answer), folder=folder)
    if done.returncode:
        raise RuntimeError(_told(["kltest.grade"], done))
    return json.loads(answer.read_text())


_TOGETHER = """
import json, sys, kltest
reports = [
    kltest.grade(target, expect=expect, arguments=arguments).to_dict()
    for target, expect, arguments in json.loads(sys.argv[1])
]
with open(sys.argv[2], "w") as file:
    json.dump(reports, file)
"""


def disagreements(case: Case, report: dict) -> Iterator[str]:
    """What a report says otherwise than the table, one sentence each."""
    for key in ("verdict", "dtype", "reduction"):
        if report[key] != getattr(case, key):
            yield f"{key} is {report[key]}, not {getattr(case, key)}"
    if any("lifted" in note for note in report["notes"]) != case.lifted:
        yield f"lifted out of its file: {'not ' * case.lifted}expected otherwise"
    expected = {("current", world, 1): found for world, found in case.current.items()}
    expected |= {("stale", world, 1): found for world, found in case.stale.items()}
    expected |= {("current", world, 2): found for world, found in case.pairs.items()}
    asked = [row for row in report["gradients"] if row["batch"] == 1 or row["sampler"] == "current"]
    rows = {(row["sampler"], row["environment"], row["batch"]): row["identified"] for row in asked}
    if rows.keys() != expected.keys():
        yield f"rows are {sorted(rows)}, not {sorted(expected)}"
    for key in sorted(rows.keys() & expected.keys()):
        if not _equal(rows[key], expected[key], TOLERANCE[case.dtype]):
            yield f"{key[1]}, {key[0]}: identified {rows[key]}, not {expected[key]}"


def _equal(found: Combination, expected: Combination, tolerance: float) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(abs(found[key] - expected[key]) < tolerance for key in expected)


def default_folder() -> Path:
    """Where environments are kept unless told otherwise."""
    given = os.environ.get("KLTEST_REAL_ENVIRONMENTS")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(cache) / "kltest" / "real"


def chosen(text: str) -> list[str]:
    """The libraries of a comma-separated list, or `all`."""
    names = list(LIBRARIES) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := set(names) - LIBRARIES.keys():
        raise SystemExit(f"no library {sorted(unknown)[0]!r}; there are {', '.join(LIBRARIES)}, all")
    return names


def _kept(folder: Path, name: str, recipe: object, build: Callable[[Path], None]) -> Path:
    """The folder that was built by this recipe; built now if it is not there, or not whole."""
    text = json.dumps(recipe)
    home = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        build(home)
        (home / "complete").write_text(text)
    return home


def _told(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    return f"{' '.join(command)}\nexited with {done.returncode}\n{done.stdout}\n{done.stderr}"


def main() -> int:
    """Grade, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default="all", help=f"{', '.join(LIBRARIES)} or all (default)")
    parser.add_argument("--environments", type=Path, default=default_folder(), metavar="FOLDER")
    options = parser.parse_args()
    wrong = 0
    for name in chosen(options.real):
        installed = prepare(name, LIBRARIES[name], options.environments)
        scratch = options.environments / f"{name}-scratch"
        scratch.mkdir(exist_ok=True)
        for case in LIBRARIES[name].cases:
            found = list(disagreements(case, grade(installed, case, scratch)))
            wrong += bool(found)
            print(f"{'DIFFERS' if found else 'as stated':10} {name}: {case.title}", *found, sep="\n    ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
