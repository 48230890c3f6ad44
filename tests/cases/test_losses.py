"""Every loss of the table is graded as its row says: weekly, and on every push those of a small table of each kind.

`python -m benchmarks.corpus` counts the same over losses by authors who had not read the checks.
"""

import pytest
from cases import unseen
from cases.table import cases

from kltest.checks import CHECKS

CASES = cases()
KNOWN, UNSEEN = (CASES[: len(CASES) - len(unseen.CASES)], CASES[len(CASES) - len(unseen.CASES) :])
WRONG_PER_CODE, RIGHT = 2, 15


def parameters():
    """Rows by their names; those that are not of every push are scheduled."""
    return [pytest.param(case, id=case.name, marks=[] if case.pushed else pytest.mark.scheduled) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_a_loss_is_graded_as_its_row_says(case):
    report = case.report()
    assert case.faults(report) == [], [(check.code, check.message) for check in report.failed]
    if case.defect.startswith("KL8"):
        report.raise_for_failure()


@pytest.mark.parametrize("code", [code for code in CHECKS if not code.startswith("KL9")])
def test_every_code_has_losses_that_fail_it(code):
    """Differently written ones, and none of them the example that the check itself carries."""
    wrong = [case for case in KNOWN if case.defect == code]
    assert len({case.target for case in wrong} - {CHECKS[code].wrong}) >= WRONG_PER_CODE


def test_there_are_enough_right_losses():
    assert len({case.target for case in KNOWN if case.right}) >= RIGHT


def test_codes_exist_and_names_are_unique():
    assert {code for case in CASES for code in (*case.codes, *case.forbidden)} <= set(CHECKS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_row_that_is_not_graded_so_is_noticed():
    """A wrong loss taken for a right one, a code too many and one too few."""
    from dataclasses import replace

    case = next(case for case in KNOWN if case.codes == {"KL101"})
    report = case.report()
    assert case.faults(report) == []
    assert replace(case, right=True, codes=frozenset()).faults(report)
    assert replace(case, codes=frozenset({"KL101", "KL102"})).faults(report)
    assert replace(case, codes=frozenset({"KL102"})).faults(report)
    assert replace(case, exactly=False, codes=frozenset({"KL102"})).faults(report)
    assert replace(case, forbidden=frozenset({"KL101"})).faults(report)
