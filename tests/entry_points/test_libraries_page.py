"""The scoreboard as a page: a verdict at once, whole without a script, and nothing taken for markup."""

import re

from kltest.scoreboard import recorded
from kltest.scoreboard.pages import html, markdown
from kltest.scoreboard.table import frame

ENVIRONMENTS = ("bandit", "sequence", "ragged")
FOUND = {
    "square": ({"local_reverse_kl": 1 / 3}, ["KL201"], {"default": True, "unset": ["beta", 0.0]}),
    "cubic": (None, ["KL105", "KL501"], {"leak": [0, 2.0, 1.0]}),
    "linear": ({"zero": 1.0}, ["KL101"], {}),
    "whole": ({"reverse_kl": 1.0}, [], {"recipe": True, "note": "Costs one pass more."}),
    "a_long_name=of_an_option,another_long_name=of_another_option,a_third_one=which_nobody_would_break": (None, [], {}),
    "third": ({"reverse_kl": 1 / 3}, ["KL106"], {}),
}


def row(library, name, found, codes, marks):
    """A recorded row of another setting, with the given finding everywhere."""
    gradients = [
        {"environment": environment, "sampler": sampler, "batch": 1, "identified": found}
        for environment in ENVIRONMENTS
        for sampler in ("current", "stale")
    ]
    return {
        **recorded.read()[0],
        **{"library": library, "version": "1.0", "setting": f"penalty/{name}", "default": False, "dtype": "float64"},
        "gradients": gradients,
        "failed": [{"code": code, "message": "It is so & so <there>."} for code in codes],
        "laws": {"local_reverse_kl": "1/T"},
        "program": "print('a very long line ' * 20)  # " + "x" * 200,
        **marks,
    }


ROWS = [row(library, name, *found) for library in ("one", "two") for name, found in FOUND.items()]


def test_kinds_say_how_a_row_stands_to_the_true_gradient():
    table = frame(ROWS)
    assert list(table["kind"])[:6] == ["part", "unnamed", "none", "whole", "unnamed", "scaled"]
    assert table["sequences"][0] == "1/T·E_π[Σ_t ∇KL_t(π‖ref)]"
    assert table["sequences"][5] == "0.3333·∇KL(π‖ref)"


def test_the_first_row_says_what_is_followed_what_happens_unset_and_what_to_set_instead():
    text = re.sub(r"<[^>]+>", " ", html(frame(ROWS)))
    first = " ".join(text.partition("if nothing is set")[2].split())
    assert first.startswith("one 1.0 penalty/square next-token part of ∇KL(π‖ref), × 1/T")
    assert first.index("penalty/whole (ours)") < first.index("no KL, beta = 0.0") < 200


def test_it_is_static_and_nothing_is_loaded():
    text = html(frame(ROWS))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
    assert not re.search(r"<(?:script|link|img|iframe|input(?! type=.radio))|src=|@import|url\(", text)
    assert "so &amp; so &lt;there&gt;" in text
    assert "With other log-probs and token ids at padded positions, the loss gives 2 where it" in markdown(frame(ROWS))
    broken = {**ROWS[0], "error": "<script>alert(1)</script> | `x` \n next", "gradients": []}
    assert "<script>" not in html(frame([broken])) + markdown(frame([broken]))
    (line,) = [line for line in markdown(frame([broken])).splitlines() if line.startswith("| `penalty/square`")]
    assert "\\|" in line


def test_settings_are_filtered_by_what_they_follow_without_a_script():
    table = frame(ROWS)
    text = html(table)
    shown = re.findall(r'type="radio" name="show" id="show-([\w-]+)"', text)
    assert set(shown) == set(table["kind"])
    for kind in shown:
        assert f"body:has(#show-{kind}:checked) .kinds:not(.kind-{kind}) {{ display: none; }}" in text
        assert text.count(f'<tbody class="kinds kind-{kind} ') == (table["kind"] == kind).sum()
