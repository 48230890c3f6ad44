"""The HTML page and its pictures: strictly well-formed, true to the numbers, and legible in a real browser."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache

import losses_to_shrink as losses
import pytest
from called import WRITTEN
from pages import BROWSER, Strict, opened

import kltest
from kltest.counterexample.environment import SmallEnvironment, counter_example
from kltest.counterexample.shrink import unrelated
from kltest.loss.calling import bind
from kltest.render import pictures as _pictures
from kltest.render import render
from kltest.render.html import templates
from kltest.report import CounterExample, Prefix

HOSTILE = "</pre></svg><script>alert(1)</script>\x1b\u202e&\"'<img src=x onerror=alert(1)>"


def drawn(length, actions, ends, moved) -> SmallEnvironment:
    return unrelated(length, actions, ends=ends, moved=moved)


def example(length=1, actions=2, ends=False, moved=False, batch=1) -> CounterExample:
    """An environment in which nothing is equal, with the numbers of a loss that is wrong everywhere."""
    environment = drawn(length, actions, ends, moved)
    sampler = "stale" if moved else "current"
    answer = counter_example(bind(losses.k3_of_sequences), {"reverse_kl": 1.0}, environment, sampler, batch, 0.0)
    return answer.example


def drawn_as(picture: str, shown: CounterExample) -> ET.Element:
    return ET.fromstring(getattr(templates().get_template("pictures.html.j2").module, picture)(shown))


def numbers(truth, found, std) -> CounterExample:
    """A bandit of two equal actions with these derivatives."""
    place = Prefix("root", [0.5, 0.5], [0.5, 0.5], None, None, truth, found, std)
    return CounterExample("bandit", "current", 1, 2, False, 1, "rows", False, [place])


SHAPES = [
    (1, 2, False, False),
    (1, 4, False, True),
    (2, 2, False, False),
    (2, 2, True, True),
    (2, 3, False, True),
    (3, 2, True, False),
    (3, 3, False, False),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@cache
def reports():
    wrong = [losses.no_ratio, losses.divided_where_lengths_differ, losses.wrong_for_three_actions]
    graded = [kltest.grade(loss) for loss in ("k2-loss", "k2-loss-sequence", "k3-loss", "group-mean", *wrong)]
    long = replace(graded[0], target="a" * 300, smallest=example(3, 3, moved=True))
    return [*graded, long, kltest.grade(lambda logp: 1 / 0, name="broken")]


@pytest.mark.scheduled
def test_the_page_is_strictly_well_formed_and_has_every_part():
    page = Strict(render("html", reports()))
    assert page.counted["section"] == len(reports())
    shown = [report.smallest or report.example for report in reports()]
    assert page.counted["svg"] == 2 * sum(one is not None for one in shown)
    text = "".join(page.words)
    for report, found in zip(reports(), shown, strict=True):
        assert report.target in text
        if found is not None:
            assert found.code in text
        for check in report.failed:
            assert check.code in text
            assert check.fix.split("\n\n", 1)[-1].strip() in text


def test_hostile_text_stays_text_everywhere():
    report = kltest.grade("k2-loss")
    place = replace(report.smallest.contexts[0], prefix=HOSTILE)
    worst = replace(report.smallest, contexts=[place, *report.smallest.contexts[1:]], code=HOSTILE, note=HOSTILE)
    page = Strict(render("html", [replace(report, target=HOSTILE, smallest=worst)]))
    assert "img" not in page.counted
    assert "\x1b" not in "".join(page.words)


@every_shape
def test_the_tree_has_every_rollout_with_its_chance(shape):
    shown = example(*shape)
    svg = drawn_as("tree", shown)
    texts = [element.text for element in svg.iter("text")]
    instance = drawn(*shape).instance()
    chances = instance.rollout_weights("stale" if shape[3] else "current")
    written = [f"{chance:.4g}" for chance in chances]
    right = [element.text for element in svg.iter("text") if element.get("text-anchor") == "end"]
    assert sorted(right[1:]) == sorted(written)
    assert sum(chances) == pytest.approx(1)
    for place in shown.contexts:
        for action in range(shown.actions):
            assert f"π {place.policy[action]:g}" in texts
            assert f"ref {place.reference[action]:g}" in texts


def test_probabilities_stand_on_the_branch_that_they_belong_to():
    """Two tokens: the branch to (0, 1) is the second from above; its label is that of context "after 0", action 1."""
    place = Prefix("x", [0.6, 0.4], [0.5, 0.5], None, None, [0.0] * 2, [0.0] * 2, [0.0] * 2)
    tables = ([0.6, 0.4], [0.7, 0.3], [0.8, 0.2])
    contexts = [replace(place, policy=table) for table in tables]
    svg = drawn_as("tree", CounterExample("sequence", "current", 2, 2, False, 1, "rows", False, contexts))
    labels = [(float(e.get("y")), float(e.get("x")), e.text) for e in svg.iter("text") if "π" in (e.text or "")]
    deep = max(x for _, x, _ in labels)
    assert [text for _, x, text in sorted(labels) if x == deep] == ["π 0.7", "π 0.3", "π 0.8", "π 0.2"]
    assert [text for _, x, text in sorted(labels) if x < deep] == ["π 0.6", "π 0.4"]
    chances = [e.text for e in svg.iter("text") if e.get("text-anchor") == "end"][1:]
    assert chances == ["0.42", "0.18", "0.32", "0.08"]


@every_shape
def test_bars_are_as_long_as_the_numbers_and_point_their_way(shape):
    shown = example(*shape)
    svg = drawn_as("bars", shown)
    (axis,) = (e for e in svg.iter("path") if e.get("class") == "axis")
    middle = float(re.match(r"M([\d.]+)", axis.get("d"))[1])
    for kind, part in (("truth", "truth"), ("found", "found")):
        drawn = [e for e in svg.iter("rect") if e.get("class") == kind]
        values = [value for place in shown.contexts for value in getattr(place, part)]
        assert len(drawn) == len(values)
        scales = []
        for rectangle, value in zip(drawn, values, strict=True):
            x, width = float(rectangle.get("x")), float(rectangle.get("width"))
            if width > 5:
                assert (x + width / 2 > middle) == (value > 0)
                # To the tenth of a pixel at either end.
                scales.append((width / abs(value), 0.2 / abs(value)))
        first = scales[0]
        assert all(abs(scale - first[0]) <= slack + first[1] for scale, slack in scales)


def test_a_whisker_is_one_standard_deviation_to_both_sides():
    svg = drawn_as("bars", numbers([1.0, -1.0], [0.5, -0.5], [0.25, 0.0]))
    (whisker,) = (e.get("d") for e in svg.iter("path") if e.get("class") == "whisker")
    low, high = (float(end) for end in re.match(r"M([\d.]+) [\d.]+ H([\d.]+)", whisker).groups())
    found = next(e for e in svg.iter("rect") if e.get("class") == "found")
    start, width = float(found.get("x")), float(found.get("width"))
    unit = width / 0.5
    assert low == pytest.approx(start + width - 0.25 * unit, abs=0.2)
    assert high == pytest.approx(start + width + 0.25 * unit, abs=0.2)
    assert len([e for e in svg.iter("text") if e.get("class") == "differs"]) == 2


def test_enormous_noise_does_not_hide_the_bars():
    svg = drawn_as("bars", numbers([1.0, -1.0], [0.5, -0.5], [1e6, 1e6]))
    assert all(float(e.get("width")) > 20 for e in svg.iter("rect"))
    for whisker in (e.get("d") for e in svg.iter("path") if e.get("class") == "whisker"):
        assert " v8" not in whisker, "an end would claim that the whisker ends there"
        assert all(0 <= float(x) <= _pictures.WIDTH for x in re.findall(r"[MH]([\d.]+)", whisker))


MEASURE = (WRITTEN / "measure.html").read_text(encoding="utf-8")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_a_real_browser_finds_nothing_cut_off_or_overlapping(tmp_path, width, scheme):
    (tmp_path / "page.html").write_text(render("html", reports()), encoding="utf-8")
    (tmp_path / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)), encoding="utf-8")
    found = opened(
        tmp_path / "measure.html",
        "--window-size=1300,1000",
        f"--blink-settings=preferredColorScheme={'0' if scheme == 'dark' else '1'}",
    )
    assert found["dark"] == (scheme == "dark")
    assert found["paper"] == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert found["width"] <= width, "the page scrolls sideways"
    assert len(found["svgs"]) == 2 * sum(bool(r.smallest or r.example) for r in reports())
    assert min(svg["letters"] for svg in found["svgs"]) >= 10, "letters too small to be read"
    assert found["outside"] == []
    assert found["clashes"] == []
