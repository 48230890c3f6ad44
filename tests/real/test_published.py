"""Published libraries follow what their source says they do; $KLTEST_REAL names which are graded (or "all").

The interpreter that runs the tests, its torch and its kltest are shared; a library that needs nothing else is installed
alone, into a folder that is put on the path, and its cases are graded in one process, one of them by the command too.
`grade_published.py` does the same from a bare machine, everything installed anew and every case by the command.
"""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
from grade_published import (
    UnreachableError,
    chosen,
    default_folder,
    disagreements,
    grade,
    grade_together,
    lay_beside,
)
from published import LIBRARIES, LOG_RATIO, Case, Library

NAMES = chosen(os.environ.get("KLTEST_REAL") or next(iter(LIBRARIES)))


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def installed(name):
    try:
        return lay_beside(name, LIBRARIES[name], default_folder())
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so {name} was not graded: {error}")


@pytest.fixture(scope="module")
def reports(name, installed, tmp_path_factory):
    return grade_together(installed, LIBRARIES[name].cases, tmp_path_factory.mktemp(name))


@pytest.mark.real
def test_what_is_identified_is_what_the_source_says(name, reports):
    cases = LIBRARIES[name].cases
    assert len(reports) == len(cases) > 0
    found = {case.title: list(disagreements(case, report)) for case, report in zip(cases, reports, strict=True)}
    assert found == {case.title: [] for case in cases}


@pytest.mark.real
def test_the_command_reports_the_same(name, installed, reports, tmp_path):
    assert grade(installed, LIBRARIES[name].cases[0], tmp_path) == reports[0]


def test_only_an_index_that_does_not_answer_is_no_failure(tmp_path, monkeypatch):
    """A closed port answers nothing; an index that is an empty folder answers that there is no such package."""
    library = Library((("--no-deps", "no-such-package-of-ours"),), ())
    for key in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UnreachableError, match="no-such-package-of-ours"):
        lay_beside("none", library, tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(RuntimeError) as failed:
        lay_beside("none", library, tmp_path)
    assert not isinstance(failed.value, UnreachableError)


CASE = Case("module:function", LOG_RATIO)
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
