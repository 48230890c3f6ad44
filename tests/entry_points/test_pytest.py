"""pytest: an item for each loss and check, lazily graded, strict about expected failures; the plugin around them."""

import inspect
import sys
import textwrap
from functools import partial

import pytest
from called import WRITTEN
from weekly import first

# Loaded here, since what a run within this run imports is forgotten after it, and torch cannot be loaded twice.
import kltest.cli.grade
import kltest.grading.grader
import kltest.parametrize
import kltest.render.text
from kltest import parametrize_with_checks
from kltest.checks import CHECKS
from kltest.errors import KltestWarning
from kltest.estimators import registry
from kltest.grading.verdict import selected_codes
from kltest.parametrize import ALLOWED, loss_name

pytest_plugins = ["pytester"]

LOSSES = (WRITTEN / "counted.py").read_text(encoding="utf-8")


SHORT = 'environment="bandit,sequence", select="KL1,KL2"'


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with the losses above and a test file that decorates with the given text."""
    pytester.makepyfile(losses=LOSSES)
    pytester.syspathinsert()
    monkeypatch.setenv("COLUMNS", "200")

    def make(decoration, body="check(loss)", name="test_kl"):
        text = f"import kltest\nfrom losses import *\n\n@kltest.parametrize_with_checks({decoration})\n"
        return pytester.makepyfile(**{name: text + f"def test_kl(loss, check):\n    {body}\n"})

    yield make
    # A test file's module of losses must not be taken for the next one's.
    sys.modules.pop("losses", None)


def outcomes(pytester, *arguments):
    """The outcome of each item by its id."""
    run = pytester.inline_run("--strict-markers", "-p", "no:cacheprovider", "-W", "ignore", *arguments)
    found = {}
    for report in run.getreports("pytest_runtest_logreport"):
        if report.when == "call" or report.outcome != "passed":
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
            found[report.nodeid.partition("[")[2].rstrip("]")] = outcome
    return found


def failed(found):
    return {name for name, outcome in found.items() if outcome == "failed"}


@pytest.mark.scheduled
def test_an_item_for_the_gradient_and_one_for_every_check_of_every_loss(project, pytester):
    project('[right, forward, "k2-loss-sequence"], environment="bandit"')
    found = outcomes(pytester)
    ids = [
        f"{name}-{code}"
        for name in ("right", "forward", "k2-loss-sequence")
        for code in ("gradient", *selected_codes((), ()))
    ]
    assert list(found) == ids
    assert failed(found) == {"forward-gradient"} | {
        f"forward-{code}" for code in failing("k3-loss", environment="bandit")
    }
    assert "forward-KL102" in failed(found)
    assert found["right-KL104"] == "skipped"


def failing(loss, **options):
    """The codes that kltest.grade finds, warnings aside."""
    return [check.code for check in kltest.grade(loss, **options).failed if not check.warns]


@pytest.mark.scheduled
def test_every_loss_is_graded_once_and_not_when_tests_are_collected(project, pytester, monkeypatch):
    graded = []
    real = kltest.grading.grader.grade

    def counting(loss, **given):
        graded.append((given["name"], given["environment"]))
        return real(loss, **given)

    monkeypatch.setattr("kltest.grading.grader.grade", counting)
    project('[right, forward], environment="bandit", select="KL1"')
    pytester.inline_run("--collect-only", "-q")
    assert graded == []
    assert len(outcomes(pytester)) == 2 * (1 + sum(code.startswith("KL1") for code in CHECKS))
    assert graded == [("right", "bandit"), ("forward", "bandit")]


def test_collecting_loads_no_torch(pytester):
    pytester.makepyfile(
        """
        import sys, kltest

        @kltest.parametrize_with_checks(["k3-loss", "losses.py:right"], expected_failed_checks={"KL102": "known"})
        def test_kl(loss, check): ...

        assert "torch" not in sys.modules
        """
    )
    done = pytester.runpytest_subprocess("--collect-only", "-q")
    done.assert_outcomes()
    done.stdout.fnmatch_lines(["*test_kl[[]k3-loss-gradient[]]", "*test_kl[[]losses.py:right-KL101[]]"])


def test_the_plugin_costs_no_import_of_torch_or_checks_when_unused(pytester):
    pytester.makepyfile(
        "import sys\n\ndef test_nothing():\n    assert 'kltest.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'kltest.grading', 'kltest.parametrize'} & set(sys.modules)\n"
    )
    done = pytester.runpytest_subprocess("-p", "no:hypothesispytest")
    done.assert_outcomes(passed=1)
    assert "= kltest =" not in done.stdout.str()


@pytest.mark.parametrize(
    ("decoration", "arguments", "wrong", "expected"),
    first(
        2,
        [
            (
                f'[token_level], {SHORT}, expected_failed_checks={{"KL201": "on purpose"}}',
                (),
                set(),
                {"gradient", "KL201"},
            ),
            (
                f'[token_level], {SHORT}, expected_failed_checks={{"KL102": "the wrong one"}}',
                (),
                {"gradient", "KL201", "KL102"},
                set(),
            ),
            (
                f'[token_level], {SHORT}, expected_failed_checks={{"KL201": "x"}}',
                ("--runxfail",),
                {"gradient", "KL201"},
                set(),
            ),
            (
                f"[right, token_level], {SHORT}, "
                'expected_failed_checks=lambda one: {"KL201": "x"} if one != right else None',
                (),
                set(),
                {"gradient", "KL201"},
            ),
        ],
    ),
    ids=["expected, with the gradient that it explains", "another", "shown all the same", "depends on the loss"],
)
def test_what_fails_is_what_is_not_expected(project, pytester, decoration, arguments, wrong, expected):
    project(decoration)
    found = outcomes(pytester, *arguments)
    assert failed(found) == {f"token_level-{name}" for name in wrong}
    xfailed = {name for name, outcome in found.items() if outcome == "xfailed"}
    assert xfailed == {f"token_level-{name}" for name in expected}


@pytest.mark.scheduled
def test_an_expected_failure_that_passes_is_a_failure_unless_that_is_allowed(project, pytester):
    project(f'[right], {SHORT}, expected_failed_checks={{"KL201": "was so once"}}')
    assert failed(outcomes(pytester)) == {"right-KL201"}
    summary = pytester.runpytest_inprocess("-k", "KL201", "-W", "ignore").stdout
    summary.fnmatch_lines(["refuted  right  *KL201 (unexpected pass)"])
    project(f'[right], {SHORT}, expected_failed_checks={{"KL201": "was so once"}}, allow_unexpected_passes=True')
    assert failed(outcomes(pytester)) == set()


def test_a_loss_that_raises_fails_everywhere_and_no_excuse_covers_it(project, pytester):
    project('[broken], expected_failed_checks={"KL201": "on purpose"}, select="KL2"')
    found = outcomes(pytester)
    assert failed(found) == set(found)
    done = pytester.runpytest_inprocess("-k", "KL201")
    done.stdout.fnmatch_lines(["E*TargetError: broken raised ValueError:", "E*ValueError: the user's own words"])


def test_a_loss_that_cannot_be_called_is_said_in_one_line(project, pytester):
    project('[unfillable], select="KL2"')
    done = pytester.runpytest_inprocess("-k", "KL201")
    done.stdout.fnmatch_lines(["E*UsageError: *banana*"])
    done.stdout.no_fnmatch_line("*grader.py*")


def test_a_gradient_that_cannot_be_judged_fails(project, pytester):
    name = next(name for name, entry in registry().items() if entry.spec.off_policy_only)
    assert kltest.grade(name, sampler="current", environment="bandit").verdict == "inconclusive"
    project(f'["{name}"], sampler="current", environment="bandit"')
    assert failed(outcomes(pytester)) == {f"{name}-gradient"}


def test_what_only_warns_warns_and_an_excuse_silences_it(project, pytester, monkeypatch):
    from kltest.grading.verdict import ExpectedFailures
    from kltest.report import CheckResult, Report

    noisy = CheckResult("KL802", "inefficient", "fail", "noisier than need be", level="warning")

    def canned(loss, *, name, expected_failures, **options):
        checks = [ExpectedFailures(expected_failures).result(noisy)]
        return Report(name, "reverse_kl", "loss", 0, {}, "confirmed", "per-row", "float64", checks=checks)

    monkeypatch.setitem(CHECKS, "KL802", CHECKS["KL101"])
    monkeypatch.setattr("kltest.grading.grader.grade", canned)
    project('[right], select="KL802"')
    done = pytester.runpytest_inprocess("-k", "KL802")
    done.assert_outcomes(passed=1, warnings=1)
    told = "*KltestWarning: right: KL802 inefficient: noisier than need be"
    done.stdout.fnmatch_lines([told, "*right  KL802 (warns)"])
    project('[right], select="KL802", expected_failed_checks={"KL802": "known"}')
    pytester.runpytest_inprocess("-k", "KL802").assert_outcomes(xfailed=1, warnings=0)


@pytest.mark.scheduled
def test_an_excuse_that_meets_no_check_gives_a_warning(project, pytester):
    with pytest.warns(KltestWarning, match="KL201 is expected to fail"):
        parametrize_with_checks(["k2-loss"], expected_failed_checks={"KL201": "x"}, select="KL1")
    project('[right], expected_failed_checks={"KL301": "never so"}')
    done = pytester.runpytest_inprocess("-k", "KL301")
    done.assert_outcomes(skipped=1, warnings=1)
    done.stdout.fnmatch_lines(
        ["*KltestWarning: KL301 is expected to fail for right, but the check could not be made here*"]
    )


def test_every_option_of_grade_may_be_given():
    taken = set(inspect.signature(kltest.grade).parameters)
    assert taken - {"loss", "name", "expected_failures", "call", "read"} == ALLOWED


class Named:
    """A loss whose own text holds its address."""

    def method(self, logp): ...

    def __call__(self, logp): ...


def inner(logp, *others, **named): ...


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (inner, "inner"),
        (partial(inner, beta=0.5), "inner(beta=0.5)"),
        (Named().method, "Named.method"),
        (Named(), "Named"),
        (lambda logp: logp, "lambda"),
        ("package.module:function", "package.module:function"),
        (partial(inner, scale=partial(inner, object())), "inner(scale=inner(object))"),
        (partial(inner, [1, object()], names={"a", "b"}), "inner([1, object], names=set)"),
        (partial(inner, list(range(1000))), "inner(list)"),
    ],
)
def test_ids_say_which_loss_it_is_and_are_the_same_in_every_process(loss, name):
    """Where they hold an address, or the order of a set, pytest's workers collect different tests and give up."""
    assert loss_name(loss) == name


def test_losses_of_one_name_are_told_apart_and_a_param_keeps_its_id_and_marks():
    def loss(logp): ...

    wrapped = pytest.param(loss, id="mine", marks=pytest.mark.skip)
    mark = parametrize_with_checks([loss, loss, wrapped, "loss-2"], select="KL101").mark
    parameters = mark.args[1]
    assert [parameter.id.rpartition("-")[0] for parameter in parameters[::2]] == ["loss", "loss-2", "mine", "loss-2-2"]
    assert [bool(parameter.marks) for parameter in parameters[::2]] == [False, False, True, False]


@pytest.mark.scheduled
def test_another_loss_made_by_the_test_is_graded_as_well_and_not_taken_for_the_first(project, pytester):
    project('[right], select="KL1"', body="check(lambda logp, ref_logp: forward(logp, ref_logp))")
    assert {"right-gradient", "right-KL102"} <= failed(outcomes(pytester))


@pytest.mark.scheduled
def test_items_carry_the_marker_and_the_header_and_summary_say_what_was_graded(project, pytester):
    """Losses of one name in two functions have a line each."""
    project('[right, forward], environment="bandit", select="KL1"')
    project('[forward], environment="bandit", select="KL1", expect="forward_kl"', name="test_declared")
    pytester.makepyfile(test_other="def test_other(): ...")
    done = pytester.runpytest_inprocess("-m", "kltest", "--strict-markers", "-W", "ignore")
    header = f"kltest: {kltest.__version__}, torch *; losses are graded in this process"
    lines = ["confirmed  forward", "confirmed  right", "refuted    forward  KL102"]
    done.stdout.fnmatch_lines([header, "*= kltest =*", *lines])
    assert done.parseoutcomes()["deselected"] == 1
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(["@pytest.mark.kltest: grades a loss*"])


@pytest.mark.scheduled
def test_several_processes_give_the_same_outcomes_and_one_summary(project, pytester):
    project('[right, forward], environment="bandit", select="KL1"')
    done = pytester.runpytest_subprocess("-n", "2", "--strict-markers", "-W", "ignore")
    alone = pytester.runpytest_inprocess("--strict-markers", "-W", "ignore")
    assert done.parseoutcomes() == alone.parseoutcomes()
    assert done.stdout.str().count("refuted    forward  KL102") == 1
    assert done.stdout.str().count("confirmed  right") == 1


def test_without_the_plugin_the_decorator_still_works(project, pytester):
    project('[forward], environment="bandit", select="KL1"')
    done = pytester.runpytest_inprocess("-p", "no:kltest", "--strict-markers", "-k", "KL101 or KL102")
    done.assert_outcomes(passed=1, failed=1)


CONFIGURED = """
    [tool.kltest]
    environment = "bandit,sequence"
    select = "KL1,KL2"
    targets = [
        "losses.py:right",
        {target = "losses.py:token_level", expected-failures = {KL201 = "on purpose"}},
        {target = "losses.py:forward", select = "KL1"},
    ]
"""


def test_the_configured_targets_are_items_when_asked_for(project, pytester):
    pytester.makefile(".toml", pyproject=textwrap.dedent(CONFIGURED))
    project('["k2-loss-sequence"], select="KL101"')
    for asked, arguments in ((False, []), (True, ["--kltest"]), (True, ["--kltest", "test_kl.py"])):
        collected = pytester.runpytest_inprocess("--collect-only", "-q", *arguments).stdout.str()
        assert ("pyproject.toml::losses.py:forward-KL102" in collected) == asked
    done = pytester.runpytest_inprocess("--kltest", "--strict-markers", "-W", "ignore", "-rf")
    done.stdout.fnmatch_lines(
        [
            "confirmed  losses.py:right",
            "confirmed  losses.py:token_level",
            "refuted    losses.py:forward  KL102",
            "FAILED pyproject.toml::losses.py:forward-gradient*",
            "FAILED pyproject.toml::losses.py:forward-KL102*",
        ]
    )
    counts = done.parseoutcomes()
    assert (counts["failed"], counts["xfailed"]) == (2, 2)
    done = pytester.runpytest_inprocess("--kltest", "-W", "ignore", "pyproject.toml::losses.py:forward-KL102")
    done.assert_outcomes(failed=1)
    done.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("[tool.kltest]\nsed = 1\n", "did you mean seed"),
        ("[tool.kltest]\n", "lists no targets"),
        (None, "there is no pyproject.toml"),
    ],
)
def test_a_configuration_that_cannot_be_graded_is_said(pytester, text, saying):
    if text is not None:
        pytester.makefile(".toml", pyproject=text)
    done = pytester.runpytest("--kltest", f"--rootdir={pytester.path}")
    assert done.ret not in (0, 1)
    assert saying in done.stdout.str() + done.stderr.str()
    assert "Traceback" not in done.stdout.str() + done.stderr.str()
