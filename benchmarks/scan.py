"""How well `kltest scan` finds and names the KL terms of public repositories, against labels made by hand.

    python -m benchmarks.scan FOLDER [--half used|held|later] [--record]

FOLDER holds a checkout of each repository of `tests/scan/repositories.csv` at its commit, in OWNER+NAME. A find is
right if its lines meet those of a labelled term, or are one of its uses; a label is found if a find meets it. Labels
that are unsure may be found and need not be. A name is right if the gradient that is followed with the sampler equal to
the policy is the labelled one, up to a positive factor; "not run" and "unnamed" are honest. `--record` writes the
counts of each repository to `scan.csv`, from which the documentation shows them. Its rows `first` are those of `later`,
as the scan of revision 320d790 saw them: the labels were made before that, and the scan was changed for them after it.
"""

import argparse
import csv
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas

LABELS = Path(__file__).parents[1] / "tests" / "scan"
RECORD = Path(__file__).parent / "scan.csv"
HONEST = frozenset({"not run", "unnamed", "failed", "inconclusive"})


def labels(half: str) -> dict[str, list[dict[str, Any]]]:
    """Return the labelled rows of one half by repository."""
    found: dict[str, list[dict[str, Any]]] = {}
    with (LABELS / f"terms_{half}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            whole = re.search(r"place:(\d+)-(\d+)", row["note"])  # that of a helper, of which a row is one branch
            first, last = whole.groups() if whole else (row["first"], row["last"])
            found.setdefault(row["repository"], []).append({**row, "first": int(first), "last": int(last)})
    return found


def meets(find: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return True if a find stands where a labelled term does."""
    return any(
        file == row["file"] and first <= row["last"] and row["first"] <= last for file, first, last in find["parts"]
    )


def used(find: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return True if a find is a use of a labelled term."""
    spots = (spot.rsplit(":", 1) for spot in row["uses"].split(";") if ":" in spot)
    return any(
        find["file"] == file and find["first"] <= int(line) <= find["last"] for file, line in spots if line.isdigit()
    )


def normal(name: str) -> str:
    """Return the name of a gradient up to a positive factor and the order of its terms, without what says it moves."""
    text = name.split(" (")[0].strip()
    parts = re.findall(r"([+-]?)(?:([\d.]+(?:e-?\d+)?)\*)?([a-z]\w*(?:@\w+)?)", text.replace(" ", ""))
    if text in HONEST or not parts:
        return text
    parts.sort(key=lambda part: part[2])
    first = float(parts[0][1] or 1)
    return " ".join(f"{sign or '+'}{float(number or 1) / first:.3g}*{which}" for sign, number, which in parts)


def scanned(folder: Path, repository: str, *, grade: bool) -> Iterator[dict[str, Any]]:
    """Yield what the scan finds in a repository: place and, if graded, what each variant follows."""
    import kltest
    from kltest.scanning.search import Search, Store
    from kltest.scanning.sources import contents

    root = (folder / repository.replace("/", "+")).resolve()
    rows = kltest.scan(root, jobs=2).rows if grade else list(Search(list(contents([root], [])), Store(None)))
    for _, group in groupby(rows, key=lambda row: (row.parts, row.function)):
        own = list(group)
        parts = [(str(Path(file).relative_to(root)), first, last) for file, first, last in own[0].parts]
        file, first, last = parts[0]
        yield {
            "parts": parts,
            "file": file,
            "first": first,
            "last": last,
            "place": own[0].place,
            "title": own[0].function,
            "results": own if grade else [],
        }


def is_test(file: str) -> bool:
    """Return True for the files that no label speaks of: tests and documentation."""
    return bool(re.search(r"(^|/)(tests?|docs?)/|(^|/)(test_|conftest)", file))


def compare(repository: str, rows: Sequence[dict[str, Any]], finds: Sequence[dict[str, Any]]) -> Counter[str]:
    """Count what was found, missed and named; print what is wrong."""
    count: Counter[str] = Counter()
    for find in finds:
        if is_test(find["file"]):
            continue
        right = [row for row in rows if meets(find, row)]
        kind = "right" if right else "use" if any(used(find, row) for row in rows) else "wrong"
        count[f"find {kind}"] += 1
        if kind == "wrong":
            print(f"  no term: {find['file']}:{find['first']}-{find['last']} {find['title']} {find['place']}")
        known = {normal(name) for row in right for name in row["current"].split(" or ")}
        for result in find["results"] if right else ():
            told = normal(result.gradients.get("current", result.status))
            kind = "right" if told in known else "honest" if told in HONEST or result.status in HONEST else "wrong"
            count[f"name {kind}"] += 1
            if kind != "right":
                place = f"{find['file']}:{find['first']} {result.place} [{result.variant}]"
                print(f"  name {kind}: {place} {told} {result.why[:90]}; labelled {sorted(known)}")
    places = {(row["file"], row["first"]): row for row in rows if row["certainty"] != "unsure"}
    for (file, first), row in places.items():
        met = any(meets(find, row) for find in finds)
        count["label found" if met else "label missed"] += 1
        if not met:
            print(f"  missed: {file}:{first}-{row['last']} {row['variant']} {row['kind']} {row['place']}")
    return count


def counts(count: Counter[str]) -> dict[str, int]:
    """Return what is recorded of a repository, and shown."""
    return {
        "terms": count["label found"] + count["label missed"],
        "found": count["label found"],
        "finds": count["find right"] + count["find use"] + count["find wrong"],
        "finds right": count["find right"] + count["find use"],
        "variants": count["name right"] + count["name honest"] + count["name wrong"],
        "named right": count["name right"],
        "not run or unnamed": count["name honest"],
        "named wrong": count["name wrong"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare each repository of a half with its labels, and print what was found and named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=("used", "held", "later"), default="used")
    parser.add_argument("--find-only", action="store_true", help="Do not grade what is found.")
    parser.add_argument("--record", action="store_true", help="Write the counts to scan.csv.")
    parser.add_argument("--only", default="", help="Repositories whose name contains this.")
    given = parser.parse_args(arguments)
    counted = []
    for repository, rows in labels(given.half).items():
        if given.only not in repository:
            continue
        began = time.monotonic()
        count = compare(repository, rows, list(scanned(given.folder, repository, grade=not given.find_only)))
        seconds = round(time.monotonic() - began)
        counted.append(
            {
                "date": f"{date.today()}",
                "half": given.half,
                "repository": repository,
                **counts(count),
                "seconds": seconds,
            }
        )
        print(", ".join(f"{name} {value}" for name, value in counted[-1].items()))
    frame = pandas.DataFrame(counted)
    print(frame[[*counts(Counter())]].sum().to_string())
    if given.record:
        kept = pandas.read_csv(RECORD) if RECORD.exists() else frame[:0]
        again = (kept["half"] == given.half) & kept["repository"].isin(frame["repository"])
        pandas.concat([kept[~again], frame]).to_csv(RECORD, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
