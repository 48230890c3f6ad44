"""Published libraries follow what their source says they do; $KLTEST_REAL names which are graded (or "all")."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os

import pytest
from grade_published import chosen, default_folder, disagreements, grade, prepare
from published import LIBRARIES, LOG_RATIO, Case

NAMES = chosen(os.environ.get("KLTEST_REAL") or next(iter(LIBRARIES)))


@functools.cache
def python_of(name):
    """The interpreter of a library's environment, built when it is first asked for."""
    return prepare(name, LIBRARIES[name], default_folder())


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name} {case.title}") for name in NAMES for case in LIBRARIES[name].cases],
)
def test_what_is_identified_is_what_the_source_says(name, case, tmp_path):
    report = grade(python_of(name), case, tmp_path)
    assert list(disagreements(case, report)) == []


CASE = Case("module:function", {}, LOG_RATIO, expect="reverse_kl")
REPORT = {
    "verdict": "refuted",
    "dtype": "float64",
    "reduction": "per-row",
    "notes": [],
    "gradients": [
        {"sampler": "current", "environment": world, "identified": dict(found), "batch": 1}
        for world, found in LOG_RATIO.items()
    ],
}


def test_a_report_as_stated_is_accepted():
    assert list(disagreements(CASE, REPORT)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict",), "confirmed"),
        (("dtype",), "float32"),
        (("reduction",), "coupled"),
        (("notes",), ["it was lifted"]),
        (("gradients", 0, "identified"), {"forward_kl": 1.0}),
        (("gradients", 1, "identified"), {"local_reverse_kl": 1.0 + 1e-6}),
        (("gradients", 2, "identified"), None),
        (("gradients", 2, "environment"), "mdp"),
        (("gradients", 0, "batch"), 2),
    ],
)
def test_a_report_that_differs_is_caught(path, value):
    report = copy.deepcopy(REPORT)
    inner = report
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert len(list(disagreements(CASE, report))) == 1


def test_nothing_identified_where_nothing_should_be_is_no_disagreement():
    nameless = dataclasses.replace(CASE, current={**LOG_RATIO, "ragged": None})
    assert len(list(disagreements(nameless, REPORT))) == 1
    report = copy.deepcopy(REPORT)
    report["gradients"][2]["identified"] = None
    assert list(disagreements(nameless, report)) == []
