"""Losses of public trainers, graded by FILE:NAME alone, against labels that were written before.

`python -m benchmarks.trainers FOLDER…`, with checkouts that are named OWNER+NAME in the folders.
A loss agrees if its verdict is the labelled one and the gradient that it follows in `sequence` on-policy is a positive
multiple of the labelled one, or of one of several. It is wrong if it has another name, and not graded if it has none.
"""

import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kltest.files import as_csv, write
from kltest.report import WORST_FIRST

LABELS, RESULTS = (Path(__file__).with_name(f"trainers{name}.csv") for name in ("_labels", ""))
FIELDS = ("repository", "file", "name", "follows", "verdict", "found", "graded", "answer", "seconds")
SECONDS = 240


def main(folders: list[str]) -> None:
    rows = []
    for label in csv.DictReader(LABELS.open(encoding="utf-8")):
        began = time.monotonic()
        reports, error = graded(checkout(folders, label["repository"]), f"{label['file']}:{label['name']}")
        row = {**label, **answered(label, reports), "seconds": round(time.monotonic() - began)}
        rows.append({name: row[name] for name in FIELDS})
        print(
            f"{row['answer']:<10}{label['repository']} {label['name']}: {row['graded']}, {row['found']} {error}",
            flush=True,
        )
    write(RESULTS, as_csv(rows))


def checkout(folders: Sequence[str], repository: str) -> Path:
    """Return the folder that is named after a repository, in one of some folders."""
    return next(path for one in folders if (path := Path(one, repository.replace("/", "+"))).is_dir())


def graded(folder: Path, target: str) -> tuple[list[dict[str, Any]], str]:
    """Return the reports of a target that is graded in its checkout, and the last line of what went wrong."""
    command = [sys.executable, "-m", "kltest", "grade", target, "--output", "json"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"more than {SECONDS} s"
    found = json.loads(done.stdout) if done.stdout else []
    reports = found if isinstance(found, list) else [found]
    error = next((one["error"] for one in reports if one["error"]), "" if reports else done.stderr)
    return reports, (error.strip().splitlines() or [""])[-1][:150]


def answered(label: Mapping[str, str], reports: list[dict[str, Any]]) -> dict[str, str]:
    """Return the verdict and the names that were found, and whether they are the labelled ones."""
    verdict = min((one["verdict"] for one in reports), key=WORST_FIRST.index, default="error")
    names = list(dict.fromkeys(name for report in reports for name in followed(report)))
    wanted = {one.rpartition("*")[2] for one in label["follows"].split(" or ")}
    if verdict in ("error", "inconclusive") or not names:
        answer = "not graded"
    elif set(names) <= wanted:
        answer = "agrees" if verdict == label["verdict"] else "verdict"
    else:
        answer = "not graded" if "unnamed" in names else "wrong"
    return {"found": " or ".join(names), "graded": verdict, "answer": answer}


def followed(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is followed on-policy where rollouts have one length: a name without a positive factor."""
    for row in report["gradients"]:
        if (row["environment"], row["sampler"]) == ("sequence", "current"):
            found = row["identified"]
            alone = found and len(found) == 1
            yield "unnamed" if not found else next(iter(found)) if alone and min(found.values()) >= 0 else str(found)


if __name__ == "__main__":
    main(sys.argv[1:])
