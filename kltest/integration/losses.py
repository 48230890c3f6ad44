"""The losses that a scan found as targets of `kltest grade`, each with the gradient that it is to follow."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kltest.grading.jobs import Job, graded
from kltest.grading.options import checked
from kltest.report import Report
from kltest.scanning.entries import MODULE
from kltest.scanning.reading import folded, instead, is_defined
from kltest.scanning.rows import Row

REVERSE, LOCAL = "reverse_kl", "local_reverse_kl"
"""The gradients that are declared of what declares nothing itself."""
LONGEST = 90
"""Characters of a reason."""


@dataclass(frozen=True)
class Held:
    """A loss as it is to be graded.

    `failures` are the codes that fail today, with reasons. If it is `mixed`, several of its variants decide, and they
    do not all fail the same checks.
    """

    text: str
    expect: str
    failures: Mapping[str, str] = field(default_factory=dict)
    mixed: bool = False


def declared(rows: Iterable[Row]) -> dict[str, str]:
    """Return the functions that compute a term of a loss or reward, as `FILE:NAME`, and what each is to follow.

    It is what a comment declares, else the reverse KL: its next-token part, where a term follows such parts.
    """
    found: dict[str, str] = {}
    for row in rows:
        text = f"{row.file}:{row.function}"
        if row.status not in ("passed", "finding", "known") or row.place == "logged" or row.function == MODULE:
            continue
        is_local = any("local_" in name for name in row.gradients.values()) or found.get(text) == LOCAL
        found[text] = row.declared or (LOCAL if is_local else REVERSE)
    return {
        text: expect for text, expect in found.items() if text.rpartition(":")[0].endswith(".py") and is_defined(text)
    }


def held(
    wanted: Mapping[str, str], progress: Callable[[str], None] = lambda name: None
) -> tuple[list[Held], dict[str, str]]:
    """Grade functions, and return them with what fails today, and those that cannot be held with the reason.

    Args:
        wanted: functions as `FILE:NAME`, and what each is to follow.
        progress: called with the name of each function that was graded.
    """
    jobs = [Job(text, text, checked({"expect": expect}, lambda option: option.name)) for text, expect in wanted.items()]
    reports: dict[int, dict[float, Report]] = {}
    with tempfile.TemporaryDirectory(prefix="kltest-read-") as folder:
        for number, report, _ in graded(jobs, lambda job, report: instead(job, report, Path(folder)), refuses=False):
            reports.setdefault(int(number), {})[number] = report
            progress(report.target)
    found, left = [], {}
    for number, (text, expect) in enumerate(wanted.items()):
        several = folded(report for _, report in sorted(reports[number].items()))
        if why := _why_not(several):
            left[text] = why
            continue
        codes = {check.code: _reason(check.message) for report in several for check in report.errors}
        mixed = any({check.code for check in report.errors} != codes.keys() for report in several)
        found.append(Held(text, expect, dict(sorted(codes.items())), mixed))
    return found, left


def _why_not(reports: Sequence[Report]) -> str:
    """Return why a loss cannot be held, or the empty string: it fails, is not decided, or is refuted by no check."""
    for report in reports:
        if report.verdict == "error":
            return report.error.partition("\n")[0]
        if report.verdict == "inconclusive" or (report.verdict == "refuted" and not report.errors):
            return f"{report.verdict}: kltest grade {report.target.partition(' [')[0]!r} says more"
    return ""


def _reason(message: str) -> str:
    first = message.partition(". ")[0].rstrip(".")
    return f"so when kltest init was run: {first if len(first) <= LONGEST else first[: LONGEST - 1] + '…'}"
