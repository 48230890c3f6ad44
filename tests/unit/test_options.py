"""The table of options: what is made from it agrees, old names are read, mistakes are refused before torch loads."""

import inspect
import re
import sys

import pytest
from cases.parts import k2 as right
from processes import ran
from rich.cells import cell_len
from typer.main import get_command
from typer.testing import CliRunner

import kltest
from kltest import parametrize_with_checks
from kltest.cli import app
from kltest.errors import UsageError
from kltest.estimators import registry
from kltest.grading.options import KEYS, OPTIONS, RENAMED, Options
from kltest.parametrize import GradedCheck


def test_grades_signature_is_the_table():
    parameters = dict(list(inspect.signature(kltest.grade).parameters.items())[1:])
    assert list(parameters) == [*OPTIONS, "call", "read", *RENAMED]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert {name: parameters[name].default for name in OPTIONS} == {o.name: o.default for o in OPTIONS.values()}
    given = {name: parameters[name].default for name in (*OPTIONS, *RENAMED)}
    assert Options.of(**given) == Options()


def test_grades_documentation_explains_every_option():
    text = inspect.getdoc(kltest.grade)
    assert "{options}" not in text
    for option in OPTIONS.values():
        assert re.search(rf"^    {option.name}: \S", text, re.MULTILINE), option.name
    assert max(map(len, text.splitlines())) <= 120


def test_the_command_line_has_every_flag_with_its_help():
    parameters = {flag: each for each in get_command(app).commands["grade"].params for flag in each.opts}
    for option in OPTIONS.values():
        if option.flag:
            assert parameters[option.flag].help.startswith(option.help.rstrip("."))
            assert parameters[option.flag].name == option.name
    assert parameters["--allow-stale-excuses"].hidden


def test_every_flag_but_those_of_python_may_stand_in_the_configuration():
    assert {option.name for option in OPTIONS.values()} - {option.name for option in KEYS.values()} == {"beta", "name"}


def test_the_old_name_is_read_in_python_with_a_warning():
    options = {"expected_failures": {"KL201": "was so once"}, "select": "KL2", "environment": "bandit,sequence"}
    with pytest.warns(DeprecationWarning, match="write allow_unexpected_passes") as told:
        assert kltest.grade(right, allow_stale_excuses=True, **options).verdict == "confirmed"
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="write allow_unexpected_passes") as told:
        mark = parametrize_with_checks([right], allow_stale_excuses=True, select="KL201").mark
    assert told[0].filename == __file__
    check = next(part for part in mark.args[1][0].values if isinstance(part, GradedCheck))
    assert check.grading.options["allow_unexpected_passes"] is True


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("kltest grade k3-", [name for name in registry() if name.startswith("k3-")]),
        ("kltest gra", ["grade"]),
        ("kltest grade --allow-un", ["--allow-unexpected-passes"]),
    ],
)
def test_a_shell_completes_commands_options_and_registered_names(words, completed):
    environment = {"_KLTEST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert CliRunner().invoke(app, [], prog_name="kltest", env=environment).stdout.split() == completed


@pytest.mark.parametrize("module", ["kltest", "kltest.cli"])
def test_python_dash_m_is_the_program(module):
    assert ran(sys.executable, "-m", module, "--version").stdout == f"kltest {kltest.__version__}\n"


def test_the_list_fits_into_a_hundred_columns():
    text = CliRunner().invoke(app, ["list"]).stdout
    assert max(map(cell_len, text.splitlines())) <= 100
    lines = text.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*registry()]  # a line each
    assert any(line.split() == ["k3-loss", "loss", "local_forward_kl"] for line in lines)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"select": "KL999"}, "begins with 'KL999'; they go from KL101 to KL906, and `kltest list` has them"),
        ({"select": "KL405"}, "begins with 'KL405'; did you mean KL105 or KL205 or KL305?"),
        ({"expected_failures": {"KL209": "x"}}, "no check 'KL209'; did you mean KL201 or KL202 or KL203?"),
        ({"arguments": ["foo"]}, "NAME=VALUE or NAME=@FIELD; it is 'foo'"),
        ({"sampler": "stael"}, "did you mean stale? they are both, current"),
    ],
)
def test_a_wrong_value_names_what_is_near_and_no_long_list(given, words):
    with pytest.raises(UsageError) as refused:
        Options.of(**given)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200


def test_python_is_told_what_python_takes_and_once():
    with pytest.raises(UsageError) as refused:
        kltest.grade(lambda x: x)
    assert 'in Python with arguments={"x": VALUE}' in str(refused.value)
    with pytest.raises(UsageError) as refused:
        kltest.grade("nosuch")
    assert str(refused.value).count("no estimator called") == 1
