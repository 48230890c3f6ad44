"""Losses of public trainers, graded by FILE:NAME alone, against labels that were written before.

`python -m benchmarks.trainers [--labels FILE] FOLDER…`, with checkouts that are named OWNER+NAME in the folders; the
answers to trainers_labels.csv are written to trainers.csv beside it.
A loss agrees if its verdict is the labelled one and the gradient that it follows in `sequence` on-policy is a positive
multiple of the labelled one, or of one of several. It is wrong if it has another name, unnamed if it has none where the
label has one, and not graded if nothing could be called or read.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kltest.files import as_csv, write
from kltest.report import WORST_FIRST

LABELS = Path(__file__).with_name("trainers_labels.csv")
FIELDS = ("repository", "file", "name", "follows", "verdict", "found", "graded", "answer", "seconds")
SECONDS = 240


def main(labels: Path, folders: Sequence[str]) -> None:
    rows = []
    for label in csv.DictReader(labels.open(encoding="utf-8")):
        began = time.monotonic()
        reports, error = graded(checkout(folders, label["repository"]), f"{label['file']}:{label['name']}")
        row = {**label, **answered(label, reports), "seconds": round(time.monotonic() - began)}
        rows.append({name: row[name] for name in FIELDS})
        print(
            f"{row['answer']:<13}{label['repository']} {label['name']}: {row['graded']}, {row['found']} {error}",
            flush=True,
        )
    write(labels.with_name(labels.name.replace("_labels", "")), as_csv(rows))
    print(", ".join(f"{count} {answer}" for answer, count in Counter(row["answer"] for row in rows).most_common()))


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
    wanted = {direction(combination(one)) for one in label["follows"].split(" or ")}
    if verdict == "error" or not names:
        answer = "not graded"
    elif verdict == "inconclusive":
        answer = "inconclusive"
    elif set(names) <= wanted and (names != ["unnamed"] or wanted == {"unnamed"}):
        answer = "agrees" if verdict == label["verdict"] else "verdict"
    else:
        answer = "unnamed" if "unnamed" in names else "wrong"
    return {"found": " or ".join(names), "graded": verdict, "answer": answer}


def followed(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the direction that is followed on-policy where rollouts have one length."""
    for row in report["gradients"]:
        if (row["environment"], row["sampler"]) == ("sequence", "current"):
            yield direction(row["identified"]) if row["identified"] else "unnamed"


def combination(text: str) -> dict[str, float]:
    """Return the coefficients of named gradients: of `0.1*local_forward_kl + 0.9*local_reverse_kl`."""
    terms = (term.rpartition("*") for term in text.split(" + "))
    return {name: float(coefficient or 1) for coefficient, _, name in terms}


def direction(coefficients: Mapping[str, float]) -> str:
    """Return the text of a combination up to a positive factor: their absolute values sum to 1."""
    size = sum(map(abs, coefficients.values())) or 1
    terms = {name: f"{coefficients[name] / size:.4g}" for name in sorted(coefficients)}
    return " + ".join(name if share in ("0", "1") else f"{share}*{name}" for name, share in terms.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, default=LABELS)
    parser.add_argument("folders", nargs="+")
    main(**vars(parser.parse_args()))
