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
from collections.abc import Iterator
from pathlib import Path

from published import LIBRARIES, Case, Combination, Library

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
COMPANIONS = ("numpy", "scipy", "typer", "pandas", "matplotlib")
TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""On coefficients: identification accepts residuals of 1e-9 and 1e-4, which a close pair of names can magnify."""


def prepare(name: str, library: Library, folder: Path) -> Path:
    """The Python of an environment that has the library and this checkout of kltest; built if it is not there."""
    recipe = json.dumps([TORCH, COMPANIONS, library.installs, sys.version, str(ROOT)])
    home = folder / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = home / "complete"
    if not complete.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        for packages in ((TORCH,), *library.installs, COMPANIONS, ("--no-deps", "--editable", str(ROOT))):
            _run([str(python), "-m", "pip", "install", "--quiet", *packages])
        complete.write_text(recipe)
    return python


def grade(python: Path, case: Case, folder: Path) -> dict:
    """The report of `kltest grade` on a case, run in an empty folder as a user would."""
    command = [str(python), "-m", "kltest.cli", "grade", case.target, "--expect", case.expect, "--output", "json:-"]
    for key, value in case.arguments.items():
        command += ["--arg", f"{key}={value}"]
    command += ["--timeout", "600"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environment(), check=False)
    codes = {"confirmed": 0, "refuted": 1}
    if done.returncode not in codes.values():
        raise RuntimeError(f"{' '.join(command)}\nexited with {done.returncode}\n{done.stdout}\n{done.stderr}")
    report = json.loads(done.stdout)
    if codes[report["verdict"]] != done.returncode:
        raise RuntimeError(f"{case.title}: verdict {report['verdict']} and exit code {done.returncode}")
    return report


def disagreements(case: Case, report: dict) -> Iterator[str]:
    """What a report says otherwise than the table, one sentence each."""
    for key in ("verdict", "dtype", "reduction"):
        if report[key] != getattr(case, key):
            yield f"{key} is {report[key]}, not {getattr(case, key)}"
    if any("lifted" in note for note in report["notes"]) != case.lifted:
        yield f"lifted out of its file: {'not ' * case.lifted}expected otherwise"
    expected = {("current", world): found for world, found in case.current.items()}
    expected |= {("stale", world): found for world, found in case.stale.items()}
    rows = {(row["sampler"], row["environment"]): row["identified"] for row in report["gradients"] if row["batch"] == 1}
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


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nexited with {done.returncode}\n{done.stdout}\n{done.stderr}")


def main() -> int:
    """Grade, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default="all", help=f"{', '.join(LIBRARIES)} or all (default)")
    parser.add_argument("--environments", type=Path, default=default_folder(), metavar="FOLDER")
    options = parser.parse_args()
    wrong = 0
    for name in chosen(options.real):
        python = prepare(name, LIBRARIES[name], options.environments)
        scratch = options.environments / f"{name}-scratch"
        scratch.mkdir(exist_ok=True)
        for case in LIBRARIES[name].cases:
            found = list(disagreements(case, grade(python, case, scratch)))
            wrong += bool(found)
            print(f"{'DIFFERS' if found else 'as stated':10} {name}: {case.title}", *found, sep="\n    ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
