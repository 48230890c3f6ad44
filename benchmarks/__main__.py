"""The table of ratios: `python -m benchmarks [NAME…]` measures all of it, or some scripts, and writes results.csv.

`--against REVISION` writes nothing: it measures the scripts here and in a checkout of that revision, in turn, and fails
if a ratio is worse by a quarter, and still is when both were measured twice more.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pandas
import torch

from benchmarks.measure import Row, table

HERE = Path(__file__).parents[1]
SCRIPTS = (
    "start_up",
    "registry",
    "moments",
    "per_rollout",
    "dynamic_programming",
    "sampled",
    "training",
    "sweeps",
    "finetune",
)
WORSE = 1.25
# A script in which something is worse is measured so many times more, in both, and the better ratios count.
AGAIN = 2
Rows = dict[str, Row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument("--output", type=Path, default=HERE / "benchmarks" / "results.csv")
    parser.add_argument("--against", metavar="REVISION")
    given = parser.parse_args()
    if unknown := set(given.scripts) - set(SCRIPTS):
        parser.error(f"there is no benchmark {min(unknown)!r}; there are {', '.join(SCRIPTS)}")
    scripts = given.scripts or list(SCRIPTS)
    if given.against:
        sys.exit(against(given.against, scripts))
    found = {name: import_module(f"benchmarks.{name}").main() for name in scripts}
    rows = [row for each in found.values() for row in each]
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__} on "
        f"{torch.get_num_threads()} threads; ratios of the fastest rounds within one run (range of all rounds)\n"
    )
    print(table(rows), flush=True)
    save(found, given.output)


def save(found: dict[str, list[Row]], path: Path) -> None:
    """Put the rows of some scripts into a table, in place of those that they measured before."""
    tables = [pandas.DataFrame([{"benchmark": name, **asdict(row)} for row in rows]) for name, rows in found.items()]
    if path.exists():
        old = pandas.read_csv(path)
        tables.insert(0, old[~old["benchmark"].isin(found)])
    pandas.concat(tables).sort_values("benchmark", kind="stable").to_csv(path, index=False, float_format="%.4g")


def against(revision: str, scripts: list[str]) -> int:
    """Measure here and at a revision in turn; return 1 and print the rows that are worse by a quarter, if any."""
    slower = []
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(HERE), "worktree"]
        old = Path(folder) / "old"
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), revision], check=True)
        try:
            for name in scripts:
                before, now = (_measured(name, tree, folder) for tree in (old, HERE))
                for _ in range(AGAIN):
                    if _worse(before, now):
                        before = _better(before, _measured(name, old, folder))
                        now = _better(now, _measured(name, HERE, folder))
                slower += _worse(before, now)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    print("\n".join(slower) or f"no ratio is worse than at {revision} by a quarter")
    return int(bool(slower))


def _measured(name: str, tree: Path, folder: str) -> Rows:
    """The rows of a script in a checkout."""
    path = Path(folder, f"{name}.csv")
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", name, "--output", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} was not measured in {tree}:\n{done.stderr[-2000:]}")
    rows = [Row(**record) for record in pandas.read_csv(path).drop(columns="benchmark").to_dict("records")]
    return {f"{row.claim}, {row.case}": row for row in rows}


def _better(rows: Rows, again: Rows) -> Rows:
    return {name: min(row, again[name], key=lambda each: each.worse(1.0)) for name, row in rows.items()}


def _worse(before: Rows, now: Rows) -> list[str]:
    """What is worse by a quarter, in words; a row that only one of the two has is no news."""
    return [
        f"{name}: {before[name].ratio:.4g} before, {row.ratio:.4g} now"
        for name, row in now.items()
        if name in before and row.worse(before[name].ratio) >= WORSE
    ]


if __name__ == "__main__":
    main()
