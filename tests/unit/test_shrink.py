"""The smallest failing environment: as small as known, its numbers those of plain torch, its program one that runs."""

import html
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import losses_to_shrink as losses
import numpy as np
import pytest
import torch
from weekly import first, spread

import kltest
from kltest.counterexample.environment import counter_example
from kltest.counterexample.program import with_program
from kltest.counterexample.shrink import MILD, MILD_RATIO, unrelated
from kltest.counterexample.sources import NoSourceError, source_of
from kltest.loss.calling import bind
from kltest.render import render
from kltest.report import CounterExample, Report
from kltest.truth import ATLAS

HERE = Path(__file__).parents[1]
STALE = {"sampler": "stale"}


# The smallest environment depends on rows alone: of the checks only one is selected, which makes no experiment.
NO_EXPERIMENT = "KL101"


def smallest(loss, environment="bandit", **options) -> CounterExample:
    return kltest.grade(loss, environment=environment, select=NO_EXPERIMENT, **options).smallest


def reward(credit: str, placement: str = "reward") -> dict:
    return {"placement": placement, "credit": credit}


# Loss, options, and the size of the smallest environment that can show the failure, worked out by hand: (tokens,
# actions, ragged, rollouts in a batch).
BANDIT, PAIR, RAGGED = (1, 2, False, 1), (2, 2, False, 1), (2, 2, True, 1)
# Where it shows, if not in a bandit.
SHOWN = {PAIR: "bandit,sequence", RAGGED: "bandit,sequence,ragged"}
CASES = {
    # One of each way to fail, of each placement and of each form of what is declared.
    "a value a token": (losses.k3_per_token, {}, BANDIT),
    "partial gradient": (losses.k2_per_token, {}, PAIR),
    "logits": (losses.whole_distribution, {}, PAIR),
    "three actions": (losses.wrong_for_three_actions, {}, (1, 3, False, 1)),
    "no ratio": (losses.no_ratio, {"sampler": "both"}, BANDIT),
    "token ratio, stale": (losses.token_ratio, {"expect": "local_reverse_kl"}, PAIR),
    "only where lengths differ": (losses.divided_where_lengths_differ, {}, RAGGED),
    "no name": (losses.square_root, {}, BANDIT),
    "single precision": (losses.in_single_precision, {}, BANDIT),
    "method": (f"{losses.__name__}:Trainer.loss", {"arguments": {"self.coefficient": 0.5}}, PAIR),
    "reward, to-go": (losses.k3_of_sequences, reward("to-go"), BANDIT),
    "reward, immediate": (lambda logp, ref_logp: logp - ref_logp, reward("immediate"), PAIR),
    "both": (losses.k2_per_token, reward("return", "both"), BANDIT),
    "combination declared": (losses.k3_per_token, {"expect": "reverse_kl-0.5*entropy"}, BANDIT),
    "registered": ("k3-broadcast-ratio", {}, PAIR),
    # Others, which take longer or are of the same kinds.
    "group": (losses.baseline_of_the_group, {"environment": "bandit"}, (1, 2, False, 2)),
    "a pair": (losses.with_metrics, {}, BANDIT),
    "argument": (losses.scaled, {"arguments": {"scale": -0.25}}, BANDIT),
    "coefficient, given": (losses.policy_loss, {"beta": 0.04}, BANDIT),
    "padding leaks": (losses.leaks_padding, {}, RAGGED),
    "ragged alone": (losses.k3_scalar, {"environment": "ragged", "expect": "local_forward_kl"}, PAIR),
}
PUSHED = 10  # rows of CASES


@cache
def report_of(name: str) -> Report:
    loss, options, size = CASES[name]
    return kltest.grade(loss, select=NO_EXPERIMENT, **{"environment": SHOWN.get(size, "bandit"), **options})


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str, Path], list]]:
    """What programs print, all run by one process that never hears of kltest."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda code, folder: pool.submit(losses.printed, code, folder).result()


@pytest.mark.parametrize("name", first(PUSHED, CASES))
def test_the_smallest_environment_is_as_small_as_it_can_be(name):
    found = report_of(name).smallest
    assert found is not None
    assert (found.length, found.actions, found.ends, found.batch) == CASES[name][2]


@pytest.mark.parametrize("name", first(PUSHED, CASES))
def test_its_program_gives_both_numbers_without_kltest(run, name):
    found = report_of(name).smallest
    assert found.code, found.note
    # Float64 in another order of summation; the one loss in float32 carries seven digits.
    limit = 1e-6 if name == "single precision" else 1e-12
    truth, expected = ([getattr(place, part) for place in found.contexts] for part in ("truth", "found"))
    printed = run(found.code, HERE)
    assert np.allclose(printed[0], truth, rtol=0, atol=limit)
    assert np.allclose(printed[1], expected, rtol=0, atol=limit)
    assert not np.allclose(truth, expected, rtol=0, atol=1e-4), "there is nothing to see"


@pytest.mark.parametrize(
    "name", first(PUSHED - 2, [name for name, (loss, *_) in CASES.items() if not isinstance(loss, str)])
)
def test_the_program_is_ten_lines_or_hardly_more(name):
    """Ten where a loss takes the two log-probs; a line more each for a mask, a sampler, rewards, β."""
    lines = report_of(name).smallest.code.splitlines()
    assert len(lines) <= 14
    if name in ("a value a token", "partial gradient"):
        assert len(lines) <= 10
    assert max(map(len, lines)) <= 140


def test_the_textbook_example_comes_out():
    """k3 in the loss: two actions, π = (.8, .2), ref = (.5, .5); with respect to logits p(1 − p) times those to p."""
    (place,) = smallest(losses.k3_per_token).contexts
    assert (place.policy, place.reference) == ([0.8, 0.2], [0.5, 0.5])
    assert place.truth == pytest.approx([0.16 * math.log(4), -0.16 * math.log(4)], rel=1e-12)
    assert place.found == pytest.approx([0.16 * 1.875, -0.16 * 1.875], rel=1e-12)
    # One draw gives (1 − w)(1{y = 0} − p): 0.375·0.2 with chance 0.8, −1.5·(−0.8) with chance 0.2.
    assert place.std == pytest.approx([math.sqrt(0.8 * 0.075**2 + 0.2 * 1.2**2 - 0.3**2)] * 2, rel=1e-12)


def test_the_first_row_that_fails_is_shrunk_and_its_numbers_stay_mild():
    """With the policy as sampler nothing is wrong; another one is as near to it as where the failure was found."""
    report = kltest.grade(losses.no_ratio, environment="bandit", sampler="both", select="KL301")
    assert [(row.sampler, row.agrees) for row in report.gradients] == [("current", True), ("stale", False)]
    (place,) = report.smallest.contexts
    assert np.abs(np.log(np.divide(place.policy, place.sampler))).max() < MILD_RATIO
    u = np.log(np.divide(place.policy, place.reference))
    assert np.abs(u).max() < MILD
    # E_μ[u·g]: the weights are the sampler's, the score the policy's.
    expected = place.sampler[0] * u[0] * place.policy[1] - place.sampler[1] * u[1] * place.policy[0]
    assert place.found[0] == pytest.approx(expected, rel=1e-12)
    assert "rollouts drawn from the sampler" in report.smallest.setting


@pytest.mark.parametrize(
    "name",
    first(1, ["k2-loss-sequence", losses.leave_one_out_added_up, "k1-reward-to-go-prefix-ratio", "leave-one-out"]),
)
def test_where_nothing_is_wrong_an_example_shows_that(name):
    report = kltest.grade(name, environment="bandit,sequence", select=NO_EXPERIMENT)
    assert report.smallest is None
    assert report.example is not None
    for place in report.example.contexts:
        assert place.found == pytest.approx(place.truth, rel=1e-9, abs=1e-12)
        assert place.policy != place.reference


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("length", "actions"), [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3)])
def test_environments_to_begin_with_are_mild_and_nowhere_equal(length, actions, moved, ends):
    environment = unrelated(length, actions, ends=ends and length > 1, moved=moved, rewarded=True)
    instance = environment.instance()
    paths = instance.paths
    assert len(environment.policy) == instance.environment.n_contexts
    assert np.abs(paths.along(instance.policy - instance.reference)).max() < MILD
    assert np.abs(paths.along(instance.policy - instance.sampler)).max() < MILD_RATIO
    assert all(p != q for p, q in zip(environment.policy, environment.reference, strict=True))
    if moved:
        assert all(p != m for p, m in zip(environment.policy, environment.sampler, strict=True))


@pytest.mark.parametrize("form", ["text", "markdown", "html", "json"])
def test_what_people_read_shows_the_environment_and_the_program(form):
    report = report_of("partial gradient")
    rendered = html.unescape(report.to_text(verbose=True) if form == "text" else render(form, [report]))
    if form == "json":
        smallest = json.loads(rendered)["smallest"]
        assert smallest["code"] == report.smallest.code
        assert smallest["contexts"][0]["found"] == report.smallest.contexts[0].found
        return
    for row in report.smallest.table():
        cells = [re.escape(cell) for cell in row]
        between = {"text": r" +", "markdown": r" \| ", "html": r"</t[dh]><t[dh][^>]*>"}[form]
        assert re.search(between.join(cells), rendered), row
    lines = [line.strip() for line in rendered.splitlines()]
    for line in report.smallest.code.splitlines():
        assert any(line.strip() in shown for shown in lines), line


def test_the_exception_shows_the_environment():
    with pytest.raises(AssertionError, match="smallest environment in which it fails") as caught:
        report_of("a value a token").raise_for_failure()
    assert re.search(r"root +0 +0\.8 +0\.5 +0\.221807 +0\.300000", str(caught.value))


@pytest.mark.scheduled
def test_a_loss_that_draws_random_numbers_is_not_shrunk():
    """Two calls differ, so that no environment has one gradient to show."""

    def bad(logp, ref_logp):
        return (logp - ref_logp) * (1 + torch.rand(()))

    report = kltest.grade(bad, environment="bandit", select=NO_EXPERIMENT, samples=200)
    assert report.smallest is None
    assert report.example is None


@pytest.mark.parametrize("ends", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("name", spread(10, ATLAS))
def test_every_named_gradient_can_be_declared_in_a_program(name, ends):
    """The line for each is plain torch; the program is given only where it prints what the truth says."""
    environment = unrelated(2, 2, ends=ends, moved=True, rewarded=True)
    declared = {name: 0.5, **({} if name == "reverse_kl" else {"reverse_kl": 1.0})}
    loss = bind(losses.square_root)
    answer = counter_example(loss, declared, environment, "stale", 1, 0.0)
    assert answer is not None
    assert with_program(loss, declared, environment, answer.example, answer.dtype).code


# Where a loss comes from.


FILES = {
    "mine/my_losses.py": "def bad(logp, ref_logp):\n    return logp - ref_logp\n",
    "lifted.py": "import a_package_that_is_not_there\nimport torch\nHALF = 0.5\n\n"
    "def square(x):\n    return torch.square(x)\n\n"
    "def bad(logp, ref_logp):\n    '''Half the square.'''\n    return HALF * square(logp - ref_logp)  # k2\n",
    # Its check is made by a file whose annotations are never evaluated: that must not be lent to the program.
    "annotated.py": "import a_package_that_is_not_there\nfrom typing import Optional\nimport torch\nSCALE = 0.5\n\n"
    "def bad(logp: torch.Tensor, ref_logp: Optional[torch.Tensor], *, scale: float = SCALE) -> torch.Tensor:\n"
    "    return scale * (logp - ref_logp).exp()\n",
}
WEIGHT = 0.25


def closes_over(weight=WEIGHT):
    def helper(x):
        return x * x

    def bad(logp, ref_logp):
        return -weight * helper(logp - ref_logp)

    return bad


def with_an_inner_function(logp, ref_logp):
    return -(lambda u: math.pi * u * u)(logp - ref_logp)


def after_a_keyword(logp, scale=1.0, *, ref_logp):
    return -scale * (logp - ref_logp) ** 2


def after_one_that_is_left_out(logp, scale=1.0, ref_logp=None):
    return -scale * (logp - ref_logp) ** 2


def inlined(function):
    """A loss that can be imported from nowhere, so that its lines are taken over."""
    function.__qualname__ = f"<locals>.{function.__name__}"
    return function


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("mine/my_losses.py:bad", ["from my_losses import bad"]),
        ("lifted.py:bad", ["HALF = 0.5", "def square(x):", "# k2"]),
        ("annotated.py:bad", ["from __future__ import annotations\nimport torch\n", "SCALE = 0.5"]),
        (closes_over(), ["weight = 0.25"]),
        (inlined(with_an_inner_function), ["import math"]),
        (inlined(after_a_keyword), ["ref_logp="]),
        (inlined(after_one_that_is_left_out), ["ref_logp="]),
    ],
    ids=lambda each: getattr(each, "__name__", each) if not isinstance(each, list) else "",
)
def test_a_program_brings_along_what_its_loss_needs(loss, words, tmp_path, monkeypatch, run):
    """An import where there is one, else its lines, with what they use and no docstring."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    found = smallest(loss, "bandit,sequence")
    assert all(each in found.code for each in words), found.note or found.code
    assert "Half the square" not in found.code
    numbers = [[getattr(place, part) for place in found.contexts] for part in ("truth", "found")]
    assert np.allclose(run(found.code, tmp_path), numbers, atol=1e-12)
    assert "my_losses" not in sys.modules


def test_what_cannot_be_written_down_is_said():
    class Keeps:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, logp, ref_logp):
            return self.factor * (logp - ref_logp)

    found = smallest(Keeps(3.0))
    assert found is not None
    assert found.code == ""
    assert "no short program" in found.note
    with pytest.raises(NoSourceError, match="object"):
        source_of(Keeps(1.0), "Keeps", frozenset())


def test_a_program_that_would_print_other_numbers_is_not_given():
    """It remembers how often it was called, so that no program of a few lines can repeat what it did."""
    factors = iter([1.0] * 10_000)

    def bad(logp, ref_logp):
        return -next(factors) * (logp - ref_logp) ** 2

    found = smallest(bad)
    assert found is not None
    assert found.code == ""
    assert "cannot be written down" in found.note


def test_a_name_that_the_program_needs_is_renamed():
    source = source_of(losses.k3_per_token, "x", frozenset({"k3_per_token"}))
    assert source.lines == ("from losses_to_shrink import k3_per_token as graded_k3_per_token",)
    assert source.name == "graded_k3_per_token"
