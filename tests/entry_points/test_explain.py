"""`kltest explain`: every part of every check, its code and its demonstration, in words and in numbers."""

import itertools
import re

import pytest
from typer.testing import CliRunner

from kltest.checks import CHECKS
from kltest.cli import app
from kltest.cli.explain import demonstrate, explain, parts
from kltest.counterexample.environment import SmallEnvironment
from kltest.errors import UsageError

every_check = pytest.mark.parametrize("code", CHECKS)


def one_line(text: str) -> str:
    return " ".join(text.split())


@every_check
def test_everything_that_a_check_says_is_printed(code):
    check = CHECKS[code]
    said = one_line(explain(code.lower()))
    assert said == one_line(explain(check.name))
    for text in (check.title, check.what, check.why, check.example, check.fix, *check.sources):
        assert one_line(text) in said
    for source in (check.wrong_code, check.fixed_code):
        assert one_line(source) in said
    for option in check.options:
        assert f"{option}=" in said
    assert f"kltest explain {code} --demo" in said


@pytest.mark.parametrize(("actions", "length", "ends"), [(2, 1, False), (2, 3, False), (3, 3, False), (3, 3, True)])
def test_places_are_named_by_the_actions_that_lead_there(actions, length, ends):
    """In the order of contexts: the root, then prefixes of one action, of two; the action that ends leads nowhere."""
    going_on = range(actions - ends)
    prefixes = [prefix for depth in range(length) for prefix in itertools.product(going_on, repeat=depth)]
    table = [[1 / actions] * actions] * len(prefixes)
    environment = SmallEnvironment(table, table, length=length, ends=ends)
    assert environment.instance().environment.n_contexts == len(prefixes)
    places = [f"after {' '.join(map(str, prefix))}" if prefix else "root" for prefix in prefixes]
    assert [environment.prefix(context) for context in range(len(prefixes))] == places
    assert [line.split(":")[0].strip() for line in environment.words().splitlines()[1:]] == places


@every_check
def test_code_can_be_copied_as_it_stands(code):
    """The lines of both losses are those of Python once the common indentation is taken off."""
    said = explain(code)
    for part in parts(CHECKS[code]):
        if part.code:
            compile(part.code, code, "exec")
            lines = [f"    {line}".rstrip() for line in part.code.splitlines()]
            assert "\n".join(lines) in said


@every_check
def test_the_demonstration_prints_its_table(code):
    printed = demonstrate(code)
    demonstration = CHECKS[code].demonstrate()
    assert printed.startswith(f"{code} {CHECKS[code].name}\n{CHECKS[code].title}\n\n{demonstration.setting}\n")
    head, *rows = printed.split("\n\n")[-1].strip().splitlines()
    assert len(rows) == len(demonstration.rows) >= 1
    assert re.split(r"\s{2,}", head.strip()) == [column for column in demonstration.columns if column]


def test_the_command_runs_it():
    done = CliRunner().invoke(app, ["explain", "KL102", "--demo"])
    assert done.exit_code == 0
    assert "1.386294" in done.stdout
    assert "1.875000" in done.stdout


@pytest.mark.parametrize("name", ["k3-loss", "reverse_kl", "KL1", ""])
def test_only_checks_have_demonstrations(name):
    with pytest.raises(UsageError, match="no check is called"):
        demonstrate(name)
    done = CliRunner().invoke(app, ["explain", name, "--demo"])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
