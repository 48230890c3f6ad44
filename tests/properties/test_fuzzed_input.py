"""Fuzz: whatever stands on the command line or in pyproject.toml, no traceback of ours and no unknown exit code."""

import os

import pytest
from doors import GRADED, call, canned, toml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from weekly import examples

from kltest.errors import UsageError
from kltest.grading.configuration import Configuration, read
from kltest.grading.options import KEYS
from kltest.grading.options import OPTIONS as TABLE
from kltest.report import Report

# Exit codes, without those that only a grading can end with: these gradings are canned.
CONFIRMED, USAGE, NOTHING = 0, 2, 5
FUZZ = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to call kltest in, where every target is confirmed at once and no folder above has a say."""

    monkeypatch.setattr(GRADED, canned())
    for name in ("reproduce", "run", "figures", "paper"):
        monkeypatch.setattr(f"kltest.reproduce.commands.{name}", lambda *_, **__: 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "old.json").write_text(Report("k3-loss", "zero", "loss", 0, {}, "error", "mean", "float64").to_json())
    return tmp_path


LISTED = """
    k3-loss losses.py:f a.b:c file.py: : .py:f ../x.py:f reverse_kl 2*forward_kl-entropy -reverse_kl 1e400*zero
    loss reward both return to-go immediate current stale both bandit,mdp , bandit, KL1 KL101 kl2,KL3 KL999
    x=@logp x=1 x= =1 x=[1] KL201=why KL201= KL999=x =x KL201=a=b exact sampled
    0 -1 1 2 5 0.5 1e-6 1e400 nan inf -inf 1_000 ٣ 9223372036854775808
    grade list explain reproduce run figures paper --json --scale --only --version quick
    text json json:- json: junit:x.xml markdown:x.md github github:/ html:missing/x old.json missing.json . / -- - -h
"""
WORDS = LISTED.split()
OPTIONS = [option.flag for option in TABLE.values() if option.flag] + ["--diff", "--output"]
WORD = st.sampled_from(WORDS) | st.text(max_size=8)
# An option with a value of its own, or by itself, or joined to it, or neither.
PART = st.one_of(
    st.tuples(st.sampled_from(OPTIONS), WORD).map(list),
    st.tuples(st.sampled_from(OPTIONS), WORD).map(lambda pair: ["=".join(pair)]),
    st.sampled_from([*OPTIONS, "--help", "--allow-stale-excuses"]).map(lambda option: [option]),
    WORD.map(lambda word: [word]),
)


@settings(FUZZ, max_examples=examples(600))
@given(st.sampled_from([[], ["grade"], ["grade"]]), st.lists(PART, max_size=5))
def test_no_command_line_gives_a_traceback_or_an_unknown_exit_code(command, parts):
    arguments = [*command, *(word for part in parts for word in part)]
    result = call(*arguments)
    assert "bug in kltest" not in result.output
    assert result.exit_code in (CONFIRMED, USAGE, NOTHING), (arguments, result.output)
    if result.exit_code == USAGE:
        assert (result.stdout, bool(result.stderr.strip())) == ("", True)


NAMES = st.sampled_from(
    [*KEYS, *(name.replace("-", "_") for name in KEYS), "allow-stale-excuses", "targets", "output", "target", "KL201"]
)
SCALAR = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=8), st.integers(), st.booleans(), st.floats(), st.integers(0, 9)
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | NAMES, inner, max_size=3),
    max_leaves=6,
)
TARGET = st.sampled_from(WORDS) | st.fixed_dictionaries({"target": SCALAR}).flatmap(
    lambda table: st.dictionaries(NAMES, VALUE, max_size=2).map(lambda more: {**more, **table})
)
TABLE = st.dictionaries(NAMES | st.text(max_size=6), VALUE, max_size=4).flatmap(
    lambda table: (st.just({}) | st.lists(TARGET, max_size=3).map(lambda targets: {"targets": targets})).map(
        lambda more: {**table, **more}
    )
)


def configured(folder, text):
    """What comes of a file, by itself and through the command; both tell the same."""
    (folder / "pyproject.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = read(folder / "pyproject.toml")
    except UsageError as error:
        found = error
    result = call("grade")
    assert result.exit_code in (CONFIRMED, USAGE, NOTHING), result.output
    assert "bug in kltest" not in result.output
    if isinstance(found, UsageError):
        assert result.exit_code == USAGE
        assert "pyproject.toml" in str(found)
    elif not found.targets:
        assert result.exit_code in (NOTHING, USAGE)
    return found, result


@settings(FUZZ, max_examples=examples(400))
@given(TABLE.map(lambda table: {"kltest": table}) | VALUE.map(lambda value: {"kltest": value}) | VALUE)
def test_no_settings_give_a_traceback_or_an_unknown_exit_code(folder, tool):
    text = toml(tool)
    assume("\\ud" not in text)  # a lone surrogate has no spelling in TOML
    configured(folder, f"tool = {text}\n")


GOOD = """
[project]
name = "x"

[tool.kltest]
expect = "reverse_kl"
environment = ["bandit", "sequence"]
output = ["text", "json:out.json"]
seed = 3
arg = {scale = 2.0}
targets = [
    "pkg.losses:kl",
    {target = "losses.py:kl", sampler = "both", expected-failures = {KL201 = "on purpose"}},
]

[tool.kltest.expected-failures]
KL104 = "for all"
"""


@settings(FUZZ, max_examples=examples(300))
@given(st.data())
def test_no_damage_to_a_good_file_does(folder, data):
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 8)))
        put = data.draw(st.sampled_from([*'"[]{}=,.#\n', *WORDS, ""]) | st.text(max_size=3))
        text = text[:start] + put + text[end:]
    configured(folder, text)


def test_the_good_file_is_good(folder):
    found, result = configured(folder, GOOD)
    assert isinstance(found, Configuration)
    assert [target.text for target in found.targets] == ["pkg.losses:kl", "losses.py:kl"]
    assert result.exit_code == CONFIRMED
    assert os.path.exists("out.json")
