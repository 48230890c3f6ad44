"""The losses that a scan found as targets of `kltest grade`, each with the gradient that it is to follow."""

import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kltest.grading.jobs import Job, graded
from kltest.grading.options import checked
from kltest.report import Report
from kltest.scanning.entries import MODULE
from kltest.scanning.judge import options
from kltest.scanning.lifting import REWARDS
from kltest.scanning.reading import instead, is_defined
from kltest.scanning.rows import OPEN, Row

REVERSE, LOCAL = "reverse_kl", "local_reverse_kl"
"""The gradients that are declared of what declares nothing itself."""
LONGEST = 90
"""Characters of a reason."""


@dataclass(frozen=True)
class Held:
    """A loss as it is to be graded.

    `placed` are the options of a term that only comes to rewards, and `failures` the codes that fail today, with
    reasons. If it is `mixed`, several of its variants decide, and they do not all fail the same checks.
    """

    text: str
    expect: str
    placed: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    mixed: bool = False


def declared(rows: Iterable[Row]) -> list[Held]:
    """Return the functions that compute a term of a loss or reward, as `FILE:NAME`, and what each is to follow.

    It is what a comment declares, else the reverse KL: its next-token part, where a term follows such parts.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.state in ("passed", "finding") and row.place != "logged" and row.function != MODULE:
            found.setdefault(f"{row.file}:{row.function}", []).append(row)
    losses = []
    for text, own in found.items():
        is_local = any("local_" in name for row in own for name in row.gradients.values())
        said = [row.declared for row in own if row.declared]
        places = {row.place for row in own}
        placed = options(*places) if len(places) == 1 and not places.isdisjoint(REWARDS) else {}
        if text.rpartition(":")[0].endswith(".py") and is_defined(text):
            losses.append(Held(text, said[0] if said else LOCAL if is_local else REVERSE, placed))
    return losses


def undecided(rows: Iterable[Row], losses: Iterable[Held]) -> dict[str, str]:
    """Return functions of which the scan left a term undecided and which are not among losses, with the reason.

    A term outside of functions is named by its spot.
    """
    known = {loss.text for loss in losses}
    found: dict[str, str] = {}
    for row in rows:
        text = row.spot if row.function == MODULE else f"{row.file}:{row.function}"
        if row.state in OPEN and text not in known:
            state = "not run by the scan" if row.state == "not run" else row.state
            found.setdefault(text, ": ".join(filter(None, [state, row.why.partition("\n")[0]])))
    return found


def held(
    wanted: Sequence[Held], progress: Callable[[str, bool], None] = lambda name, is_new: None
) -> tuple[list[Held], dict[str, str]]:
    """Grade losses, and return them with what fails today, and those that cannot be held with the reason.

    A loss that cannot be graded at the place where the scan saw its term, as a whole loss with the KL in its reward, is
    graded once more as `kltest grade` does without options.

    Args:
        wanted: losses of which nothing is known to fail.
        progress: called with the name of each report that is finished, and whether it is the first of its loss.
    """
    jobs = []
    for loss in wanted:
        given = checked({"expect": loss.expect, **loss.placed}, lambda option: option.name)
        jobs.append(Job(loss.text, loss.text, given))
    reports: dict[int, dict[float, Report]] = {}
    with tempfile.TemporaryDirectory(prefix="kltest-read-") as folder:

        def deciding(job: Job, report: Report) -> list[Job]:
            return [one for one in instead(job, report, Path(folder)) if not one.beside]

        for number, report, _ in graded(jobs, deciding, refuses=False):
            progress(report.target, int(number) not in reports)
            reports.setdefault(int(number), {})[number] = report
    found, left = [], {}
    for number, loss in enumerate(wanted):
        several = [report for _, report in sorted(reports[number].items())]
        if loss.placed and any(report.verdict == "error" for report in several):
            again, why_not = held([replace(loss, placed={})], lambda name, _: progress(name, False))
            found += again
            left.update(why_not)
            continue
        if why := _why_not(several):
            left[loss.text] = why
            continue
        codes = {check.code: _reason(check.message) for report in several for check in report.errors}
        mixed = any({check.code for check in report.errors} != codes.keys() for report in several)
        found.append(replace(loss, failures=dict(sorted(codes.items())), mixed=mixed))
    return found, left


def _why_not(reports: Sequence[Report]) -> str:
    """Return why a loss cannot be held, or the empty string: it fails, is not decided, or is refuted by no check."""
    for report in reports:
        if report.verdict == "error":
            return report.error.partition("\n")[0]
        if report.verdict == "inconclusive" or (report.verdict == "refuted" and not report.errors):
            return f"{report.verdict}: kltest grade {shlex.quote(report.target.partition(' [')[0])} says more"
    return ""


def _reason(message: str) -> str:
    first = message.partition(". ")[0].rstrip(".")
    return f"found by kltest init: {first if len(first) <= LONGEST else first[: LONGEST - 1] + '…'}"
