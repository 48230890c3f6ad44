"""`kltest explain`: every part of every check, its demonstration, and ways out that work as they are written."""

import itertools
import json
import re
import shlex

import pytest
from doors import call, refused
from weekly import spread

import kltest
from kltest.checks import CHECKS
from kltest.cli.explain import LOSS, declaration, demonstrate, expectation, explain, libraries, other_level, parts
from kltest.counterexample.environment import SmallEnvironment
from kltest.estimators import registry
from kltest.grading.configuration import read
from kltest.scoreboard import recorded
from kltest.truth import ATLAS

every_check = pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
DECLARED = [check for check in CHECKS.values() if check.declare]
TOKEN_LEVEL = "def kl_penalty(logp, ref_logp):\n    return (logp - ref_logp) ** 2 / 2\n"


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "losses.py").write_text(TOKEN_LEVEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("check", spread(5, CHECKS.values()), ids=list(CHECKS))
def test_everything_that_a_check_says_is_printed_and_code_can_be_copied(check):
    printed = explain(check.code.lower())
    said = one_line(printed)
    assert said == one_line(explain(check.name))
    texts = (check.title, check.what, check.why, check.example, check.fix, *check.sources, libraries(check))
    assert all(one_line(text) in said for text in texts)
    assert all(f"{option}=" in said for option in check.options)
    assert f"How serious A{' warning' if check.level == 'warning' else 'n error'}: " in said
    assert f"--select {check.code} --verbose" in said
    assert [part.code for part in parts(check) if part.code][:2] == [check.wrong_code, check.fixed_code]
    for part in parts(check):
        if part.code:
            compile(part.code, check.code, "exec")
            assert "\n".join(f"    {line}".rstrip() for line in part.code.splitlines()) in printed


@pytest.mark.parametrize(("actions", "length", "ends"), [(2, 1, False), (2, 3, False), (3, 3, False), (3, 3, True)])
def test_places_are_named_by_the_actions_that_lead_there(actions, length, ends):
    """In the order of contexts: the root, then prefixes of one action, of two; the action that ends leads nowhere."""
    going_on = range(actions - ends)
    prefixes = [prefix for depth in range(length) for prefix in itertools.product(going_on, repeat=depth)]
    table = [[1 / actions] * actions] * len(prefixes)
    environment = SmallEnvironment(table, table, length=length, ends=ends)
    assert environment.instance().environment.n_contexts == len(prefixes)
    places = [f"after {' '.join(map(str, prefix))}" if prefix else "root" for prefix in prefixes]
    assert [line.split(":")[0].strip() for line in environment.words().splitlines()[1:]] == places


@pytest.mark.parametrize("check", spread(4, CHECKS.values()), ids=list(CHECKS))
def test_the_demonstration_prints_its_table(check):
    printed = demonstrate(check.code)
    demonstration = check.demonstrate()
    assert printed.startswith(f"{check.code} {check.name}\n{check.title}\n\n{demonstration.setting}\n")
    head, *rows = printed.split("\n\n")[-1].strip().splitlines()
    assert len(rows) == len(demonstration.rows) >= 1
    assert re.split(r"\s{2,}", head.strip()) == [column for column in demonstration.columns if column]


def test_the_command_knows_every_name_and_runs_a_demonstration():
    for name in (*ATLAS, *registry(), "KL102", "K3_LOSS", "k3"):
        assert len(call("explain", name, code=0).stdout.splitlines()) >= 4, name
    shown = call("explain", "KL102", "--demo", code=0).stdout
    assert "1.386294" in shown
    assert "1.875000" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("KL10",), "called 'KL10'; did you mean"),
        (("reverse_k",), "reverse_kl"),
        *(((name, "--demo"), f"no check is called {name!r}") for name in ("k3-loss", "reverse_kl", "KL1", "")),
    ],
)
def test_an_unknown_name_is_refused_and_only_checks_have_demonstrations(arguments, words):
    assert words in refused("explain", *arguments)


def verdict(command):
    first, *arguments = shlex.split(command)
    assert first == "kltest"
    return json.loads(
        call(*arguments, "--environment", "bandit,sequence", "--select", "KL2", "--output", "json").stdout
    )["verdict"]


@pytest.mark.scheduled
@pytest.mark.parametrize("ways", [expectation, declaration])
def test_each_place_makes_a_token_level_loss_confirmed(ways, project):
    assert verdict(f"kltest grade {LOSS}") == "refuted"
    written = dict(ways(CHECKS["KL201"]))
    assert verdict(written["command line"]) == "confirmed"
    (project / "pyproject.toml").write_text(written["pyproject.toml"])
    assert verdict("kltest grade") == "confirmed"
    scope = {"kltest": kltest}
    exec(TOKEN_LEVEL, scope)
    report = eval(written["Python"].replace("(loss", "(kl_penalty"), scope)
    assert report.verdict == "confirmed"


@pytest.mark.parametrize("check", spread(10, CHECKS.values()), ids=list(CHECKS))
def test_every_way_can_be_read(check, project):
    for place, written in (way for part in parts(check) for way in part.ways):
        if place == "Python":
            compile(written, check.code, "exec")
        elif place == "pyproject.toml":
            (project / "pyproject.toml").write_text(written)
            assert read(project / "pyproject.toml").path is not None
        else:
            assert shlex.split(written)[0] == "kltest"
    (project / "pyproject.toml").write_text(dict(other_level(check))["pyproject.toml"])
    level = "error" if check.level == "warning" else "warning"
    assert read(project / "pyproject.toml").options["levels"] == {check.code: level}
    assert f'levels={{"{check.code}": "{level}"}}' in dict(other_level(check))["Python"]


@pytest.mark.parametrize("check", spread(1, DECLARED), ids=[check.code for check in DECLARED])
def test_the_wrong_loss_follows_what_its_page_says_to_declare(check):
    options = {name: value for name, value in check.options.items() if name != "expect"}
    environment = ("bandit", "sequence")
    report = kltest.grade(check.wrong, **options, expect=check.declare, environment=environment, select="KL1,KL2,KL3")
    assert (report.verdict, [found.code for found in report.errors]) == ("confirmed", [])


@pytest.mark.scheduled
def test_the_libraries_are_those_of_the_record():
    rows = recorded.read()
    newest = {row["library"]: row["version"] for row in reversed(rows)}
    for code, check in CHECKS.items():
        of = {row["library"] for row in rows if code in [found["code"] for found in row["failed"]]}
        said = libraries(check)
        assert {name for name in newest if f"{name} {newest[name]} (" in said} <= of
    assert "trl" in libraries(CHECKS["KL201"])
    assert any(libraries(check) == "None of the recorded settings." for check in CHECKS.values())
