"""Nothing that kltest offered by name before the package was rebuilt is lost, unless the list says why."""

import json

import pytest
from features import RECORDED, offered


@pytest.fixture(scope="module")
def now():
    return offered()


def test_nothing_that_was_offered_is_lost(now):
    before = json.loads(RECORDED.read_text(encoding="utf-8"))
    removed = before.pop("removed", {})
    lost = {kind: sorted(set(names) - set(now.get(kind, [])) - set(removed)) for kind, names in before.items()}
    assert {kind: names for kind, names in lost.items() if names} == {}


def test_a_lost_name_would_be_noticed(now):
    """The comparison above sees every kind: dropping any one name of the present list makes it differ."""
    assert len(now) == 11
    assert all(len(names) >= 5 for names in now.values())
