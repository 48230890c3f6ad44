"""`kltest libraries --history`: which releases there are, what each followed, and the page that shows it."""

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from kltest.adapters import find
from kltest.scoreboard import history as under_test
from kltest.scoreboard import recorded, releases, timeline

FILES = [
    {"filename": "made_up-1.0-py3-none-any.whl", "upload-time": "2025-03-01T10:00:00Z", "yanked": False},
    {"filename": "made-up-1.0.tar.gz", "upload-time": "2025-03-01T09:00:00.5Z", "yanked": False},
    {"filename": "made_up-1.0.2-py3-none-any.whl", "upload-time": "2025-05-01T10:00:00Z", "yanked": False},
    {"filename": "made_up-1.0.10.post1-py3-none-any.whl", "upload-time": "2025-06-01T10:00:00Z", "yanked": False},
    {"filename": "made_up-1.1rc1-py3-none-any.whl", "upload-time": "2025-06-02T10:00:00Z", "yanked": False},
    {"filename": "made_up-1.1-cp311-cp311-manylinux.whl", "upload-time": "2025-08-01T10:00:00Z", "yanked": False},
    {"filename": "made_up-1.2-py3-none-any.whl", "upload-time": "2025-09-01T10:00:00Z", "yanked": "broken"},
    {"filename": "made_up-0.9-py3-none-any.whl", "upload-time": "2025-01-01T10:00:00Z", "yanked": False},
]


@pytest.fixture
def index(monkeypatch):
    """A package index that knows the files."""

    answer = SimpleNamespace(headers={"content-type": releases.JSON}, read=lambda: json.dumps({"files": FILES}))
    monkeypatch.setattr(releases, "configured", lambda: {"index-url": "https://example.org/simple"})
    monkeypatch.setattr(releases.urllib.request, "urlopen", lambda *_, **__: nullcontext(answer))


@pytest.mark.usefixtures("index")
def test_the_releases_of_an_index_are_read_with_their_dates():
    """Withdrawn ones and, of minor releases, those before their time are left out; 1.0.10 comes after 1.0.2."""
    there = releases.uploads("made-up")
    assert list(there) == ["0.9", "1.0", "1.0.2", "1.0.10.post1", "1.1rc1", "1.1"]
    assert there["1.0"] == datetime(2025, 3, 1, 9, 0, 0, 500_000, UTC)
    assert list(releases.minors("made-up", "1.0")) == ["1.0.10.post1", "1.1"]
    assert list(releases.minors("made-up", "0", first=True)) == ["0.9", "1.0", "1.0.10.post1", "1.1"]


def test_one_release_of_each_half_year_comes_first():
    days = {"1": (2025, 6), "2": (2025, 7), "3": (2025, 12), "4": (2026, 1), "5": (2026, 2)}
    uploaded = {version: datetime(*day, 1, tzinfo=UTC) for version, day in days.items()}
    assert under_test.half_years_first(uploaded) == ["5", "3", "1", "4", "2"]


def row(version, released, named, setting="loss/default"):
    """A row of a release that follows `named` everywhere."""
    gradients = [
        {"environment": place, "sampler": "current", "batch": 1, "identified": named, "residual": 0.0}
        for place in ("bandit", "sequence", "ragged")
    ]
    about = {"library": "liger", "version": version, "released": released, "setting": setting, "default": True}
    return {**about, "gradients": gradients, "dtype": "float64", "error": "", "failed": [], "verdict": "refuted"}


def test_the_page_says_what_changed_and_the_figure_colours_it(monkeypatch):
    """Newest first, as a record is read; a coefficient that moves in the fourth digit is no change."""
    library = SimpleNamespace(changed={"0.9.1": ("the reference comes <second>", "https://example.org/2")})
    monkeypatch.setattr(timeline, "find", lambda _: library)
    monkeypatch.setattr(timeline, "is_default", lambda *_: True)
    rows = [
        row("1.0", "2026-06-01", {"reverse_kl": 1.0}),
        row("0.9", "2026-01-01", {"forward_kl": 1.0001}),
        row("0.8", "2025-07-01", {"forward_kl": 1.0}),
    ]
    made = timeline.files(rows)
    (told,) = [line for line in made["history.md"].splitlines() if line.startswith("| 2026")]
    assert "0.9 → 1.0" in told
    assert told.index("the other KL") < told.index("on-policy only")
    assert "(https://example.org/2)" in told
    assert "<second>" not in told
    assert "- liger: 0.8, 0.9, 1.0" in made["history.md"]
    shapes = ElementTree.fromstring(made["history.svg"]).iter("{http://www.w3.org/2000/svg}rect")
    bars = [shape.get("fill") for shape in shapes if shape.get("stroke")]
    assert bars == [timeline.COLOURS["other"]] * 2 + [timeline.COLOURS["on-policy"]]


def test_every_recorded_release_is_dated_and_every_reason_has_a_change():
    """What a release says stands at a change that was measured; five libraries, each half-year since mid-2025."""
    rows = recorded.read(under_test.PATH)
    assert {each["library"] for each in rows} >= {"trl", "verl", "openrlhf", "liger", "torchrl"}
    assert all(datetime.fromisoformat(each["released"]) for each in rows)
    for name in {each["library"] for each in rows}:
        mine = [each for each in rows if each["library"] == name]
        halves = {(each["released"][:4], each["released"][5:7] > "06") for each in mine}
        assert halves >= {("2025", True), ("2026", False), ("2026", True)}, name
        noted = [timeline._reason(*pair) for pair in under_test.changed(mine)]
        assert set(find(name).changed.values()) <= set(noted), name
        assert all(link.startswith("https://") for _, link in find(name).changed.values())
