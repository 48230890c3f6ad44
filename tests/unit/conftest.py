"""Files of losses, written into a fresh folder."""

import sys
import textwrap

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into a fresh current directory; forget afterwards what was imported from there."""
    before, paths = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)

    def writer(name, text, head=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + textwrap.dedent(text))
        return path

    yield writer
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
