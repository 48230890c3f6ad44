"""`kltest.scan`: find the KL terms of a source tree, lift and grade them, and say what each follows."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kltest.scanning.declarations import Key, Rules, said, speaks_of
from kltest.scanning.judge import TIMEOUT, Judge
from kltest.scanning.rows import Row, Scan
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store


class Interrupted(KeyboardInterrupt):
    """A scan that was interrupted, with what it had found; what is not graded has that status."""

    def __init__(self, scan: Scan) -> None:
        super().__init__()
        self.scan = scan


def scan(
    *paths: str | Path,
    jobs: int | None = None,
    timeout: float = TIMEOUT,
    cache: Path | None = None,
    baseline: Iterable[Key] = (),
    expect: str | None = None,
    rules: Rules | None = None,
    changed: Mapping[str, Sequence[range]] | None = None,
    run: bool = False,
    logged: bool = False,
    progress: Callable[[Row, int, int], None] = lambda row, done, total: None,
    reading: Callable[[str, int, int], None] = lambda file, number, total: None,
) -> Scan:
    """Find every KL term in source files, lift each into a function of rollout fields, and grade it.

    Nothing of the tree is imported or run: what is graded is tensor arithmetic that was written from it, in a child
    process.

    Args:
        paths: files and folders.
        jobs: how many terms are graded at once; by default as many as there are cores.
        timeout: seconds that grading one variant may take.
        cache: a folder in which results are kept by content.
        baseline: keys of rows that are known (`Row.key`); they are listed and count no longer.
        expect: what every term declares of which nothing else is said.
        rules: what a configuration says of files.
        changed: changed lines by the real path of their file; only terms that depend on one of them are graded.
        run: does nothing, as nothing of the tree is run.
        logged: list what is only logged as well, and ask whether it is a KL.
        reading: called with the file of each function that is followed, its number, and how many files there are.
        progress: called with a row as soon as it is graded, how many are, and of how many that are known so far.

    Returns:
        A Scan.

    Raises:
        UsageError: a path does not exist, or a comment says what kltest does not know.
        Interrupted: a KeyboardInterrupt, with the Scan as far as it had come.
    """
    rules = rules or Rules()
    left_out: list[str] = []
    files = list(contents([Path(path) for path in paths], left_out, rules.excludes))
    store = Store(cache)
    search = Search(files, store, logged=logged, reading=reading)
    found = Scan([], files=len(files))
    known = frozenset(baseline)

    def wanted() -> Iterator[Row]:
        for row in search:
            if changed is None or _is_changed(row, changed):
                _declare(row, rules, expect)
                found.rows.append(row)
                yield row

    try:
        with Judge(jobs or os.cpu_count() or 1, timeout, store) as judge:
            done = 0
            for row in judge.judged(wanted()):
                if judge.done > done:
                    done = judge.done
                    progress(row, done, judge.asked + search.left)
    except KeyboardInterrupt:
        if found.rows:
            raise Interrupted(found) from None
        raise
    finally:
        found.lines, found.left_out = search.lines, [*left_out, *search.left_out]
        found.files -= len(search.left_out)
        _mark_known(found.rows, known)
    if changed is None:
        found.notes = [*_loose(search, found), *_stale(known, found)]
        found.unread = search.unread
    return found


def _declare(row: Row, rules: Rules, expect: str | None) -> None:
    """Write into a row what comments, else the configuration, else the call declare and excuse."""
    declared, ignored = rules.of(row.file)
    for place, words in row.comments:
        name, codes = said(words, place)
        if not speaks_of(words, row.variant, row.place):
            continue
        declared, ignored = name or declared, {**ignored, **codes}
    row.declared, row.ignored = declared or expect or "", ignored


def _is_changed(row: Row, changed: Mapping[str, Sequence[range]]) -> bool:
    lines = ((first, last, span) for file, first, last in row.depends for span in changed.get(file, ()))
    return any(span.start <= last and first < span.stop for first, last, span in lines)


def _mark_known(rows: Sequence[Row], known: Iterable[Key]) -> None:
    """Mark the rows of the baseline, which may have lost errors since.

    An entry that no row is may be one of the same function that another version of kltest wrote otherwise.
    """
    names = {row.key[:-1] for row in rows}
    others = [each for each in known if each[:-1] not in names]
    for row in rows:
        own = [each for each in known if each[:-1] == row.key[:-1]]
        own = own or [each for each in others if each[:2] == row.key[:2]]
        row.known = any(set(row.codes) <= set(each[-1].split(",")) for each in own)


def _loose(search: Search, found: Scan) -> Iterator[str]:
    """Yield a line for each comment that stands on no term, or excuses what no variant of its term fails."""
    for place, words in search.loose:
        said(words, place)
        yield f"{place}: # kltest: {words} stands on no KL term"
    failed: dict[tuple[str, str], set[str]] = {}
    idle = dict.fromkeys((place, words) for row in found.rows for place, words in row.comments)
    for row in found.rows:
        for place, words in row.comments:
            if speaks_of(words, row.variant, row.place):
                idle.pop((place, words), None)
                ended = row.state in ("passed", "finding")
                failed.setdefault((place, words), set()).update(row.found, row.noted, () if ended else row.ignored)
    for place, words in idle:
        yield f"{place}: # kltest: {words} names no configuration of the term there, and no place of it"
    for (place, words), codes in failed.items():
        for code in said(words, place)[1].keys() - codes:
            yield f"{place}: {code} is excused, and does not fail"


def _stale(known: Iterable[Key], found: Scan) -> Iterator[str]:
    """Yield a line for each entry of the baseline that no row is any more."""
    for file, function, place, variant, _, codes in sorted(set(known) - {row.key for row in found.rows}):
        named = f"{function} [{variant}]" if variant else function
        yield f"{file}: {named} ({place}): baseline entry {codes} no longer occurs; regenerate the baseline"
