"""Make the runs that sweep.csv lacks, seed after seed, and add a line for each: about 15 s of a core a run.

`python -m experiments.finetune.sweep [SEEDS]` can be stopped at any moment; the same command goes on from there.
"""

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kltest.finetune.models import load
from kltest.finetune.tasks import task_named

from .experiment import COMMITTED, compute, settings_for
from .settings import METRICS, SEEDS, SETTINGS

KEY = ("seed", "task", "variant", "beta")
COLUMNS = (*KEY, "seconds", "update", *METRICS)


def sweep(path: Path, seeds: int, **changes: Any) -> None:
    """Add the runs of the first `seeds` seeds that are not in the file; `changes` are of the settings in SAME."""
    done = whole_lines(path)
    for one in SETTINGS.configurations(SETTINGS.grid("full", ["part=run"], seeds)):
        if tuple(str(one[name]) for name in KEY) in done:
            continue
        one |= changes
        settings = settings_for(one)
        # The time in which the reference learns is not the run's.
        load(settings, task_named(settings.task), torch.device("cpu"))
        began = time.process_time()
        rows = compute(one)
        changing = {name: json.dumps([row[name] for row in rows]) for name in ("update", *METRICS)}
        line = {**one, "seconds": round(time.process_time() - began, 1), **changing}
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n").writerow(line)


def whole_lines(path: Path) -> set[tuple[str, ...]]:
    """Return the keys of a table's lines; a line without its end is cut off, a missing header written."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1] or ",".join(COLUMNS) + "\n"
    path.write_text(whole, encoding="utf-8")
    return {tuple(line[name] for name in KEY) for line in csv.DictReader(whole.splitlines())}


if __name__ == "__main__":
    sweep(COMMITTED, int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
