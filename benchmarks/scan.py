"""How well `kltest scan` finds and names the KL terms of public repositories, against labels made by hand.

    python -m benchmarks.scan FOLDER [--half used|held|later] [--record]

FOLDER holds a checkout of each repository of `tests/scan/repositories.csv` at its commit, in OWNER+NAME. A find is
right if its lines meet those of a labelled term, or are one of its uses; a label is found if a find meets it. Labels
that are unsure may be found and need not be. A name is right if the gradient that is followed with the sampler equal to
the policy is the labelled one, up to a positive factor; "not run" and "unnamed" are honest. `--record` writes the
counts of each repository to `scan.csv`, from which the documentation shows them. Its rows `first` are those of `later`,
as the scan of revision 320d790 saw them: the labels were made before that, and the scan was changed for them after it.
"""

import csv
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas
import typer

import kltest
from benchmarks.measure import record

LABELS = Path(__file__).parents[1] / "tests" / "scan"
RECORD = Path(__file__).parent / "scan.csv"
HONEST = frozenset({"not run", "unnamed", "failed", "inconclusive"})
COUNTS = ("terms", "found", "finds", "finds right", "variants", "named right", "not run or unnamed", "named wrong")


def labels(half: str) -> dict[str, list[dict[str, Any]]]:
    """Return the labelled rows of one half by repository."""
    found: dict[str, list[dict[str, Any]]] = {}
    with (LABELS / f"terms_{half}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            whole = re.search(r"place:(\d+)-(\d+)", row["note"])  # that of a helper, of which a row is one branch
            first, last = whole.groups() if whole else (row["first"], row["last"])
            uses = [spot.rsplit(":", 1) for spot in row["uses"].split(";") if re.search(r":\d+$", spot)]
            lines = {"first": int(first), "last": int(last), "uses": [(where, int(line)) for where, line in uses]}
            found.setdefault(row["repository"], []).append({**row, **lines})
    return found


class Find:
    """What the scan lists at one place: a row a variant, and its lines in files of the repository."""

    def __init__(self, rows: Sequence[Any], root: Path) -> None:
        self.rows = rows
        self.parts = [(str(Path(file).relative_to(root)), first, last) for file, first, last in rows[0].parts]
        self.file, self.first, self.last = self.parts[0]

    def meets(self, row: dict[str, Any]) -> bool:
        """Return True if it stands where a labelled term does."""
        return any(
            file == row["file"] and first <= row["last"] and row["first"] <= last for file, first, last in self.parts
        )

    def uses(self, row: dict[str, Any]) -> bool:
        """Return True if it is a use of a labelled term."""
        return any(self.file == file and self.first <= line <= self.last for file, line in row["uses"])

    def is_test(self) -> bool:
        """Return True in files that no label speaks of: tests and documentation."""
        return bool(re.search(r"(^|/)(tests?|docs?)/|(^|/)(test_|conftest)", self.file))


def scanned(root: Path) -> Iterator[Find]:
    """Yield what the scan finds in a repository."""
    for _, group in groupby(kltest.scan(root, jobs=2).rows, key=lambda row: (row.parts, row.function)):
        yield Find(list(group), root)


def normal(name: str) -> str:
    """Return the name of a gradient up to a positive factor and the order of its terms, without what says it moves."""
    text = name.split(" (")[0].strip()
    parts = re.findall(r"([+-]?)(?:([\d.]+(?:e-?\d+)?)\*)?([a-z]\w*(?:@\w+)?)", text.replace(" ", ""))
    if text in HONEST or not parts:
        return text
    parts.sort(key=lambda part: part[2])
    first = float(parts[0][1] or 1)
    return " ".join(f"{sign or '+'}{float(number or 1) / first:.3g}*{which}" for sign, number, which in parts)


def compare(rows: Sequence[dict[str, Any]], finds: Sequence[Find]) -> dict[str, int]:
    """Return what is recorded of a repository, and shown; print what is wrong."""
    count: Counter[str] = Counter()
    for find in (one for one in finds if not one.is_test()):
        right = [row for row in rows if find.meets(row)]
        kind = "right" if right or any(find.uses(row) for row in rows) else "wrong"
        count["finds"] += 1
        count[f"finds {kind}"] += 1
        if kind == "wrong":
            print(f"  no term: {find.file}:{find.first}-{find.last} {find.rows[0].function} {find.rows[0].place}")
        known = {normal(name) for row in right for name in row["current"].split(" or ")}
        for result in find.rows if right else ():
            named = normal(result.gradients.get("current", result.status))
            honest = named in HONEST or result.status in HONEST
            kind = "named right" if named in known else "not run or unnamed" if honest else "named wrong"
            count["variants"] += 1
            count[kind] += 1
            if kind != "named right":
                place = f"{find.file}:{find.first} {result.place} [{result.variant}]"
                print(f"  {kind}: {place} {named} {result.why[:90]}; labelled {sorted(known)}")
    places = {(row["file"], row["first"]): row for row in rows if row["certainty"] != "unsure"}
    count["terms"] = len(places)
    for (file, first), row in places.items():
        met = any(find.meets(row) for find in finds)
        count["found"] += met
        if not met:
            print(f"  missed: {file}:{first}-{row['last']} {row['variant']} {row['kind']} {row['place']}")
    return {name: count[name] for name in COUNTS}


def main(
    folder: Path,
    half: Literal["used", "held", "later"] = "used",
    *,
    write: Annotated[bool, typer.Option("--record", help="Write the counts to scan.csv.")] = False,
    only: Annotated[str, typer.Option(help="Repositories whose name contains this.")] = "",
) -> None:
    """Compare each repository of a half with its labels, and print what was found and named."""
    counted = []
    for repository, rows in labels(half).items():
        if only in repository:
            began = time.monotonic()
            count = compare(rows, list(scanned((folder / repository.replace("/", "+")).resolve())))
            place = {"date": f"{date.today()}", "half": half, "repository": repository}
            counted.append({**place, **count, "seconds": round(time.monotonic() - began)})
            print(", ".join(f"{name} {value}" for name, value in counted[-1].items()))
    frame = pandas.DataFrame(counted)
    print(frame[list(COUNTS)].sum().to_string())
    if write:
        record(RECORD, frame, by=("half", "repository"))


if __name__ == "__main__":
    typer.run(main)
