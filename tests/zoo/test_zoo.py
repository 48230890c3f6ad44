"""The zoo: every mutant fails its code and no others, every correct loss fails none. A new row is a new test."""

from collections import Counter

import pytest
from zoo import clean_values
from zoo.table import clean, mutants

import kltest
from kltest.checks import CHECKS

MUTANTS, CLEAN = mutants(), clean()
LOGGING, KL_VALUES = [row.loss for row in clean_values.CLEAN], {"kl", "kl_per_token", "mean_of_token_means"}
MUTANTS_PER_CODE, CORRECT_LOSSES = 2, 15
# Losses whose groups are called one multiset at a time; quicker ones are masked, centred and scaled alike.
SLOW = (
    "KL103-leave_one_out_upside_down",
    "KL401-grpo_skip_zero_std",
    "KL206-scaled_over_the_batch",
    "KL401-weighted_by_the_spread",
    "KL401-zero_variance_groups_dropped",
    "KL402-added_up_with_self",
    "KL402-grpo_without_the_deviation",
    "KL403-whitened",
    "leave-one-out-2",
    "leave_one_out_added_up",
    "leave_one_out_by_a_loop",
    "leave_one_out_by_a_loop-2",
    "leave_one_out_by_rows",
    "leave_one_out_by_the_batch",
)


def labels(rows):
    """Names, numbered if a loss stands in several rows with different options."""
    seen = Counter()
    for row in rows:
        seen[row.name] += 1
        yield row.name if seen[row.name] == 1 else f"{row.name}-{seen[row.name]}"


def weekly(rows):
    """Rows by their names; those that take seconds each are scheduled: their codes have quicker mutants."""
    return [
        pytest.param(row, id=name, marks=[pytest.mark.scheduled] if name in SLOW else [])
        for row, name in zip(rows, labels(rows), strict=True)
    ]


def failed(report):
    """The codes that failed, those about the variance of a right gradient apart."""
    return {check.code for check in report.failed if not check.code.startswith("KL8")}


@pytest.mark.parametrize("mutant", weekly(MUTANTS))
def test_a_mutant_fails_its_codes_and_no_others(mutant):
    report = kltest.grade(mutant.loss, **mutant.options)
    assert not report.error
    if mutant.code.startswith("KL8"):
        assert mutant.code in {check.code for check in report.failed}
        assert failed(report) == set(mutant.also)
        assert report.verdict == "confirmed"
        assert all(check.warns for check in report.failed)
        report.raise_for_failure()
    else:
        assert failed(report) == {mutant.code, *mutant.also}
        assert (report.verdict == "refuted") == (not mutant.warns)


@pytest.mark.parametrize("correct", weekly(CLEAN))
def test_a_correct_loss_fails_nothing(correct):
    report = kltest.grade(correct.loss, **correct.options)
    assert report.verdict == "confirmed", report.error or [(check.code, check.message) for check in report.failed]
    if correct.loss in LOGGING:
        assert {check.status for check in report.checks if check.code.startswith("KL60")} == {"pass"}
        assert {one.matches for one in report.value if one.sampler == "current"} <= KL_VALUES
    # A baseline of the other rows in a batch moves the gradient of a given batch, in noise only: a warning.
    assert failed(report) <= {"KL206"}


@pytest.mark.parametrize("code", CHECKS)
def test_every_code_has_its_mutants(code):
    """Differently written ones, and none of them the example that the check itself carries."""
    losses = {row.loss for row in MUTANTS if row.code == code and row.name not in SLOW} - {CHECKS[code].wrong}
    assert len(losses) >= MUTANTS_PER_CODE


def test_there_are_enough_correct_losses():
    assert len({row.loss for row in CLEAN}) >= CORRECT_LOSSES


def test_what_is_weekly_and_the_codes_of_mutants_exist():
    assert {*labels(MUTANTS), *labels(CLEAN)} >= {*SLOW}
    assert {code for row in MUTANTS for code in (row.code, *row.also)} <= set(CHECKS)
