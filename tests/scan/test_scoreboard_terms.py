"""The scan of four libraries lists what the scoreboard grades; `python -m benchmarks.scoreboard_terms` scans again."""

import csv
from collections import Counter

import pytest

from benchmarks import scoreboard_terms
from kltest.adapters import find
from kltest.scoreboard import recorded

with scoreboard_terms.TABLE.open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
RECORDED = {(each["library"], each["setting"]): each for each in reversed(recorded.read())}


def test_every_setting_has_a_row():
    names = [(library, each.name) for library in scoreboard_terms.REPOSITORIES for each in find(library).settings]
    assert [(row["library"], row["setting"]) for row in ROWS] == names


def test_no_row_differs():
    """Half of the settings and more are listed; a reason is given for each of the others."""
    counts = Counter(row["result"] for row in ROWS)
    assert counts.keys() == {"same", "same on-policy", "not listed"}
    assert counts["not listed"] < len(ROWS) / 2
    assert all(row["why"] for row in ROWS if row["result"] != "same")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['library']}:{row['setting']}")
def test_results_follow_from_what_is_recorded(row):
    """Fails if a library is measured anew and follows something else than what is listed; a changed row is seen."""
    now = {
        f"graded_{each}": scoreboard_terms.graded(RECORDED[row["library"], row["setting"]], each)
        for each in scoreboard_terms.SAMPLERS
    }
    assert row | now == row
    assert scoreboard_terms.result(row) == row["result"]
    assert scoreboard_terms.result({**row, "why": "", "graded_current": "chi_square"}) == "differs"


def test_factors_and_lengths_are_no_difference_but_signs_are():
    assert scoreboard_terms.plain("0.3333*local_reverse_kl (its size moves: KL203)") == "local_reverse_kl"
    assert scoreboard_terms.plain("-0.3333*from_sampler_kl") == "-from_sampler_kl" != scoreboard_terms.plain("zero")
