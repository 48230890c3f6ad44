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
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas
import typer

import kltest
from benchmarks.measure import record

LABELS = Path(__file__).parents[1] / "tests" / "scan"
RECORD = Path(__file__).parent / "scan.csv"
UNLABELLED = re.compile(r"(^|/)(tests?|docs?)/|(^|/)(test_|conftest)")
Span = tuple[str, int, int]
HONEST = frozenset({"not run", "unnamed", "failed", "inconclusive"})
COUNTS = ("terms", "found", "finds", "finds right", "variants", "named right", "not run or unnamed", "named wrong")


def labels(half: str) -> dict[str, list[dict[str, Any]]]:
    """Return the labelled rows of one half by repository, with the lines of the `term` and of its `uses`."""
    found: dict[str, list[dict[str, Any]]] = {}
    with (LABELS / f"terms_{half}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            whole = re.search(r"place:(\d+)-(\d+)", row["note"])  # that of a helper, of which a row is one branch
            first, last = whole.groups() if whole else (row["first"], row["last"])
            uses = [spot.rsplit(":", 1) for spot in row["uses"].split(";") if re.search(r":\d+$", spot)]
            spans = {"term": [(row["file"], int(first), int(last))], "uses": [(at, int(n), int(n)) for at, n in uses]}
            found.setdefault(row["repository"], []).append({**row, **spans})
    return found


def meet(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Return True if a line of a file is in both."""
    return any(
        file == other and first <= end and begin <= last
        for (file, first, last), (other, begin, end) in product(spans, others)
    )


def scanned(root: Path) -> Iterator[tuple[list[Span], list[Any]]]:
    """Yield what the scan finds in a repository: its lines in one or more files, and a row a variant."""
    for (parts, _), rows in groupby(kltest.scan(root, jobs=2).rows, key=lambda row: (row.parts, row.function)):
        yield [(str(Path(file).relative_to(root)), first, last) for file, first, last in parts], list(rows)


def normal(name: str) -> str:
    """Return the name of a gradient up to a positive factor and the order of its terms, without what says it moves."""
    text = name.split(" (")[0].strip()
    parts = re.findall(r"([+-]?)(?:([\d.]+(?:e-?\d+)?)\*)?([a-z]\w*(?:@\w+)?)", text.replace(" ", ""))
    if text in HONEST or not parts:
        return text
    parts.sort(key=lambda part: part[2])
    first = float(parts[0][1] or 1)
    return " ".join(f"{sign or '+'}{float(number or 1) / first:.3g}*{which}" for sign, number, which in parts)


def compare(rows: Sequence[dict[str, Any]], finds: Sequence[tuple[list[Span], list[Any]]]) -> dict[str, int]:
    """Return what is recorded of a repository, and shown; print what is wrong."""
    count: Counter[str] = Counter()
    for spans, results in finds:
        (file, first, last), *_ = spans
        if UNLABELLED.search(file):
            continue
        right = [row for row in rows if meet(spans, row["term"])]
        count["finds"] += 1
        if right or any(meet(spans[:1], row["uses"]) for row in rows):
            count["finds right"] += 1
        else:
            print(f"  no term: {file}:{first}-{last} {results[0].function} {results[0].place}")
        known = {normal(name) for row in right for name in row["current"].split(" or ")}
        for result in results if right else ():
            named = normal(result.gradients.get("current", result.status))
            honest = named in HONEST or result.status in HONEST
            kind = "named right" if named in known else "not run or unnamed" if honest else "named wrong"
            count["variants"] += 1
            count[kind] += 1
            if kind != "named right":
                place = f"{file}:{first} {result.place} [{result.variant}]"
                print(f"  {kind}: {place} {named} {result.why[:90]}; labelled {sorted(known)}")
    terms = {row["term"][0][:2]: row for row in rows if row["certainty"] != "unsure"}
    count["terms"] = len(terms)
    for (file, first), row in terms.items():
        if any(meet(spans, row["term"]) for spans, _ in finds):
            count["found"] += 1
        else:
            print(f"  missed: {file}:{first} {row['variant']} {row['kind']} {row['place']}")
    return {name: count[name] for name in COUNTS}


def main(
    folder: Path,
    half: Literal["used", "held", "later", "opened", "unopened"] = "used",
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
