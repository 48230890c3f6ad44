"""The smallest failing environment: as small as known, its numbers those of plain torch, its program one that runs."""

import html
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import losses_to_shrink as losses
import numpy as np
import pytest
import torch

import kltest
from kltest.counterexample.environment import counter_example
from kltest.counterexample.program import with_program
from kltest.counterexample.shrink import MILD, MILD_RATIO, MOST_CALLS, SIMPLE, Search, Shape, unrelated
from kltest.counterexample.sources import NoSourceError, source_of
from kltest.identify.findings import Findings, Row
from kltest.identify.measure import Measure
from kltest.loss.calling import bind
from kltest.render import render
from kltest.report import CounterExample, Prefix
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
CASES = {
    "a value a token": (losses.k3_per_token, {}, BANDIT),
    "a value a sequence": (losses.k3_of_sequences, {}, BANDIT),
    # Right for one token alone, 1/T of it for more: as a mean over the batch it couples where lengths differ.
    "a scalar": (losses.k3_scalar, {}, BANDIT),
    "partial gradient": (losses.k2_per_token, {}, PAIR),
    "boolean mask": (losses.boolean_mask, {}, PAIR),
    "a pair": (losses.with_metrics, {}, BANDIT),
    "logits": (losses.whole_distribution, {}, PAIR),
    "three actions": (losses.wrong_for_three_actions, {}, (1, 3, False, 1)),
    "no ratio": (losses.no_ratio, {"environment": "bandit", "sampler": "both"}, BANDIT),
    "token ratio": (losses.token_ratio, {"environment": "bandit,sequence"}, PAIR),
    "token ratio, stale": (losses.token_ratio, {"expect": "local_reverse_kl"}, PAIR),
    "only where lengths differ": (losses.divided_where_lengths_differ, {}, RAGGED),
    "no name": (losses.square_root, {}, BANDIT),
    "argument": (losses.scaled, {"arguments": {"scale": -0.25}}, BANDIT),
    "coefficient": (losses.policy_loss, {"environment": "bandit"}, BANDIT),
    "coefficient, given": (losses.policy_loss, {"environment": "bandit", "beta": 0.04}, BANDIT),
    "group": (losses.baseline_of_the_group, {"environment": "bandit"}, (1, 2, False, 2)),
    "group, added up": (losses.baseline_of_the_group_added_up, {"environment": "bandit"}, (1, 2, False, 2)),
    "blocked": (losses.detached, {}, BANDIT),
    "single precision": (losses.in_single_precision, {}, BANDIT),
    "padding leaks": (losses.leaks_padding, {}, RAGGED),
    "method": (f"{losses.__name__}:Trainer.loss", {"arguments": {"self.coefficient": 0.5}}, PAIR),
    "reward, return": (losses.k3_per_token, reward("return"), BANDIT),
    "reward, to-go": (losses.k3_of_sequences, reward("to-go"), BANDIT),
    "reward, to-go, token": (losses.k3_per_token, reward("to-go"), BANDIT),
    "reward, immediate": (lambda logp, ref_logp: logp - ref_logp, reward("immediate"), PAIR),
    "reward, immediate, sequence": (losses.k3_of_sequences, reward("immediate"), BANDIT),
    "both": (losses.k2_per_token, reward("return", "both"), BANDIT),
    "both, to-go": (losses.k3_of_sequences, {**reward("to-go", "both"), "expect": "forward_kl"}, BANDIT),
    "forward KL declared": (losses.k2_per_token, {"expect": "forward_kl"}, BANDIT),
    "combination declared": (losses.k3_per_token, {"expect": "reverse_kl-0.5*entropy"}, BANDIT),
    "registered": ("k3-broadcast-ratio", {}, PAIR),
    "registered, in reward": ("k1-reward-immediate", {}, PAIR),
    "registered, logits": ("full-loss", {}, PAIR),
    "ragged alone": (losses.k3_scalar, {"environment": "ragged", "expect": "local_forward_kl"}, PAIR),
}


@pytest.fixture(scope="module")
def reports() -> dict:
    return {name: kltest.grade(loss, select=NO_EXPERIMENT, **options) for name, (loss, options, _) in CASES.items()}


RUNNER = """
import contextlib, io, json, os, sys
for line in sys.stdin:
    folder, code = json.loads(line)
    os.chdir(folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<program>", "exec"), {})
    assert not any(module.split(".")[0] == "kltest" for module in sys.modules)
    print(json.dumps([json.loads(line) for line in out.getvalue().splitlines()]), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str, Path], list]]:
    """What programs print, all run by one interpreter that never hears of kltest."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )

    def run(code: str, folder: Path) -> list:
        print(json.dumps([str(folder), code]), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    with process:
        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def printed(reports, run) -> dict:
    return {name: run(report.smallest.code, HERE) for name, report in reports.items() if report.smallest}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_environment_is_as_small_as_it_can_be(reports, name):
    found = reports[name].smallest
    assert found is not None
    assert (found.length, found.actions, found.ends, found.batch) == CASES[name][2]


@pytest.mark.parametrize("name", CASES)
def test_its_program_gives_both_numbers_without_kltest(reports, printed, name):
    found = reports[name].smallest
    assert found.code, found.note
    # Float64 in another order of summation; the one loss in float32 carries seven digits.
    limit = 1e-6 if name == "single precision" else 1e-12
    truth, expected = ([getattr(place, part) for place in found.contexts] for part in ("truth", "found"))
    assert np.allclose(printed[name][0], truth, rtol=0, atol=limit)
    assert np.allclose(printed[name][1], expected, rtol=0, atol=limit)
    assert not np.allclose(truth, expected, rtol=0, atol=1e-4), "there is nothing to see"


@pytest.mark.parametrize("name", [name for name, (loss, _, _) in CASES.items() if not isinstance(loss, str)])
def test_the_program_is_ten_lines_or_hardly_more(reports, name):
    """Ten where a loss takes the two log-probs; a line more each for a mask, a sampler, rewards, β."""
    lines = reports[name].smallest.code.splitlines()
    assert len(lines) <= 14
    if name in ("a value a token", "partial gradient", "reward, return"):
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


def test_a_partial_gradient_is_shown_where_the_root_is_blind(reports):
    root, _, last = reports["partial gradient"].smallest.contexts
    assert root.policy == root.reference == [0.5, 0.5]
    assert root.found == [0.0, 0.0]
    assert root.truth[0] == pytest.approx(0.25 * (0.8 * math.log(1.6) + 0.2 * math.log(0.4)), rel=1e-12)
    assert last.policy == last.reference == [0.5, 0.5]


def test_the_first_row_that_fails_is_shrunk_and_its_numbers_stay_mild():
    """With the policy as sampler nothing is wrong; another one is as near to it as where the failure was found."""
    report = kltest.grade(losses.no_ratio, environment="bandit", sampler="both", select="KL301")
    assert [(row.sampler, row.agrees) for row in report.gradients] == [("current", True), ("stale", False)]
    (place,) = report.smallest.contexts
    assert np.abs(np.log(np.divide(place.policy, place.sampler))).max() < MILD_RATIO
    assert np.abs(np.log(np.divide(place.policy, place.reference))).max() < MILD
    assert place.found != pytest.approx(place.truth, abs=1e-3)


def test_a_missing_ratio_needs_another_sampler(reports):
    (place,) = reports["no ratio"].smallest.contexts
    assert place.sampler is not None
    assert place.sampler != place.policy
    # E_μ[u·g]: the weights are the sampler's, the score the policy's.
    u = [math.log(p / q) for p, q in zip(place.policy, place.reference, strict=True)]
    expected = place.sampler[0] * u[0] * place.policy[1] - place.sampler[1] * u[1] * place.policy[0]
    assert place.found[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["k2-loss-sequence", "k1-reward-to-go-prefix-ratio", "leave-one-out", losses.leave_one_out_added_up]
)
def test_where_nothing_is_wrong_an_example_shows_that(name):
    report = kltest.grade(name, environment="bandit,sequence", select=NO_EXPERIMENT)
    assert report.smallest is None
    assert report.example is not None
    for place in report.example.contexts:
        assert place.found == pytest.approx(place.truth, rel=1e-9, abs=1e-12)
        assert place.policy != place.reference


def test_rows_that_are_added_up_are_divided_by_their_number():
    """The mean with the rollout in it takes half of the gradient in batches of two, averaged or added up."""
    for loss in (losses.baseline_of_the_group, losses.baseline_of_the_group_added_up):
        (place,) = smallest(loss).contexts
        assert place.found == pytest.approx([truth / 2 for truth in place.truth], rel=1e-9)


def test_the_same_bytes_every_time():
    one, two = (kltest.grade(losses.k3_scalar, environment="ragged", select=NO_EXPERIMENT).to_json() for _ in range(2))
    assert one == two


def test_it_costs_little_beside_the_grading(monkeypatch):
    calls = {"all": 0, "shrinking": 0}

    def counted(logp, ref_logp, mask):
        calls["all"] += 1
        return losses.square_root(logp, ref_logp, mask)

    original = Search.smallest

    def smallest(self):
        before = calls["all"]
        found = original(self)
        calls["shrinking"] += calls["all"] - before
        return found

    monkeypatch.setattr(Search, "smallest", smallest)
    assert kltest.grade(counted).smallest is not None
    assert 0 < calls["shrinking"] < 0.1 * calls["all"]


def searching(loss, row: Row, rows: list[Row] | None = None, coupled: bool = False) -> Search:
    """A search in findings that only know how rows combine."""
    measure = Measure(loss, {"reverse_kl": 1.0}, frozenset())
    measure.observed.reductions.append("coupled" if coupled else "mean")
    findings = Findings({"reverse_kl": 1.0}, "loss", ("bandit",), ("current",), measure, rows or [row])
    return Search(findings, row)


def a_row(environment="bandit", sampler="current", agrees=False, batch=1) -> Row:
    return Row(environment, sampler, None, 1.0, None, 1.0, 1.0, "exact", 4, 4, agrees=agrees, batch=batch)


def test_a_search_that_finds_nothing_ends():
    def right(logp, ref_logp, mask):
        return 0.5 * (logp - ref_logp).where(mask > 0, 0.0).sum(-1) ** 2

    search = searching(bind(right), a_row())
    assert search.smallest() is None
    assert 0 < search.calls <= MOST_CALLS + 1


def test_kinds_in_which_the_loss_is_right_are_not_searched():
    rows = [a_row("bandit", agrees=True), a_row("sequence", agrees=True), a_row("ragged")]
    shapes = list(searching(None, rows[2], rows).shapes())
    assert all(shape.length > 1 and shape.ends for shape in shapes)
    assert shapes[0] == Shape(2, 2, ends=True, moved=False, batch=1)
    assert shapes == sorted(shapes, key=lambda shape: (shape.length, shape.actions))


@pytest.mark.parametrize("actions", SIMPLE)
def test_simple_numbers_are_probabilities_that_can_be_copied(actions):
    for row in SIMPLE[actions]:
        assert len(row) == actions
        assert sum(row) == pytest.approx(1, abs=1e-15)
        assert all(0 < p < 1 and float(f"{p:g}") == p for p in row)
    assert len(set(SIMPLE[actions])) == len(SIMPLE[actions])


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("length", "actions"), [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3)])
def test_environments_to_begin_with_are_mild_and_nowhere_equal(length, actions, moved, ends):
    shape = Shape(length, actions, ends and length > 1, moved, 1)
    environment = unrelated(shape, 0, rewarded=True)
    instance = environment.instance()
    paths = instance.paths
    assert len(paths) == shape.rollouts
    assert len(environment.policy) == shape.contexts == instance.environment.n_contexts
    assert np.abs(paths.along(instance.policy - instance.reference)).max() < MILD
    assert np.abs(paths.along(instance.policy - instance.sampler)).max() < MILD_RATIO
    assert all(p != q for p, q in zip(environment.policy, environment.reference, strict=True))
    if moved:
        assert all(p != m for p, m in zip(environment.policy, environment.sampler, strict=True))


@pytest.mark.parametrize("form", ["text", "markdown", "html", "json"])
def test_what_people_read_shows_the_environment_and_the_program(reports, form):
    report = reports["partial gradient"]
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


def test_the_exception_shows_the_environment(reports):
    with pytest.raises(AssertionError, match="smallest environment in which it fails: 1 token of 2 actions") as caught:
        reports["a value a token"].raise_for_failure()
    assert re.search(r"root +0 +0\.8 +0\.5 +0\.221807 +0\.300000", str(caught.value))


def test_a_loss_that_draws_random_numbers_is_not_shrunk():
    """Two calls differ, so that no environment has one gradient to show."""

    def bad(logp, ref_logp):
        return (logp - ref_logp) * (1 + torch.rand(()))

    report = kltest.grade(bad, environment="bandit", select="KL1")
    assert report.smallest is None
    assert report.example is None


@pytest.mark.parametrize("ends", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("name", ATLAS)
def test_every_named_gradient_can_be_declared_in_a_program(name, ends):
    """The line for each is plain torch; the program is given only where it prints what the truth says."""
    environment = unrelated(Shape(2, 2, ends, True, 1), 0, rewarded=True)
    declared = {name: 0.5, **({} if name == "reverse_kl" else {"reverse_kl": 1.0})}
    loss = bind(losses.square_root)
    answer = counter_example(loss, declared, environment, "stale", 1, 0.0)
    assert answer is not None
    assert with_program(loss, declared, environment, answer.example, answer.dtype).code


# Where a loss comes from.


def numbers(found) -> list:
    return [[getattr(place, part) for place in found.contexts] for part in ("truth", "found")]


def test_a_target_in_a_file_is_imported_from_there(tmp_path, monkeypatch, run):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_losses.py").write_text("def bad(logp, ref_logp):\n    return logp - ref_logp\n")
    monkeypatch.chdir(tmp_path)
    found = smallest("mine/my_losses.py:bad")
    assert "from my_losses import bad" in found.code
    assert np.allclose(run(found.code, tmp_path), numbers(found), atol=1e-12)
    assert "my_losses" not in sys.modules


def test_a_lifted_target_brings_its_lines_along(tmp_path, monkeypatch, run):
    (tmp_path / "trainer.py").write_text(
        "import a_package_that_is_not_there\nimport torch\nHALF = 0.5\n\n"
        "def square(x):\n    return torch.square(x)\n\n"
        "def bad(logp, ref_logp):\n    '''Half the square.'''\n    return HALF * square(logp - ref_logp)  # k2\n"
    )
    monkeypatch.chdir(tmp_path)
    found = smallest("trainer.py:bad", "bandit,sequence")
    assert "HALF = 0.5" in found.code
    assert "def square(x):" in found.code
    assert "# k2" in found.code
    assert "Half the square" not in found.code
    assert np.allclose(run(found.code, Path("/")), numbers(found), atol=1e-12)


def test_a_function_made_on_the_way_brings_what_it_closes_over(tmp_path, run):
    weight = 0.25

    def helper(x):
        return x * x

    def bad(logp, ref_logp):
        return -weight * helper(logp - ref_logp)

    found = smallest(bad)
    assert "weight = 0.25" in found.code
    assert np.allclose(run(found.code, tmp_path), numbers(found), atol=1e-12)


def test_a_program_needs_no_name_of_an_annotation_and_every_name_of_a_default(tmp_path, monkeypatch, run):
    """Its check is made by a file whose annotations are never evaluated: that must not be lent to the program."""
    (tmp_path / "annotated.py").write_text(
        "import a_package_that_is_not_there\nfrom typing import Optional\nimport torch\nSCALE = 0.5\n\n"
        "def bad(logp: torch.Tensor, ref_logp: Optional[torch.Tensor], *, scale: float = SCALE) -> torch.Tensor:\n"
        "    return scale * (logp - ref_logp).exp()\n"
    )
    monkeypatch.chdir(tmp_path)
    found = smallest("annotated.py:bad")
    assert found.code.startswith("from __future__ import annotations\nimport torch\n"), found.note
    assert "SCALE = 0.5" in found.code
    assert np.allclose(run(found.code, Path("/")), numbers(found), atol=1e-12)


def test_what_inner_functions_use_is_brought_along(tmp_path, run):
    def bad(logp, ref_logp):
        return -(lambda u: math.pi * u * u)(logp - ref_logp)

    found = smallest(bad)
    assert "import math" in found.code, found.note
    assert np.allclose(run(found.code, tmp_path), numbers(found), atol=1e-12)


def test_arguments_after_one_that_is_left_out_and_those_that_need_a_name_have_one(tmp_path, run):
    def bad(logp, scale=1.0, *, ref_logp):
        return -scale * (logp - ref_logp) ** 2

    def worse(logp, scale=1.0, ref_logp=None):
        return -scale * (logp - ref_logp) ** 2

    for loss in (bad, worse):
        found = smallest(loss)
        assert "ref_logp=" in found.code, found.note
        assert np.allclose(run(found.code, tmp_path), numbers(found), atol=1e-12)


def test_only_a_program_with_an_object_to_stand_in_makes_one(tmp_path):
    plain = smallest(losses.k3_per_token)
    method = smallest(f"{losses.__name__}:Trainer.loss", "bandit,sequence", arguments={"self.coefficient": 0.5})
    assert ["SimpleNamespace" in found.code for found in (plain, method)] == [False, True]


def test_a_module_of_the_same_name_is_left_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("def bad(logp, ref_logp):\n    return logp - ref_logp\n")
    monkeypatch.chdir(tmp_path)
    own = ModuleType("my_losses")
    monkeypatch.setitem(sys.modules, "my_losses", own)
    assert smallest("my_losses.py:bad") is not None
    assert sys.modules["my_losses"] is own


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


@pytest.mark.parametrize(
    ("sampler", "batch", "summed", "said"),
    [
        (None, 1, False, "rollouts drawn from π;"),
        ([0.5, 0.5], 1, False, "rollouts drawn from the sampler;"),
        (None, 2, False, "drawn from π, in batches of 2;"),
        (None, 3, True, "in batches of 3, which are added up: divided by 3;"),
    ],
)
def test_the_setting_in_words(sampler, batch, summed, said):
    place = Prefix("", [0.5, 0.5], [0.4, 0.6], sampler, None, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    example = CounterExample("bandit", "current", 1, 2, False, batch, "rows", summed, [place])
    assert said in example.setting
    assert ("in batches" in example.setting) is (batch > 1)
