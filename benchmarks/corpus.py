"""The losses of tests/corpus graded with default options: how many verdicts, and reasons, are as labelled.

A right loss is to be confirmed, a wrong one refuted with a code that is true of it, and one whose defect is a warning
confirmed with that warning. No code that would be false of a loss may fail.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import kltest

FOLDER = Path(__file__).parents[1] / "tests" / "corpus"
KINDS = {"right": "right confirmed", "wrong": "wrong refuted", "warning": "warnings"}


class Graded(NamedTuple):
    """Verdict on a case, the codes that failed with their levels, and why that is not as labelled, else ""."""

    verdict: str
    failed: dict[str, str]
    why_not: str

    def __str__(self) -> str:
        codes = ", ".join(f"{code} ({level})" for code, level in self.failed.items())
        return f"{self.verdict}; {codes or 'nothing failed'}; {self.why_not}"


def cases() -> list[Any]:
    """Return the rows of the corpus' table."""
    spec = spec_from_file_location("corpus_table", FOLDER / "table.py")
    assert spec is not None
    assert spec.loader is not None
    table = module_from_spec(spec)
    sys.modules[spec.name] = table  # its dataclass looks its module up
    spec.loader.exec_module(table)
    return list(table.CASES)


def kind(case: Any) -> str:
    """Return "right", "wrong", or "warning" for a defect that ordinary input does not show."""
    return "right" if case.right else "warning" if case.level == "warning" else "wrong"


def graded(case: Any) -> Graded:
    """Grade a case as a user would, and compare the verdict and the failed checks with its label."""
    options: dict[str, Any] = {"expect": case.expect, "arguments": case.arguments}
    if case.placement != "loss":
        options |= {"placement": case.placement, "credit": case.credit}
    for name in ("sampler", "group_size", "batch_size", "environment"):
        if value := getattr(case, name):
            options[name] = value
    report = kltest.grade(str(FOLDER / case.target), **options)
    failed = {check.code: check.level for check in report.checks if check.status == "fail"}
    wanted = "refuted" if kind(case) == "wrong" else "confirmed"
    problems = []
    if report.verdict != wanted:
        problems.append(f"is to be {wanted}")
    if not case.right and not case.codes & failed.keys():
        problems.append(f"one of {', '.join(sorted(case.codes))} is to fail ({case.defect})")
    if false := sorted(case.forbidden & failed.keys()):
        problems.append(f"{', '.join(false)} would be false of it")
    return Graded(report.verdict, failed, "; ".join(problems))


def main() -> None:
    """Print the losses that are not graded as labelled, and the counts."""
    found: dict[str, list[bool]] = {name: [] for name in KINDS}
    for case in cases():
        result = graded(case)
        found[kind(case)].append(not result.why_not)
        if result.why_not:
            print(f"{kind(case):8}{case.target.partition(':')[2]}: {result}", flush=True)
    for name, words in KINDS.items():
        print(f"{words} {sum(found[name])} of {len(found[name])}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
