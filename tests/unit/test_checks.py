"""Every check keeps what it says: its example fails, the fixed one does not, the demonstration has its numbers."""

import importlib
import inspect
import math
import pkgutil
import re
import textwrap
from functools import cache

import pytest
from weekly import first, spread

import kltest
from kltest import checks
from kltest.checks import CHECKS, losses
from kltest.report import format_cell as written

# A number with at least three decimals is a result; 0.5 or 0.95 are settings.
RESULT = re.compile(r"[−-]?\d+\.\d{3,}")
# Arithmetic that leads to a result, as in 0.5·1.386294 = 0.693147 or ln 4 = 1.386294: its steps need not be printed.
TERM = r"\(?(?:ln |√)?\(?−?\d[\d.]*(?:/\d[\d.]*)?\)?²?"
SUM = re.compile(rf"({TERM}(?:\s?[−·/+]\s?{TERM})*) = (−?\d+\.\d{{3,}})")
ALL = pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))


def codes(report):
    return [check.code for check in report.failed]


@cache
def graded(function, **options):
    """Several checks have the same corrected loss, and grade it with the same options."""
    return kltest.grade(function, **options)


@cache
def demonstrated(code):
    return CHECKS[code].demonstrate()


@ALL
def test_the_wrong_loss_fails_the_check(check):
    # What other checks say is asked of logged values, and of warnings, which refute nothing.
    others = check.code.startswith(("KL6", "KL8"))
    # Every group of a bandit is enumerated as those of longer environments are, in a fraction of the time.
    where = {"environment": "bandit"} if check.code.startswith(("KL4", "KL902")) else {}
    report = kltest.grade(check.wrong, **check.options, **where, select=() if others else check.code)
    assert not report.error
    assert check.code in codes(report)
    (result,) = (result for result in report.checks if result.code == check.code)
    assert report.verdict == ("confirmed" if result.warns else "refuted")
    if check.code.startswith("KL6"):  # a metric that is no KL is KL601, whatever else is known of it
        assert {code for code in codes(report) if code < "KL8"} <= {check.code, "KL601"}
    # KL105 says where and by how much, in place of its title.
    assert result.message.startswith("The gradient is another named one on" if check.code == "KL105" else check.title)
    assert len(result.message) > len(check.title) + 10  # what was found, with its numbers
    assert check.why not in result.message  # that is `kltest explain`'s
    assert check.fixed_code in result.fix


@pytest.mark.parametrize("check", spread(6, CHECKS.values()), ids=list(CHECKS))
def test_the_fixed_loss_fails_nothing(check):
    """It is graded as its reader will grade it: what it follows is declared in words, if it is not the reverse KL."""
    options = dict(check.options)
    if f"declared as {options.get('expect')}" not in check.fix:
        options.pop("expect", None)
    report = graded(check.fixed, **options)
    assert report.verdict == "confirmed", (report.error, codes(report))
    assert check.code not in codes(report)
    for warning in report.warnings:
        assert f"warning {warning.code}" in check.fix, f"the fix does not say that {warning.code} warns of it"


@pytest.mark.parametrize("check", [check for check in CHECKS.values() if check.full_fix], ids=lambda check: check.code)
def test_the_fix_of_a_full_distribution_fails_nothing(check):
    fixed = getattr(losses, check.full_name)
    assert "ref_logits" in inspect.signature(fixed).parameters
    report = graded(fixed)
    assert (report.verdict, codes(report)) == ("confirmed", [])
    assert check.remedy({"logits", "ref_logits"}).endswith(inspect.getsource(fixed).strip())
    assert check.remedy({"logp", "ref_logp"}).endswith(check.fixed_code)


@ALL
def test_the_demonstration_has_the_numbers_of_the_example(check):
    demonstration = demonstrated(check.code)
    numbers = [cell for row in demonstration.rows for cell in row if not isinstance(cell, str)]
    assert demonstration.rows
    for text in RESULT.findall(SUM.sub("", check.example)):
        assert is_among(text, numbers) or text in demonstration.text(), f"{text} not in {list(map(written, numbers))}"
    for expression, result in SUM.findall(check.example):
        constant = re.fullmatch(r"(ln |√)[\d.]+", expression)
        assert constant or is_among(result, numbers), f"{result} not in {list(map(written, numbers))}"


def is_among(text, numbers):
    """To the decimals that are written."""
    decimals = len(text.partition(".")[2])
    value = float(text.replace("−", "-"))
    return any(abs(round(number, decimals) - value) < 0.5 * 10**-decimals for number in numbers)


def evaluated(expression):
    """A sum as a person writes it, as a number."""
    plain = expression.replace("−", "-").replace("·", "*").replace("²", "**2")
    plain = re.sub(r"ln ([\d.]+)", r"log(\1)", plain)
    plain = re.sub(r"√([\d.]+)", r"sqrt(\1)", plain)
    return eval(plain, {"__builtins__": {}}, {"log": math.log, "sqrt": math.sqrt})


@ALL
def test_the_sums_of_the_example_are_right(check):
    for expression, result in SUM.findall(check.example):
        # Its terms are rounded to six decimals, too, and multiplied by at most two.
        assert evaluated(expression) == pytest.approx(float(result.replace("−", "-")), abs=3e-6), expression


@ALL
def test_the_demonstration_tells_wrong_from_fixed(check):
    """In some row its cells differ: a demonstration that shows nothing is none."""
    demonstration = demonstrated(check.code)
    assert demonstration.setting
    assert all(len(row) == len(demonstration.columns) for row in demonstration.rows)
    cells = [list(map(str, row[1:])) for row in demonstration.cells()[1:]]
    assert any(len(set(row)) > 1 for row in cells) or len({tuple(row) for row in cells}) > 1


@ALL
def test_every_text_is_there(check):
    assert check.name == check.name.lower().replace(" ", "-")
    for text in (check.title, check.what, check.why, check.example, check.fix):
        assert text == text.strip()
        assert len(text.split()) >= 4
        assert "  " not in text
    assert not check.title.endswith(".")
    for text in (check.what, check.why, check.example, check.fix):
        assert text.endswith((".", ")", "!"))
    assert check.sources
    assert all(check.sources)
    assert check.wrong_code != check.fixed_code
    assert "def " in check.wrong_code
    assert "def " in check.fixed_code


def test_a_check_is_a_module_and_words_beside_it():
    """Each family's modules are those that its words name, and each says what it finds and how."""
    families = [family.name for family in pkgutil.iter_modules(checks.__path__) if family.ispkg]
    found = {
        f"kltest.checks.{family}.{module.name}"
        for family in families
        for module in pkgutil.iter_modules([f"{checks.__path__[0]}/{family}"])
        if module.name.startswith("kl")
    }
    assert found == {check.module for check in CHECKS.values()}
    for check in CHECKS.values():
        module = importlib.import_module(check.module)
        assert module.__doc__ is not None
        assert module.__doc__.startswith(f"{check.code}: ")
        assert hasattr(module, "demonstrate") != bool(check.demonstration)
        assert hasattr(module, "explains") or hasattr(module, "examine")
    assert len({check.name for check in CHECKS.values()}) == len(CHECKS)


@ALL
def test_the_shown_source_is_that_of_the_loss(check):
    """It is read from the file without importing it."""
    assert check.wrong_code == textwrap.dedent(inspect.getsource(check.wrong)).strip()
    assert check.fixed_code == textwrap.dedent(inspect.getsource(check.fixed)).strip()


def test_a_factor_whose_cause_is_known_is_reported_as_the_cause_alone():
    """Divided by the length, a gradient in rollouts of one length is a third of the declared one."""
    assert codes(graded("length-normalised", environment="sequence", select="KL106,KL203")) == ["KL203"]


@pytest.mark.parametrize("name", first(1, ["length-normalised", "k1-loss"]))
@pytest.mark.parametrize("select", first(1, ["KL106", "KL101", "KL1,KL2"]))
def test_checks_that_are_selected_say_what_they_say_among_all(name, select):
    """A cause is asked for its rows even if it is not selected: KL106 is not reported where KL203 explains it."""
    whole, some = graded(name, environment="sequence").to_dict(), graded(name, environment="sequence", select=select)
    chosen = [one for one in whole["checks"] if one["code"].startswith(tuple(select.split(",")))]
    assert some.to_dict()["checks"] == chosen
    assert some.to_dict()["gradients"] == whole["gradients"]
