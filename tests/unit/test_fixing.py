"""Fixes: a change of the source is proposed only if it is confirmed and if nothing but the KL term moves."""

import ast
import csv
import json
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from cases.table import FOLDER, cases

from kltest.cli import fixes
from kltest.errors import UsageError
from kltest.grading.fixing.changes import Rewrites
from kltest.grading.fixing.definition import Editable
from kltest.grading.fixing.search import Fixing
from kltest.grading.fixing.seen import Body, look
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.identify.graded import batches
from kltest.loss.resolve import resolve
from kltest.report import Report, Verdict

VERDICTS = get_args(Verdict)
LABELS = {row["name"]: row["inside"] for row in csv.DictReader((FOLDER / "fixable.csv").open(encoding="utf-8"))}
"""Whether a fix inside of the function exists, by the name of a row of the corpus, as a reader saw it beforehand."""


def fixed(target, **options) -> Report:
    """Grade a loss and look for a fix."""
    checked = Options.of(**options)
    loss = resolve(target, checked.call)
    grading = Grading.of(str(target), checked)
    for _ in grading.steps(loss):
        pass
    return Fixing(loss, grading, grading.report()).run()


def written(folder: Path, source: str) -> str:
    """Write a module with the function `loss`, and return the target."""
    file = folder / "trainer.py"
    file.write_text(f"import torch\n\n\n{source}", encoding="utf-8")
    return f"{file}:loss"


def added(report: Report) -> list[str]:
    """Lines that the first fix writes."""
    return [line[1:].strip() for line in report.fixes[0].diff.splitlines()[2:] if line.startswith("+")]


# A kind of fix each: the loss, what is declared, and a line that the fix writes.
KINDS = {
    # What every loss may get wrong; searched for quickly.
    "sign": (
        "def loss(logp, ref_logp):\n    return -0.5 * (ref_logp - logp) ** 2\n",
        "local_reverse_kl",
        "return 0.5 * (logp - ref_logp) ** 2",
    ),
    "a detached factor": (
        "def loss(logp, ref_logp, mask):\n    u = ((logp - ref_logp) * mask).sum(-1)\n"
        "    return u * (logp * mask).sum(-1)\n",
        "reverse_kl",
        "u = ((logp - ref_logp) * mask).sum(-1).detach()",
    ),
    "normalised logits": (
        "def loss(logits, ref_logits, mask):\n    p = logits.exp()\n"
        "    return ((p * (logits - ref_logits)).sum(-1) * mask).sum(-1).mean()\n",
        "local_reverse_kl",
        "logits = logits.log_softmax(-1)",
    ),
    # More of the same kinds.
    "the square of the rollout's log-ratio": (
        "def loss(logp, ref_logp, mask):\n    return ((logp - ref_logp) * mask).sum(-1)\n",
        "reverse_kl",
        "return 0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2",
    ),
    "k2 for k3": (
        "def loss(logp, ref_logp, mask):\n    d = ref_logp - logp\n    return (d.exp() - d - 1) * mask\n",
        "local_reverse_kl",
        "return (0.5 * (logp - ref_logp) ** 2) * mask",
    ),
    "renormalised over the support": (
        "def loss(topk_logp, ref_topk_logp, mask, k=4):\n"
        "    kl = (topk_logp.exp() * (topk_logp - ref_topk_logp)).sum(-1).clamp_min(0)\n    return kl * mask\n",
        "local_reverse_kl_top4_renormalised",
        "kl = (topk_logp.log_softmax(-1).exp() * (topk_logp.log_softmax(-1) - ref_topk_logp.log_softmax(-1))).sum(-1)",
    ),
    "a tail bucket": (
        "def loss(topk_logp, ref_topk_logp, mask, k=4):\n"
        "    kl = (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1)\n    return kl * mask\n",
        "local_forward_kl_top4_tail",
        "kl = ((ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1)"
        " + (1 - ref_topk_logp.exp().sum(-1)).clamp(min=1e-12)"
        " * ((1 - ref_topk_logp.exp().sum(-1)).clamp(min=1e-12)"
        " / (1 - topk_logp.exp().sum(-1)).clamp(min=1e-12)).log())",
    ),
    "reduction": (
        "def loss(logp, ref_logp, mask):\n    k2 = 0.5 * (logp - ref_logp) ** 2 * mask\n"
        "    return k2.sum() / mask.sum()\n",
        "local_reverse_kl",
        "return k2.sum(-1).mean()",
    ),
    "the ratio of the rollout": (
        "def loss(logp, ref_logp, old_logp, mask):\n    half = 0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2\n"
        "    ratio = ((logp - old_logp) * mask).sum(-1).exp().clamp(max=2).detach()\n    return ratio * half\n",
        "reverse_kl",
        "ratio = ((logp - old_logp) * mask).sum(-1).exp().detach()",
    ),
    "a copy of what is written into": (
        "def loss(logp, ref_logp, mask):\n    ref_logp.mul_(mask)\n"
        "    return 0.5 * ((logp * mask - ref_logp) ** 2).sum(-1)\n",
        "local_reverse_kl",
        "ref_logp = ref_logp.clone()",
    ),
}


@pytest.mark.scheduled
@pytest.mark.parametrize("kind", KINDS)
def test_a_fix_of_each_kind(tmp_path, kind):
    source, declared, line = KINDS[kind]
    report = fixed(written(tmp_path, source), expect=declared)
    assert report.verdict == "refuted"
    assert line in added(report)
    assert len(report.fixes) <= 2
    # The sister, with the fix in it, is confirmed by itself.
    fixes.write(report.fixes[0])
    assert fixed(f"{tmp_path / 'trainer.py'}:loss", expect=declared).verdict == "confirmed"


@pytest.mark.scheduled
def test_variables_that_nothing_reads_any_more_are_told(tmp_path):
    source = """def loss(logp, ref_logp, mask):
    u = ((logp - ref_logp) * mask).sum(-1)
    weight = (-u).exp()
    term = weight - 1 + u
    return term
"""
    report = fixed(written(tmp_path, source), expect="reverse_kl")
    assert "; nothing reads weight any more" in report.fixes[0].words
    assert "nothing reads" not in fixed(written(tmp_path, KINDS["sign"][0]), expect="local_reverse_kl").fixes[0].words


POLICY_LOSS = """def loss(logp, ref_logp, mask, advantages, beta=0.1):
    policy = -(logp * advantages[:, None] * mask).sum(-1).mean()
    d = ref_logp - logp
    kl = ((d.exp() - d - 1) * mask).sum(-1).mean()
    return policy + beta * kl, {"kl": kl.item(), "policy": policy.item()}
"""


@pytest.mark.scheduled
def test_other_terms_and_metrics_stay(tmp_path):
    target = written(tmp_path, POLICY_LOSS)
    before = resolve(target).function
    report = fixed(target, expect="local_reverse_kl")
    for each in report.fixes:
        file = tmp_path / "trainer.py"
        file.write_text(f"import torch\n\n\n{POLICY_LOSS}", encoding="utf-8")
        fixes.write(each)
        after = resolve(target).function
        logp = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]], dtype=torch.float64)
        given = (logp, logp - 0.2, torch.ones(2, 2), torch.tensor([1.0, -1.0]))
        assert before(*given)[1] == after(*given)[1]
        assert before(*given, beta=0.0)[0] == after(*given, beta=0.0)[0]
    assert len(report.fixes) == 2


BONUS = """def loss(logp, ref_logp, mask, logits):
    logits = logits.log_softmax(-1)
    entropy = -((logits.exp() * logits).sum(-1) * mask).sum(-1)
    return {} - 0.05 * entropy
"""


@pytest.mark.scheduled
def test_an_entropy_bonus_is_not_removed(tmp_path):
    report = fixed(written(tmp_path, BONUS.format("0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2")))
    assert report.verdict == "refuted"
    assert not report.fixes
    assert "entropy beside its KL term" in report.advice


@pytest.mark.scheduled
def test_beside_a_declared_bonus_the_kl_term_is_mended(tmp_path):
    target = written(tmp_path, BONUS.format("((ref_logp - logp).exp() * mask).sum(-1)"))
    report = fixed(target, expect="local_reverse_kl-0.05*local_entropy")
    assert added(report) == ["return ((0.5 * (logp - ref_logp) ** 2) * mask).sum(-1) - 0.05 * entropy"]


@pytest.mark.scheduled
def test_a_logged_number_that_would_change_is_kept(tmp_path):
    source = """def loss(logp, ref_logp, mask):
    d = ref_logp - logp
    kl = (d.exp() - d - 1) * mask
    return kl.sum(-1).mean(), {"kl": kl.detach().sum(-1).mean()}
"""
    report = fixed(written(tmp_path, source), expect="local_reverse_kl")
    assert report.fixes
    for each in report.fixes:
        # Either the loss alone is computed anew, or the value of `kl` stays.
        assert '{"kl": kl.detach()' in each.text or "kl.detach() + surrogate - surrogate.detach()" in each.text


@pytest.mark.scheduled
def test_other_options_keep_what_they_return(tmp_path):
    source = """def loss(logp, ref_logp, mask, kind="k3"):
    if kind == "k1":
        kl = logp - ref_logp
    elif kind == "k3":
        kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
    return kl * mask
"""
    report = fixed(written(tmp_path, source), expect="local_reverse_kl")
    assert all(each.first == 8 for each in report.fixes[:1])
    assert "kind='k1'" not in report.fixes[0].words


@pytest.mark.scheduled
def test_a_change_that_other_options_share_says_so(tmp_path):
    source = """def loss(logp, ref_logp, mask, doubled=False):
    kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
    if doubled:
        kl = 2 * kl
    return kl * mask
"""
    assert (
        "it changes doubled=True as well" in fixed(written(tmp_path, source), expect="local_reverse_kl").fixes[0].words
    )


@pytest.mark.scheduled
@pytest.mark.parametrize("factor", ["SCALE", "0.001"])
@pytest.mark.parametrize("estimator", ["(ref_logp - logp).exp() - (ref_logp - logp) - 1", "logp - ref_logp"])
def test_a_constant_coefficient_stays(tmp_path, factor, estimator):
    source = f"""SCALE = 0.001


def loss(logp, ref_logp, mask):
    kl = {factor} * ({estimator})
    return (kl * mask).sum(-1).mean()
"""
    report = fixed(written(tmp_path, source), expect="local_reverse_kl")
    assert report.fixes
    for each in report.fixes:
        assert factor in each.text
        assert "0.5 * (logp - ref_logp) ** 2" in each.diff


@pytest.mark.scheduled
def test_a_branch_that_a_configuration_chooses_is_changed_alone(tmp_path):
    source = """from types import SimpleNamespace


def loss(logp, ref_logp, mask, config=SimpleNamespace(kind="k3")):
    if config.kind == "k3":
        kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
    else:
        kl = 0.5 * (logp - ref_logp) ** 2
    total = (kl * mask).sum(-1).mean()
    return total, {"size": total.item()}
"""
    # One line less is changed at the return, for both branches; the number that is logged forbids one in the branch.
    first, other = fixed(written(tmp_path, source), expect="local_reverse_kl").fixes
    assert first.last <= 9, "the line in the branch that is taken"
    assert "the other branches" not in first.words
    assert "the other branches of `if config.kind ==" in other.words


@pytest.mark.scheduled
def test_a_number_that_no_check_judges_is_kept(tmp_path):
    source = """def loss(logp, ref_logp, mask):
    penalty = ((ref_logp - logp).exp() - (ref_logp - logp) - 1) * mask
    return penalty.sum(-1).mean(), {"size": penalty.sum().item()}
"""
    for each in fixed(written(tmp_path, source), expect="local_reverse_kl").fixes:
        assert "penalty = (0.5" not in each.text


@pytest.mark.scheduled
def test_a_whole_estimator_is_replaced_and_no_summand_of_it(tmp_path):
    source = """def loss(logp, ref_logp, mask):
    return (
        (
            torch.exp(ref_logp - logp)
            - (ref_logp - logp)
            - 1.0
        )
        * mask
    ).sum(-1).mean()
"""
    for each in fixed(written(tmp_path, source)).fixes:
        assert "torch.exp(ref_logp - logp).detach()" not in each.text


@pytest.mark.scheduled
def test_a_file_without_an_end_of_line_has_a_diff_that_applies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = written(tmp_path, KINDS["sign"][0].rstrip("\n"))
    report = fixed(target, expect=KINDS["sign"][1])
    patch = tmp_path / "change.patch"
    patch.write_text(report.fixes[0].diff, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "apply", patch.name], check=True)
    assert KINDS["sign"][2] in (tmp_path / "trainer.py").read_text()


def test_what_is_missing_is_said(tmp_path):
    report = fixed(written(tmp_path, "def loss(logp, ref_logp):\n    return logp - ref_logp\n"))
    assert not report.fixes
    assert "no mask (mask)" in report.advice


def test_a_right_loss_gets_none(tmp_path):
    right = "def loss(logp, ref_logp, mask):\n    return 0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2\n"
    report = fixed(written(tmp_path, right))
    assert (report.verdict, report.fixes, report.advice) == ("confirmed", [], "")


def test_a_registered_estimator_is_left_alone():
    assert "registered" in fixed("k1-loss").advice


@pytest.mark.scheduled
def test_most_losses_that_can_be_fixed_are():
    wanted = [case for case in cases() if LABELS.get(case.name) == "yes"]
    found = []
    for case in wanted:
        target = str(FOLDER / case.target) if isinstance(case.target, str) and ".py:" in case.target else case.target
        if fixed(target, **case.options).fixes:
            found.append(case.name)
    assert len(found) >= 0.7 * len(wanted)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A file, and the report on it."""
    folder = tmp_path_factory.mktemp("fixed")
    source, declared, _ = KINDS["k2 for k3"]
    return folder / "trainer.py", fixed(written(folder, source), expect=declared)


class TestWriting:
    """`--fix=apply`."""

    @pytest.fixture
    def file(self, shared):
        """The file of the report, as it was graded."""
        path = shared[0]
        written(path.parent, KINDS["k2 for k3"][0])
        path.chmod(0o644)
        return path

    @pytest.fixture
    def report(self, shared):
        return shared[1]

    def test_the_diff_and_the_lines_are_the_same_change(self, report, file):
        fixes.write(report.fixes[0])
        text = file.read_text()
        assert KINDS["k2 for k3"][2] in added(report)
        assert "return (0.5 * (logp - ref_logp) ** 2) * mask" in text
        assert "d.exp() - d - 1" not in text

    def test_a_file_that_changed_is_left_alone(self, report, file):
        file.write_text(file.read_text() + "# more\n")
        before = file.read_text()
        assert "has changed since it was read" in fixes.write(report.fixes[0])
        assert file.read_text() == before

    def test_permissions_stay(self, report, file):
        file.chmod(0o755)
        fixes.write(report.fixes[0])
        assert stat.S_IMODE(file.stat().st_mode) == 0o755

    @pytest.mark.scheduled
    def test_windows_ends_of_lines_stay(self, tmp_path):
        source, declared, _ = KINDS["sign"]
        target = written(tmp_path, source)
        file = tmp_path / "trainer.py"
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
        report = fixed(target, expect=declared)
        fixes.write(report.fixes[0])
        assert file.read_bytes().count(b"\n") == file.read_bytes().count(b"\r\n") > 4

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_cannot_be_written(self, report, file):
        file.parent.chmod(0o500)
        assert "was not written" in fixes.write(report.fixes[0])
        file.parent.chmod(0o700)

    def test_what_may_be_asked(self):
        assert fixes.asked("show")
        assert fixes.asked("apply")
        assert not fixes.asked(None)
        with pytest.raises(UsageError, match="--fix=apply"):
            fixes.asked("yes")


def test_formats_carry_it(shared):
    from kltest.render import render

    report = shared[1]
    sarif = json.loads(render("sarif", [report]))
    change = sarif["runs"][0]["results"][0]["fixes"][0]["artifactChanges"][0]["replacements"][0]
    assert change["insertedContent"]["text"] == report.fixes[0].text
    assert change["deletedRegion"]["startLine"] == report.fixes[0].first
    for form in ("text", "markdown", "html"):
        assert "0.5 * (logp - ref_logp) ** 2" in render(form, [report]).replace("&#42;", "*")
    assert json.loads(render("json", [report]))["fixes"][0]["diff"] == report.fixes[0].diff


# What is looked at and tried, before any of it is graded.


def looked_at(folder: Path, source: str) -> Body:
    loss = resolve(written(folder, source))
    return look(Editable.of(loss.function), loss, next(batches(0, None, sampler="stale", centre="batch")))


def tried(body: Body) -> dict[str, str]:
    """The kind of change that leads to each line in place of the one before the last."""
    changes = Rewrites(body, {"reverse_kl": 1.0}).all()
    return {body.definition.changed(change.edits).splitlines()[-2].strip(): change.kind for change in changes}


@pytest.mark.parametrize(
    ("line", "candidate", "kind"),
    [
        ("ref_logp.mul_(mask)", "ref_logp = ref_logp.mul(mask)", "in-place"),
        ("ref_logp *= mask", "ref_logp = ref_logp * mask", "in-place"),
        ("other = 1 - mask\n    u = (logp - ref_logp) * other", "u = (logp - ref_logp) * mask", "mask"),
        ("u = (logp - ref_logp).clamp(-5, 5)", "u = logp - ref_logp", "left-out"),
        ("u = (logp - old_logp) * mask", "u = (logp - logp) * mask", "field"),
    ],
)
def test_a_line_and_what_is_tried_in_its_place(tmp_path, line, candidate, kind):
    body = looked_at(
        tmp_path, f"def loss(logp, ref_logp, old_logp, mask):\n    {line}\n    return (logp - ref_logp) * mask\n"
    )
    assert tried(body)[candidate] == kind


def test_what_is_not_a_number_at_padding_moves_with_nothing(tmp_path):
    body = looked_at(tmp_path, "def loss(logp, ref_logp, mask):\n    return (mask / mask) * (logp - ref_logp)\n")
    moves = {body.definition.source(one.node): one.of_reference for one in body.expressions}
    assert (moves["mask / mask"], moves["logp - ref_logp"]) == (False, True)


def test_a_method_is_not_taken_for_a_function_of_its_name(tmp_path):
    source = """class Trainer:
    @staticmethod
    def loss(logp, ref_logp):
        return logp - ref_logp


def loss(logp, ref_logp):
    return ref_logp - logp
"""
    function = resolve(written(tmp_path, source)).function
    method = function.__globals__["Trainer"].loss
    found = [ast.unparse(Editable.of(one).node.body[-1]) for one in (method, function)]
    assert found == ["return logp - ref_logp", "return ref_logp - logp"]


def test_a_change_that_leaves_the_verdict_open_is_no_fix(tmp_path):
    loss = resolve(written(tmp_path, KINDS["sign"][0]))
    grading = Grading.of("", Options.of(environment="bandit", select="KL103"))
    for _ in grading.steps(loss):
        pass
    search, report = Fixing(loss, grading, grading.report()), grading.report()
    better = {verdict: search._is_better(replace(report, verdict=verdict), scaled=True) for verdict in VERDICTS}
    assert better == {"confirmed": True, "inconclusive": False, "refuted": False, "error": False}
