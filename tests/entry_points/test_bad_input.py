"""A wrong value is refused in words that name it, by whichever door it comes in, before anything is graded or written.

One table, four doors: `kltest.grade`, `@kltest.parametrize_with_checks`, the command line, `[tool.kltest]`.
"""

import inspect
import math
import os
from contextlib import suppress
from pathlib import Path

import doors
import pytest
import torch
from weekly import spread

import kltest
from kltest import parametrize_with_checks
from kltest.errors import UsageError
from kltest.grading.options import OPTIONS, RENAMED

NAN, INF = math.nan, math.inf
WHY = "token-level on purpose"

# Wrong values of each argument of `kltest.grade`; a pair is a value and words that the message holds as well.
WRONG = {
    "expect": [
        5,
        None,
        [],
        "",
        "2*",
        ("revers_kl", "did you mean reverse_kl"),
        "reverse_kl--",
        "nan*reverse_kl",
        {"reverse_kl": "x"},
        {"reverse_kl": NAN},
        {5: 1.0},
    ],
    "placement": [
        5,
        [],
        "",
        True,
        ("los", "did you mean loss"),
        ("rewards", "did you mean reward"),
        ("x", "reward, shaped-reward, both"),
    ],
    "credit": [5, [], "", ("togo", "did you mean to-go")],
    "environment": [5, None, [], "", ",", ("bandits", "did you mean bandit"), (["bandit", 5], "")],
    "sampler": [5, [], "", ("curent", "did you mean current"), ("stael", "did you mean stale")],
    "part": [5, [], "", ("polcy", "did you mean policy")],
    "arguments": [5, {5: 1}, ["mask"], {"no name": 1}, {"nope": 1}, {"mask": "@nope"}],
    "beta": [0, NAN, INF, "x", True, []],
    "select": [5, [5], "XX", "KL1,XX", ("KL999", "KL101")],
    "ignore": [5, [5], ("banana", "KL101")],
    "seed": [-1, 1.0, NAN, True, "x", None],
    "timeout": [-1, 0, NAN, True, "x", []],
    "group_size": [(1, "2"), 0, 2.5, NAN, True, "x"],
    "batch_size": [(1, "2"), 0, 2.5, NAN, True, "x"],
    "method": [5, [], "", ("exactly", "did you mean exact"), None],
    "error_rate": [0, 1, NAN, True, "x", None],
    "margin": [0, -1, NAN, INF, True, "x"],
    "samples": [0, 1.5, NAN, True, "x"],
    "bound": [0, -1, NAN, INF, True, "x"],
    "expected_failures": [
        5,
        {"KL9": "why"},
        ({"KL999": WHY}, "no check 'KL999'"),
        ({"KL2": WHY}, "no check 'KL2'"),
        ({3: WHY}, "no check"),
        ({"KL201": ""}, "say why KL201"),
        ({"KL201": "  "}, "say why"),
        ({"KL201": None}, "say why KL201"),
        ({"KL201": WHY, "kl201": WHY}, "two reasons"),
        ["KL201"],
        "KL201",
    ],
    "allow_unexpected_passes": [5, "yes", None],
    "strict": [5, "yes", None],
    "levels": [5, "KL502", {"KL999": "error"}, {"KL502": "fatal"}],
    "allow_stale_excuses": [5, "yes", None],
    "name": [5, "", []],
}
# What a message calls an option whose name is another where it is written.
NAMED = {"arguments": ("arg", "@nope"), "expected_failures": ("expect", "KL201")}
# Wrong by itself, in whatever option: these stand on the command line alone.
COMMANDS = [
    (["k3-los"], ["k3-los", "did you mean k3-loss"]),
    (["no_such_module:f"], "no_such_module"),
    (["no_such_file.py:f"], "no_such_file.py"),
    (["losses.py:no_such_function"], "no_such_function"),
    (["losses.py:unfillable"], ["banana", "--arg banana=VALUE", "kltest list fields"]),
    (["losses.py:right", "losses.py:unfillable", "--output", "json:out.json"], "banana"),
    ([""], "no estimator called ''"),
    (["losses.py:right", "k3-los", "--output", "json:out.json"], "k3-los"),
    (["k3-loss", "--arg", "novalue"], "NAME=VALUE"),
    (["k3-loss", "--arg", "1x=2"], "NAME=VALUE"),
    (["k3-loss", "--expect-failure", "KL201"], ["--expect-failure", "CODE=REASON"]),
    (["k3-loss", "--expect-failure", "=x"], ["--expect-failure", "no check ''"]),
    (["k3-loss", "--expect-failure", "KL201=a", "--expect-failure", "KL201=b"], "two reasons"),
    (["k3-loss", "--diff", "missing.json"], "missing.json"),
    (["k3-loss", "--output", "jsn"], ["jsn", "did you mean json"]),
    (["k3-loss", "--output", "json:"], "no file"),
    (["k3-loss", "--output", "json:missing/x.json"], ["missing", "No such file"]),
    (["k3-loss", "--output", "json:."], "Is a directory"),
    (["k3-loss", "--output", "json:a", "--output", "text:./a"], "two formats"),
    (["k3-loss", "--output", "json:a\0b"], "cannot be written"),
    (["k3-loss", "--output", f"json:{'x' * 5000}"], "cannot be written"),
    (["k3-loss", "--quiet", "--verbose"], "exclude each other"),
    (["k3-loss", "--no-such-option"], "--no-such-option"),
]
FILES = [
    ("[tool.kltest]\n\nexpct = 'reverse_kl'\n", ["line 3", "expct", "did you mean expect"]),
    ("[tool.kltest]\noutput = 3\n", ["line 2", "output"]),
    ("[tool.kltest]\nquiet = true\nverbose = true\n", "line 2: quiet and verbose exclude each other"),
    ("[tool.kltest]\nverbose = 'yes'\n", "line 2: verbose: give true or false"),
    ("[tool.kltest]\ncache = 3\n", "line 2: cache: give true or false"),
    ("[tool.kltest]\ntargets = 'k3-loss'\n", ["line 2", "targets", "list"]),
    ("[tool.kltest]\ntargets = [3]\n", ["line 2", "targets"]),
    ("[tool.kltest]\ntargets = [{expect = 'zero'}]\n", ["line 2", "target"]),
    ("[tool.kltest]\ntargets = [{target = 'k3-loss', sed = 3}]\n", ["line 2", "sed", "did you mean seed"]),
    ("[tool.kltest]\ntargets = [{target = 'k3-loss', expected-failures = {KL9 = 'x'}}]", ["line 2", "KL9"]),
    ("[tool.kltest]\nexpected-failure = {KL201 = 'x'}", ["line 2", "did you mean expected-failures"]),
    ("[tool]\nkltest = 3\n", ["line 2", "table"]),
    ("[tool.kltest]\nseed = \n", ["not valid TOML", "line 2"]),
    (b"\xff\xfe", "cannot be read"),
]
DECORATIONS = [
    (["k3-loss"], {"expected_failed_checks": lambda loss: {"KL9": "x"}}, "no check 'KL9'"),
    (["k3-loss"], {"expct": "reverse_kl"}, "did you mean expect"),
    (["k3-loss"], {"expected_failures": {}}, "expected_failed_checks"),
    ([], {}, "empty"),
    ("k3-loss", {}, "a list of losses"),
    (max, {}, "a list of losses"),
    ([3], {}, "one is 3"),
    ([""], {}, "one is ''"),
    ([pytest.param("k3-loss", "k1-loss")], {}, "one loss"),
]
NO_LOSSES = [None, 5, b"k3-loss", ["k3-loss"], {}, torch.ones(2), object(), "a" * 5000 + ".py:f"]
LOSSES = "def right(logp, ref_logp): ...\ndef unfillable(logp, banana): ...\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a file of losses and nothing else."""
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loss(logp, ref_logp, mask):
    pytest.fail("was called")


def said(text, option, words):
    """The message names the option, and says what it is to say."""
    names = (option, option.replace("_", "-"), *NAMED.get(option, ()))
    assert any(name in text for name in names), text
    assert words in text


def refused(*arguments):
    """What a usage error of `kltest grade` says; it leaves no file."""
    before = set(Path().glob("*.*"))
    message = doors.refused("grade", *arguments)
    assert set(Path().glob("*.*")) == before
    return message


def rows(written, count=None):
    """A test for each wrong value that can be written at a door: what is written, the option, words of the message.

    What is wrong is decided behind all doors: at others than Python's about `count` are tried on every push.
    """
    found = []
    for option, values in WRONG.items():
        for entry in values:
            value, words = entry if isinstance(entry, tuple) else (entry, "")
            text = written(option, value)
            if text is not None:
                found.append(pytest.param(text, option, words, id=f"{option}-{value!r}"[:60]))
    return pytest.mark.parametrize(("given", "option", "words"), spread(count, found) if count else found)


def as_argument(option, value):
    return {option: value}


def as_decoration(option, value):
    """Losses have their own names there, and are bound when they are graded."""
    if option == "name" or (option == "arguments" and value in ({"nope": 1}, {"mask": "@nope"})):
        return None
    return {"expected_failed_checks" if option == "expected_failures" else option: value}


def as_words(option, value):
    """An option's value on the command line; None where that cannot say it, or means it otherwise."""
    flag = OPTIONS[option].flag if option in OPTIONS else None
    if flag is None or OPTIONS[option].kind is bool or isinstance(value, bool | list | None):
        return None
    if isinstance(value, dict):
        return [part for key, entry in value.items() for part in (flag, f"{key}={'' if entry is None else entry}")]
    if OPTIONS[option].repeatable or (isinstance(value, float) and value.is_integer()):
        return None
    return [flag, str(value)]


def as_line(option, value):
    """A line of `[tool.kltest]`; None if the option, or such a value, cannot stand there."""
    key = option if option in RENAMED else OPTIONS[option].key
    bound_later = option == "arguments" and value in ({"nope": 1}, {"mask": "@nope"})
    with suppress(TypeError):
        return None if key is None or bound_later else f"{key} = {doors.toml(value)}"


def test_every_argument_of_grade_is_among_the_wrong_ones():
    assert set(inspect.signature(kltest.grade).parameters) - {"loss", "call", "read"} == set(WRONG)


@rows(as_argument)
def test_in_python(given, option, words):
    with pytest.raises(UsageError) as raised:
        kltest.grade(loss, **given)
    said(str(raised.value), option, words)


@rows(as_decoration, 40)
def test_in_pytest(given, option, words):
    with pytest.raises(UsageError) as raised:
        parametrize_with_checks([loss], **given)
    said(str(raised.value), option, words)


@rows(as_words, 40)
def test_on_the_command_line(given, option, words):
    said(refused("k3-loss", *given), option, words)


@rows(as_line, 40)
def test_in_the_configuration(folder, given, option, words):
    (folder / "pyproject.toml").write_text(f"[tool.kltest]\n\n{given}\n")
    message = refused("k3-loss")
    said(message, option, words)
    assert f"{folder / 'pyproject.toml'}, line 3" in message


@pytest.mark.parametrize("target", NO_LOSSES, ids=lambda target: type(target).__name__)
def test_what_is_no_loss_is_refused(target):
    with pytest.raises(UsageError) as raised:
        kltest.grade(target)
    assert "is a int" not in str(raised.value)


@pytest.mark.parametrize(("losses", "options", "words"), DECORATIONS)
def test_a_wrong_decoration_is_refused_at_once(losses, options, words):
    with pytest.raises(UsageError, match=words):
        parametrize_with_checks(losses, **options)


@pytest.mark.parametrize(("arguments", "words"), COMMANDS, ids=lambda given: repr(given)[:60])
def test_a_wrong_command_is_refused_before_the_work(arguments, words):
    message = refused(*arguments)
    assert all(each in message for each in ([words] if isinstance(words, str) else words)), message


@pytest.mark.parametrize(("text", "words"), FILES, ids=lambda given: repr(given)[:60])
def test_a_wrong_file_is_a_usage_error_that_names_it(folder, text, words):
    (folder / "pyproject.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused("losses.py:right")
    assert all(each in message for each in ([words] if isinstance(words, str) else words)), message
    assert str(folder / "pyproject.toml") in message


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_path_without_permission_is_refused(folder):
    (folder / "locked").mkdir(mode=0o500)
    assert "cannot be written" in refused("k3-loss", "--output", "json:locked/x.json")


def test_trying_a_path_does_not_change_the_file_there(folder):
    (folder / "there.json").write_text("as it was")
    assert "k3-los" in refused("k3-los", "--output", "json:there.json", "--output", "json:new.json")
    assert (folder / "there.json").read_text() == "as it was"
