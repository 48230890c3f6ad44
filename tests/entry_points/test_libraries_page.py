"""The scoreboard as a page: a verdict at once, whole without a script, and nothing taken for markup."""

import re

import pytest

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
        "limits": [],
        "program": "print('a very long line ' * 20)  # " + "x" * 200,
        **marks,
    }


ROWS = [row(library, name, *found) for library in ("one", "two") for name, found in FOUND.items()]


def test_kinds_say_how_a_row_stands_to_the_true_gradient():
    table = frame(ROWS)
    assert list(table["kind"])[:6] == ["part", "unnamed", "none", "whole", "unnamed", "scaled"]
    assert table["sequences"][0] == "1/T·E_π[Σ_t ∇KL_t(π‖ref)]"
    assert table["sequences"][5] == "0.3333·∇KL(π‖ref)"


def limited(of, terms, rates, lengths=((3.0, 3.0), (1.5, 2.0)), beside_reward=None):
    """The row of an unnamed coupled loss with these limits, one an environment."""
    limits = [
        {"environment": environment, "of": of, "terms": each, "lengths": list(one), "rate": rate}
        | {"beside_reward": beside_reward, "exact": {"2": 0.2}, "sampled": {"128": [0.003, 0.0, 0.01]}}
        for environment, each, rate, one in zip(("sequence", "ragged"), terms, rates, lengths, strict=True)
    ]
    return row("one", "whitened", None, [], {"limits": limits, "reduction": "coupled"})


def ends(*values):
    return [[value - 0.001, value + 0.001] for value in values]


WHITENED = [{"reverse_kl": ends(0.4, 0.6), "expected_reward": ends(0.2, 0.1)}] * 2
PER_TOKEN = [{"local_reverse_kl": ends(1 / 3, 1 / 3)}, {"local_reverse_kl": ends(1 / 1.5, 1 / 2.0)}]


@pytest.mark.parametrize(
    ("given", "kind", "follows"),
    [
        (
            limited("B", WHITENED, (0.4, 0.3), beside_reward=[1.0, 0.98, 1.02]),
            "scaled",
            "∇KL(π‖ref) up to scale, × const, as B grows (off by 0.4/B); at B = 2: unnamed",
        ),
        # The reward's part is another one: its proportion to the KL's changes.
        (
            limited("B", WHITENED, (0.4, 0.3), beside_reward=[1.4, 1.38, 1.42]),
            "mixed",
            "∇KL(π‖ref) and something else, as B grows (off by 0.4/B); at B = 2: unnamed",
        ),
        (
            limited("B", PER_TOKEN, (0.0, 0.25)),
            "part",
            "next-token part of ∇KL(π‖ref), × 1/E[T], as B grows (off by 0.25/B); at B = 2: unnamed",
        ),
        # A coefficient that grows to one, with its law: nothing else is off.
        (
            {
                **limited("B", [{"reverse_kl": ends(127 / 128, 127 / 128)}] * 2, (0.0, 0.0)),
                "laws": {"reverse_kl": "(1 − 1/B)"},
                "gradients": row("one", "mean", {"reverse_kl": 0.5}, [], {})["gradients"],
            },
            "on-policy",
            "∇KL(π‖ref), as B grows; at B = 2: ∇KL(π‖ref) up to scale, × (1 − 1/B)",
        ),
        (
            {
                **limited("B", PER_TOKEN, (0.0, 0.25)),
                "gradients": [
                    {**each, "identified": None if each["environment"] == "ragged" else {"local_reverse_kl": 1 / 3}}
                    for each in row("one", "mean", {}, [], {})["gradients"]
                ],
            },
            "part",
            "next-token part of ∇KL(π‖ref), × 1/E[T], as B grows (off by 0.25/B); at B = 2: × 1/T, at equal lengths",
        ),
        (limited("B", [{}, {}], (0.3, 0.3)), "none", "no gradient, as B grows (off by 0.3/B); at B = 2: unnamed"),
        # Groups stay small.
        (
            limited("group size", PER_TOKEN, (0.0, 0.25)),
            "unnamed",
            "unnamed; next-token part of ∇KL(π‖ref), × 1/E[T], as the group grows (off by 0.25/group size)",
        ),
        (limited("B", WHITENED, (0.4, None)), "unnamed", "unnamed; still moving at B = 128"),
        (row("one", "unmeasured", None, [], {}), "unnamed", "unnamed"),
    ],
)
def test_a_loss_that_couples_rows_is_classed_by_its_limit_beside_that_of_small_batches(given, kind, follows):
    line = frame([given], programs=False).iloc[0]
    assert (line["kind"], line["follows"]) == (kind, follows)
    # What is proposed instead of a default has to follow it in batches of any size.
    assert line["exactly"] not in ("whole", "on-policy")
    assert follows in html(frame([given]))


def test_the_first_row_says_what_is_followed_what_happens_unset_and_what_to_set_instead():
    text = re.sub(r"<[^>]+>", " ", html(frame(ROWS)))
    first = " ".join(text.partition("without its KL")[2].split())
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
