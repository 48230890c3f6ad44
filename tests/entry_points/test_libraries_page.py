"""The scoreboard in a real browser: a verdict at once, sorted, filtered, on a phone, and whole without a script."""

import re

import pytest
from processes import BROWSER, opened

from kltest.scoreboard.pages import html, markdown
from kltest.scoreboard.table import COLUMNS, frame

ENVIRONMENTS = ("bandit", "sequence", "ragged")
FOUND = {
    "square": ({"local_reverse_kl": 1 / 3}, ["KL201"], {"default": True, "unset": ["beta", 0.0]}),
    "cubic": (None, ["KL105", "KL501"], {"leak": [0, 2.0, 1.0]}),
    "linear": ({"zero": 1.0}, ["KL101"], {}),
    "whole": ({"reverse_kl": 1.0}, [], {"recipe": True, "note": "Costs one pass more."}),
    "a_long_name=of_an_option,another_long_name=of_another_option,a_third_one=which_nobody_would_break": (None, [], {}),
    "third": ({"reverse_kl": 1 / 3}, ["KL106"], {}),
}


def row(library, version, name, found, codes, marks):
    """A row as measuring writes it, with the given finding everywhere."""
    gradients = [
        {"environment": environment, "sampler": sampler, "batch": 1, "identified": found}
        for environment in ENVIRONMENTS
        for sampler in ("current", "stale")
    ]
    return {
        "library": library,
        "version": version,
        "setting": f"penalty/{name}",
        "expect": "reverse_kl",
        "depth": "function",
        "dtype": "float64",
        "default": False,
        "recipe": False,
        "note": "",
        "source": "https://example.org/a?b=1&c=2",
        "versions": {"torch": "2.13.0"},
        "verdict": "confirmed" if found == {"reverse_kl": 1.0} else "refuted",
        "gradients": gradients,
        "value": [{"environment": environment, "sampler": "current", "matches": "kl"} for environment in ENVIRONMENTS],
        "failed": [{"code": code, "message": "It is so & so <there>."} for code in codes],
        "notes": [],
        "error": "",
        "reads_sampler": True,
        "laws": {"local_reverse_kl": "1/T"},
        "program": "print('a very long line ' * 20)  # " + "x" * 200,
        **marks,
    }


ROWS = [row(library, "1.0", name, *found) for library in ("one", "two") for name, found in FOUND.items()]

DRIVER = """
<!doctype html><meta charset="utf-8"><body>
<iframe id="plain" sandbox="allow-same-origin" src="page.html" style="width:WIDTHpx;height:900px"></iframe>
<iframe id="lively" src="page.html" style="width:WIDTHpx;height:900px"></iframe>
<script>
function shown(doc) {
  return Array.from(doc.querySelectorAll(".board tbody")).filter(row => row.getClientRects().length > 0)
    .map(row => row.dataset.library + " " + row.querySelector("code").textContent);
}
function state(doc) {
  var verdict = doc.querySelector(".summary .kind").getBoundingClientRect();
  doc.getElementById("all").open = true;
  return {verdict: verdict.bottom, said: doc.querySelector(".summary tbody tr").textContent,
    rows: shown(doc), controls: doc.querySelector(".controls").getClientRects().length > 0,
    width: doc.documentElement.scrollWidth, buttons: doc.querySelectorAll(".board th button").length};
}
function set(doc, id, value) {
  var control = doc.getElementById(id);
  control.value = value;
  control.dispatchEvent(new Event("input", {bubbles: true}));
}
addEventListener("load", function () {
  var plain = document.getElementById("plain").contentDocument;
  var doc = document.getElementById("lively").contentDocument;
  var said = {plain: state(plain), lively: state(doc)};
  set(doc, "text", "kl105"); said.text = shown(doc); said.count = doc.getElementById("count").textContent;
  set(doc, "text", "no such words"); said.none = shown(doc); set(doc, "text", "");
  set(doc, "library", "two"); said.library = shown(doc); set(doc, "library", "");
  set(doc, "kind", "part"); said.part = shown(doc); set(doc, "kind", "");
  set(doc, "marked", "recipe"); said.recipe = shown(doc); set(doc, "marked", "");
  var button = doc.querySelectorAll(".board th button")[1];
  button.click(); said.up = shown(doc); said.sort = button.parentNode.getAttribute("aria-sort");
  button.click(); said.down = shown(doc);
  doc.querySelectorAll("details").forEach(one => { one.open = true; });
  said.open = doc.documentElement.scrollWidth;
  var out = document.createElement("pre");
  out.id = "out";
  out.textContent = JSON.stringify(said);
  document.body.appendChild(out);
});
</script>
"""


@pytest.fixture(scope="module", params=[360, 1300])
def seen(request, tmp_path_factory):
    """The page in a browser at the width of a phone and of a desk, and what its controls do."""
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome is installed")
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(html(frame(ROWS)), encoding="utf-8")
    (folder / "driver.html").write_text(DRIVER.replace("WIDTH", str(request.param)), encoding="utf-8")
    return request.param, opened(folder / "driver.html")


ALL = [f"{each['library']} {each['setting']}" for each in ROWS]


def test_it_is_whole_without_a_script(seen):
    """In a frame where none may run, every row is there and nothing that would not work is shown."""
    width, said = seen
    assert said["plain"]["rows"] == ALL
    assert not said["plain"]["controls"]
    assert said["plain"]["buttons"] == 0
    assert said["plain"]["width"] <= width


def test_nothing_makes_it_scroll_sideways(seen):
    width, said = seen
    assert said["lively"]["width"] <= width
    assert said["open"] <= width


def test_the_first_verdict_is_seen_without_scrolling(seen):
    """Half a phone's screen is enough for it, and it says what happens if nothing is set and what is ours."""
    _, said = seen
    for state in (said["plain"], said["lively"]):
        assert 0 < state["verdict"] < 400
        first = " ".join(state["said"].split())
        assert "next-token part of ∇KL(π‖ref), × 1/T" in first
        assert "penalty/whole (ours)" in first
        assert "no KL, beta = 0.0" in first


def test_rows_are_filtered(seen):
    _, said = seen
    assert said["lively"]["rows"] == ALL
    assert said["lively"]["controls"]
    assert said["text"] == ["one penalty/cubic", "two penalty/cubic"]
    assert said["count"] == "2 of 12"
    assert said["none"] == []
    assert said["library"] == ALL[6:]
    assert said["part"] == ["one penalty/square", "two penalty/square"]
    assert said["recipe"] == ["one penalty/whole", "two penalty/whole"]


def test_rows_are_sorted_both_ways(seen):
    _, said = seen
    by_setting = sorted(ALL, key=lambda title: title.split()[1])
    assert said["up"] == by_setting
    assert said["down"] == by_setting[::-1]
    assert said["lively"]["buttons"] == len(COLUMNS)


def test_kinds_say_how_a_row_stands_to_the_true_gradient():
    table = frame(ROWS)
    assert list(table["kind"])[:6] == ["part", "unnamed", "none", "whole", "unnamed", "scaled"]
    assert table["sequences"][0] == "1/T·E_π[Σ_t ∇KL_t(π‖ref)]"
    assert table["sequences"][5] == "0.3333·∇KL(π‖ref)"


def test_only_its_own_script_may_run_and_nothing_is_loaded():
    text = html(frame(ROWS))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    assert not re.search(r"<(?:link|img|iframe)|src=|@import|url\(", text)
    assert "so &amp; so &lt;there&gt;" in text
    assert "With other log-probs and token ids at padded positions, the loss gives 2 where it" in markdown(frame(ROWS))
