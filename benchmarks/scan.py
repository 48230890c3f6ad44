"""How well `kltest scan` finds and names the KL terms of public repositories, against labels made by hand.

    python -m benchmarks.scan FOLDER [--half used|held|later|opened] [--only NAME] [--found] [--record]

FOLDER holds a checkout of each repository of `tests/scan/repositories.csv` at its commit, in OWNER+NAME. A find is
right if its lines meet those of a labelled term, or are one of its uses; a label is found if a find meets it. Labels
that are unsure may be found and need not be. A name is right if the gradient that is followed with the sampler equal to
the policy is the labelled one, up to a positive factor; "not run" and "unnamed" are honest. `--found` only searches:
nothing is graded. `--record` writes the counts of each repository to `scan.csv`, from which the documentation shows
them. Its rows `first` are those of `later`, as the scan of revision 320d790 saw them: the labels were made before that,
and the scan was changed for them after it. Its rows `opened` are the first look at those six, as the scan of revision
15e596d saw them, without JAX; `unopened` are the one look of the scan on the symbolic evaluator, of revision 50f4d2f.
These three are never replaced: `opened` and `unopened` are counted again in `scan_again.csv`, by a scan that was
changed for all of these trees, as `used`, `later` and `held` are: all of them of revision 56c8edad. For these only what
is counted here was graded, the names on-policy, on a machine that others used as well: they have no seconds.

A label gives the gradients of a variant as they were called when it was written. What has got a name since, as the
Jensen-Shannon divergence has, has that beside "unnamed": either is right. A name of a support stands for any k.

Which row of the scan stands for which labelled variant:

A row meets the labels whose lines it meets: of these, those of its own place (a loss, or a reward or advantage) and of
helpers, if there are any.

1. Rows and labels that meet are matched one to one, so that the sum of what each pair shares is greatest: the
   words of both configurations over the words of either. Between matches that share as much, right names decide. A row
   that shares a word with some label is matched with such labels alone, one that shares none only if right or honest.
2. A row stands for each label that has all of its words, too, if it is honest, or right for every such label: a row
   without a configuration speaks of the whole term.
3. A row that was not matched, and whose name is that of no label which it meets, stands for the label with which
   it shares most.

The words of a configuration are its names and values. A part that begins with "not", "no" or "without" denies its
words; "other", "otherwise" and a comparison are one word, and the numbers of a comparison are none.

A labelled variant is **wrong** if a row that stands for it states a name that no label has which the row meets; else
**right** if one states a name of its own; else **not answered** if one is honest; else **silent** if its lines are
found (also where its row names the gradient of another label); else **missed**. Labels that are unsure are not counted.
"""

import csv
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import pandas
import typer
from scipy.optimize import linear_sum_assignment

import kltest
from benchmarks.measure import record
from kltest.names import SUPPORT_SIZE
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store
from kltest.truth.atlas import resized

LABELS = Path(__file__).parents[1] / "tests" / "scan"
RECORD = Path(__file__).parent / "scan.csv"
AGAIN = RECORD.with_name("scan_again.csv")
"""What is counted again of repositories whose one look is recorded."""
LOOKED_AT_ONCE = ("opened", "unopened")
UNLABELLED = re.compile(r"(^|/)(tests?|docs?)/|(^|/)(test_|conftest)")
Span = tuple[str, int, int]
UNGRADED = "not graded"
HONEST = frozenset({"not run", "unnamed", "failed", "inconclusive", UNGRADED})
DENIALS = frozenset({"not", "no", "without"})
COMPARISONS = frozenset({"<", ">", "!=", "other", "otherwise"})
SEARCHED = ("terms", "found", "finds", "finds right")
KINDS = ("named right", "not run or unnamed", "named wrong")
OUTCOMES = ("right", "not answered", "silent", "missed", "wrong")
COUNTS = (*SEARCHED, "variants", *KINDS, *OUTCOMES)


def normal(name: str) -> str:
    """Return the name of a gradient up to a positive factor and the order of its terms, without what says it moves."""
    text = name.split(" (")[0].strip()
    parts = re.findall(r"([+-]?)(?:([\d.]+(?:e-?\d+)?)\*)?([a-z]\w*(?:@\w+)?)", text.replace(" ", ""))
    if text in HONEST or not parts:
        return text
    parts.sort(key=lambda part: part[2])
    first = float(parts[0][1] or 1)
    return " ".join(
        f"{sign or '+'}{float(number or 1) / first:.3g}*{resized(which, SUPPORT_SIZE)}" for sign, number, which in parts
    )


def words(variant: str) -> frozenset[str]:
    """Return the words of a configuration, of the scan or of a label; those that are denied begin with "not"."""
    found = set()
    for part in re.split(r",(?![^()]*\))", variant.lower()):  # a comma in brackets parts nothing
        own = re.findall(r"\d+\.?\d*|\w+|[<>]|!=", part)
        denied = "not " if own and own[0] in DENIALS else ""
        compared = not COMPARISONS.isdisjoint(own)
        if compared:
            found.add("otherwise")
        for word in own:
            if not word[0].isdigit():
                found |= {f"{denied}{word}"} - {f"{denied}{each}" for each in (*DENIALS, *COMPARISONS, "with")}
            elif not compared:
                found.add(f"{denied}{float(word):g}")
    return frozenset(found)


def shared(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the words of both over the words of either; 1 without any."""
    return len(one & other) / len(one | other) if one | other else 1.0


@dataclass(frozen=True)
class Label:
    """One labelled variant: its row of the table, the lines of its term and of its uses, its words and gradients."""

    row: dict[str, str]
    term: Sequence[Span]
    uses: Sequence[Span]
    words: frozenset[str]
    names: frozenset[str]

    @property
    def unsure(self) -> bool:
        """Return True if it may be found and need not be."""
        return self.row["certainty"] == "unsure"

    @classmethod
    def of(cls, row: dict[str, str]) -> "Label":
        """Return the label of a row."""
        whole = re.search(r"place:(\d+)-(\d+)", row["note"])  # that of a helper, of which a row is one branch
        first, last = whole.groups() if whole else (row["first"], row["last"])
        uses = [spot.rsplit(":", 1) for spot in row["uses"].split(";") if re.search(r":\d+$", spot)]
        return cls(
            row,
            [(row["file"], int(first), int(last))],
            [(file, int(line), int(line)) for file, line in uses],
            words(row["variant"]),
            frozenset(normal(name) for name in row["current"].split(" or ")),
        )


def labels(half: str) -> dict[str, list[Label]]:
    """Return the labelled variants of one half by repository."""
    found: dict[str, list[Label]] = {}
    with (LABELS / f"terms_{half}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["repository"], []).append(Label.of(row))
    return found


@dataclass(frozen=True, eq=False)
class Result:
    """A row of the scan, which labels it meets, by number, what it names, and which of KINDS that is."""

    row: Any
    met: Sequence[int]
    words: frozenset[str]
    named: str
    kind: str


def results(known: Sequence[Label], met: Sequence[int], rows: Sequence[Any]) -> Iterator[Result]:
    """Yield the variants of a find whose lines meet some labels."""
    for row in rows:
        own = [number for number in met if _is_of_place(known[number].row["place"], row.place)] or met
        names = frozenset[str]().union(*(known[number].names for number in own))
        named = normal(row.gradients.get("current", row.status))
        right, honest, wrong = KINDS
        kind = right if named in names else honest if HONEST & {named, row.status} else wrong
        yield Result(row, own, words(row.variant), named, kind)


def _is_of_place(labelled: str, place: str) -> bool:
    """Return True if a row of a place may stand for a label of another, as a helper comes to any."""
    anywhere = {"", "helper", "logged"}
    return bool(anywhere & {labelled, place}) or (labelled == "loss") == (place == "loss")


def matched(known: Sequence[Label], rows: Sequence[Result]) -> dict[int, Result]:
    """Return the row that is matched with each label, by its number."""
    weights = numpy.zeros((len(known), len(rows)))
    for column, row in enumerate(rows):
        shares = {number: shared(known[number].words, row.words) for number in row.met}
        for number, share in shares.items():
            right = row.named in known[number].names
            if share or (not any(shares.values()) and (right or row.kind == "not run or unnamed")):
                # A right name weighs less than any word, and being matched at all less than that.
                weights[number, column] = share + 1e-3 * right + 1e-6
    pairs = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
    return {int(number): rows[int(column)] for number, column in pairs if weights[number, column]}


def standing(known: Sequence[Label], rows: Sequence[Result]) -> Iterator[tuple[int, Result]]:
    """Yield each label, by number, with each row that stands for it, in the order of the rules."""
    match = matched(known, rows)
    yield from match.items()
    for row in rows:
        general = [number for number in row.met if row.words <= known[number].words]
        if row.kind == "named wrong":
            if row not in match.values():
                yield max(row.met, key=lambda number: shared(known[number].words, row.words)), row
        elif row.kind != "named right" or all(row.named in known[number].names for number in general):
            yield from ((number, row) for number in general)


def outcome(label: Label, rows: Sequence[Result], *, found: bool) -> tuple[str, Result | None]:
    """Return which of OUTCOMES a label has by the rows that stand for it, and the row that decides."""
    for which, decides in (
        ("wrong", lambda row: row.kind == "named wrong"),
        ("right", lambda row: row.named in label.names),
        ("not answered", lambda row: row.kind == "not run or unnamed"),
    ):
        for row in filter(decides, rows):
            return which, row
    return ("silent" if found else "missed"), next(iter(rows), None)


def meet(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Return True if a line of a file is in both."""
    return any(
        file == other and first <= end and begin <= last
        for (file, first, last), (other, begin, end) in product(spans, others)
    )


def scanned(root: Path, *, graded: bool = True) -> Iterator[tuple[list[Span], list[Any]]]:
    """Yield what the scan finds in a repository: its lines in one or more files, and a row a variant."""
    rows = kltest.scan(root, jobs=2).rows if graded else Search(list(contents([root], [])), Store(None))
    for (parts, _), own in groupby(rows, key=lambda row: (row.parts, row.function)):
        yield [(str(Path(file).relative_to(root)), first, last) for file, first, last in parts], list(own)


def compare(known: Sequence[Label], finds: Sequence[tuple[list[Span], list[Any]]]) -> dict[str, int]:
    """Return what is recorded of a repository; print each find and each labelled variant that is not right."""
    count: Counter[str] = Counter()
    rows: list[Result] = []
    for spans, variants in finds:
        (file, first, last), *_ = spans
        if UNLABELLED.search(file):
            continue
        met = [number for number, label in enumerate(known) if meet(spans, label.term)]
        rows += results(known, met, variants if met else ())
        count["finds"] += 1
        if met or any(meet(spans[:1], label.uses) for label in known):
            count["finds right"] += 1
        else:
            print(f"  no term: {file}:{first}-{last} {variants[0].function} {variants[0].place}")
    count["variants"] = len(rows)
    count.update(row.kind for row in rows)
    terms = {}
    stands = list(standing(known, rows))
    for number, label in enumerate(known):
        if label.unsure:
            continue
        found = any(meet(spans, label.term) for spans, _ in finds)
        terms[label.term[0][:2]] = found
        which, row = outcome(label, [row for other, row in stands if other == number], found=found)
        count[which] += 1
        if which != "right" and (row is None or row.row.status != UNGRADED):
            print(f"  {which}: {told(label)}: {said(row)}")
    count["terms"], count["found"] = len(terms), sum(terms.values())
    return {name: count[name] for name in COUNTS}


def told(label: Label) -> str:
    """Return where a labelled variant stands and what it is."""
    row = label.row
    return f"{row['repository']} {row['file']}:{row['first']} [{row['variant']}] {row['kind']} {row['place']}"


def said(result: Result | None) -> str:
    """Return what the scan says of a label, where and why; nothing without a row."""
    if result is None:
        return "nothing"
    row = result.row
    why = f" ({row.why.splitlines()[0][:100]})" if row.why else ""
    return f"line {row.line} {row.place} [{row.variant}] {row.gradients.get('current', row.status)}{why}"


def main(
    folder: Path,
    half: Literal["used", "held", "later", "opened", "unopened"] = "used",
    *,
    write: Annotated[bool, typer.Option("--record", help="Write the counts to scan.csv or scan_again.csv.")] = False,
    only: Annotated[str, typer.Option(help="Repositories whose name contains this.")] = "",
    search: Annotated[
        bool, typer.Option("--found", help="Only search: what is found, and what is not liftable.")
    ] = False,
) -> None:
    """Compare each repository of a half with its labels, and print what was found and named."""
    if write and search:
        raise typer.BadParameter("--found grades nothing that --record could write")
    chosen = {repository: known for repository, known in labels(half).items() if only in repository}
    if not chosen:
        raise typer.BadParameter(
            f"no repository of {half!r} has {only!r} in its name; there are {', '.join(labels(half))}"
        )
    counted = []
    shown = SEARCHED if search else COUNTS
    for repository, known in chosen.items():
        began = time.monotonic()
        root = (folder / repository.replace("/", "+")).resolve()
        count = compare(known, list(scanned(root, graded=not search)))
        place = {"date": f"{date.today()}", "half": half, "repository": repository}
        numbers = {name: count[name] for name in shown}
        counted.append({**place, **numbers, "seconds": round(time.monotonic() - began)})
        print(", ".join(f"{name} {value}" for name, value in counted[-1].items()), flush=True)
    frame = pandas.DataFrame(counted)
    print(frame[list(shown)].sum().to_string())
    if write:
        record(AGAIN if half in LOOKED_AT_ONCE else RECORD, frame, by=("half", "repository"))


if __name__ == "__main__":
    typer.run(main)
