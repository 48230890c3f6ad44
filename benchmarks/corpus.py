"""The losses of tests/cases by authors who had not read the checks: how many verdicts, and reasons, are as labelled.

A right loss is to be confirmed, a wrong one refuted with a code that is true of it, and one whose defect is a warning
confirmed with that warning. No code that would be false of a loss may fail.
"""

import os
import sys
from pathlib import Path
from typing import Any

KINDS = {"right": "right confirmed", "wrong": "wrong refuted", "warning": "warnings"}


def kind(case: Any) -> str:
    """Return "right", "wrong", or "warning" for a defect that ordinary input does not show."""
    return "right" if case.right else "warning" if case.level == "warning" else "wrong"


def main() -> None:
    """Print the losses that are not graded as labelled, and the counts."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from cases.unseen import CASES  # type: ignore[import-not-found]

    found: dict[str, list[bool]] = {name: [] for name in KINDS}
    for case in CASES:
        faults = case.faults(case.report())
        found[kind(case)].append(not faults)
        if faults:
            print(f"{kind(case):8}{case.name}: {'; '.join(faults)}", flush=True)
    for name, words in KINDS.items():
        print(f"{words} {sum(found[name])} of {len(found[name])}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
