"""The table of ratios: `python -m benchmarks [NAME…]` measures all of it, or some scripts, and writes results.csv.

`--against REVISION` writes nothing: it measures the scripts here and in a checkout of that revision, in turn, and fails
if a ratio is worse by a quarter, and still is when both were measured twice more.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated

import pandas
import torch
import typer

from benchmarks.measure import measured, record

HERE = Path(__file__).parents[1]
SCRIPTS = ("start_up", "moments", "dynamic_programming", "sampled", "training", "sweeps", "finetune")
WORSE = 1.25
# A script in which something is worse is measured so many times more, in both, and the better ratios count.
AGAIN = 2


def main(
    scripts: Annotated[list[str] | None, typer.Argument(metavar="NAME", help=", ".join(SCRIPTS))] = None,
    output: Path = HERE / "benchmarks" / "results.csv",
    revision: Annotated[str, typer.Option("--against", metavar="REVISION")] = "",
) -> None:
    """Measure all of the table of ratios, or some scripts; with --against compare with a revision and write nothing."""
    if unknown := set(scripts or ()) - set(SCRIPTS):
        raise typer.BadParameter(f"there is no benchmark {min(unknown)!r}; there are {', '.join(SCRIPTS)}")
    if revision:
        sys.exit(against(revision, scripts or SCRIPTS))
    found = pandas.DataFrame(
        {"benchmark": name, **asdict(row)}
        for name in scripts or SCRIPTS
        for row in import_module(f"benchmarks.{name}").main()
    )
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__} on "
        f"{torch.get_num_threads()} threads; ratios of the fastest rounds within one run (range of all rounds)\n"
    )
    print(found.to_string(index=False, float_format="{:.4g}".format), flush=True)
    record(output, found, by=["benchmark"])


def against(revision: str, scripts: Sequence[str]) -> int:
    """Measure here and at a revision in turn; return 1 and print the rows that are worse by a quarter, if any."""
    slower = []
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder)
        archive = subprocess.run(["git", "-C", str(HERE), "archive", revision], check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for name in (one for one in scripts if (old / "benchmarks" / f"{one}.py").exists()):
            costs: list[pandas.DataFrame] = []
            for _ in range(1 + AGAIN):
                trees = {"before": old, "now": HERE}
                costs.append(pandas.DataFrame({when: cost(measured(name, tree)) for when, tree in trees.items()}))
                best = pandas.concat(costs).groupby(level=[0, 1]).min()
                worse = best[best["now"] >= WORSE * best["before"]]
                if worse.empty:
                    break
            slower += [f"{', '.join(where)}: worse by {now / was:.2f}" for where, was, now in worse.itertuples()]
    print("\n".join(slower) or f"no ratio is worse than at {revision} by a quarter")
    return int(bool(slower))


def cost(rows: pandas.DataFrame) -> pandas.Series:
    """The ratios by claim and case, turned so that less is better."""
    rows = rows.set_index(["claim", "case"])
    return rows["ratio"].where(rows["at_most"], 1 / rows["ratio"])


if __name__ == "__main__":
    typer.run(main)
