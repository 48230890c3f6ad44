"""The losses of tests/cases by authors who had not read the checks: how many verdicts, and reasons, are as labelled.

A right loss is to be confirmed, a wrong one refuted with a code that is true of it, and one whose defect is a warning
confirmed with that warning. No code that would be false of a loss may fail.
"""

import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    """Print the losses that are not graded as labelled, and the counts."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from cases.unseen import CASES  # type: ignore[import-not-found]

    labelled, graded = Counter[str](), Counter[str]()
    for case in CASES:
        kind = case.level or "right"
        faults = case.faults(case.report())
        labelled[kind] += 1
        graded[kind] += not faults
        if faults:
            print(f"{kind:8}{case.name}: {'; '.join(faults)}", flush=True)
    for kind, count in labelled.items():
        print(f"{kind}: {graded[kind]} of {count} graded as labelled")


if __name__ == "__main__":
    main()
