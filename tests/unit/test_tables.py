"""Tables for terminals fit, line up, lose nothing, and are plain text unless colour is asked for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from kltest.render.tables import PLAIN, Terminal, table, wrap

HEADS = ("name", "formula", "number")
ROWS = [("k1-loss", "E[log π − log ref]", "3.14"), ("k2", "½u²", "12")]


def test_columns_line_up_and_numbers_end_together():
    assert table(HEADS, ROWS, right={"number"}, indent=2).splitlines() == [
        "  name     formula             number",
        "  k1-loss  E[log π − log ref]    3.14",
        "  k2       ½u²                     12",
    ]


def test_no_heads_are_printed_if_all_are_empty():
    assert table(("", "", ""), ROWS).splitlines()[0].startswith("k1-loss")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_long_cells_wrap_within_their_column_and_lose_nothing(width):
    words = " ".join(f"word{number}" for number in range(80))
    text = table(HEADS, [("k1-loss", words, "3.14")], terminal=Terminal(width), indent=2)
    assert max(map(len, text.splitlines())) <= width
    assert re.findall(r"word\d+", text) == words.split()
    assert "k1-loss" in text


def test_columns_that_are_to_stay_whole_do():
    rows = [("a-name-of-some-length", "x " * 200, "another name of its own")]
    text = table(HEADS, rows, whole=("name", "number"), terminal=Terminal(80))
    assert "a-name-of-some-length  x x" in text
    assert "another name of its own" in text


def test_colour_changes_nothing_else():
    rows = [("k1-loss", "x", Text("agrees", style="green")), ("k2", "y", Text("no", style="red"))]
    coloured = table(HEADS, rows, terminal=Terminal(colour=True))
    assert "\x1b[32magrees\x1b[0m" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == table(HEADS, rows).splitlines()


@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=("C", "Z")), max_size=12)] * 2), max_size=4))
def test_every_row_is_there_and_no_line_is_too_long(rows):
    text = table(("one", "two"), rows)
    assert len(text.split("\n")) == len(rows) + 1
    assert max(map(cell_len, text.splitlines())) <= PLAIN.width
    for one, two in rows:
        assert one in text
        assert two in text


def test_wide_characters_count_twice():
    lines = table(("a", "b"), [("漢字", "x"), ("ab", "y")]).splitlines()
    assert lines[1:] == ["漢字  x", "ab    y"]


def test_paragraphs_are_indented_and_words_stay_whole():
    path = "/a/path/" + "x" * 60
    assert wrap(f"see {path} for more", Terminal(40), indent="  ", first="· ") == ["· see", f"  {path}", "  for more"]
    assert wrap("") == [""]
