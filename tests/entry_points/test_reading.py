"""`kltest grade FILE:Class.method`: what cannot be called is read; where both can be done, they agree."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from weekly import first

import kltest
from kltest.cli import app
from kltest.errors import UsageError

TRAINER = """from utils import masked_mean


class Trainer:
    def compute_loss(self, model, inputs, return_outputs=False):
        logprobs = model(inputs["input_ids"]).logits.log_softmax(-1)
        logprobs = logprobs.gather(-1, inputs["labels"].unsqueeze(-1)).squeeze(-1)
        ref_logprobs = inputs["ref_logprobs"]
        delta = ref_logprobs - logprobs
        kl = delta.exp() - delta - 1
        return self.beta * masked_mean(kl, inputs["mask"])

    def no_kl(self, model, inputs):
        return model(inputs).mean()
"""
UTILS = "def masked_mean(x, mask):\n    return (x * mask).sum(-1).mean()\n"
BOTH = """def k1(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1).mean()


def k2(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum(-1).mean()


def k3(logp, ref_logp, mask):
    delta = ref_logp - logp
    return ((delta.exp() - delta - 1) * mask).sum(-1).mean()


def squared(logp, ref_logp, mask):
    return 0.5 * (((logp - ref_logp) * mask).sum(-1) ** 2).mean()


def per_row_mean(logp, ref_logp, mask):
    return ((0.5 * (logp - ref_logp) ** 2 * mask).sum(-1) / mask.sum(-1)).mean()
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("trainer", TRAINER), ("utils", UTILS), ("both", BOTH)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


def graded(*arguments: str):
    result = CliRunner().invoke(app, ["grade", *arguments])
    return result.exit_code, result


@pytest.mark.scheduled
def test_a_method_that_wants_a_model_is_read(checkout):
    code, result = graded("trainer.py:Trainer.compute_loss", "--expect", "local_forward_kl")
    assert code == 0, result.output
    assert "from its source, not called" in result.stdout
    assert graded("trainer.py:Trainer.compute_loss")[0] == 1


def test_call_insists(checkout):
    code, result = graded("trainer.py:Trainer.compute_loss", "--call")
    assert code == 2
    assert "cannot be filled" in result.stderr
    assert len(result.stderr.splitlines()) <= 5


def test_what_has_no_term_is_refused_as_before(checkout):
    code, result = graded("trainer.py:Trainer.no_kl")
    assert code == 2
    assert "cannot be filled" in result.stderr
    code, result = graded("trainer.py:Trainer.no_kl", "--read")
    assert code == 2
    assert "no KL term was found in it" in result.stderr


def test_both_ways_exclude_each_other(checkout):
    assert graded("both.py:k3", "--read", "--call")[0] == 2


@pytest.mark.parametrize("name", first(1, ["k3", "per_row_mean", "k1", "k2", "squared"]))
def test_what_is_read_and_what_is_called_agree(checkout, name):
    def rows(*arguments):
        found = json.loads(graded(f"both.py:{name}", "--output", "json", "--sampler", "current", *arguments)[1].stdout)
        report = found[0] if isinstance(found, list) else found
        keys = ("environment", "sampler", "identified", "relative_bias")
        return report["verdict"], [[row[key] for key in keys] for row in report["gradients"]], report["read"]

    called, read = rows("--call"), rows("--read")
    assert called[0] == read[0]
    assert [row[:2] for row in called[1]] == [row[:2] for row in read[1]]
    for one, other in zip(called[1], read[1], strict=True):
        assert (one[2] or {}).keys() == (other[2] or {}).keys()
        assert one[3] == pytest.approx(other[3], abs=1e-9)
    assert (called[2], bool(read[2])) == ("", True)


PENALTY = """def penalty(logprobs, ref_logprobs, kind="k1"):
    delta = logprobs - ref_logprobs
    if kind == "k1":
        return delta
    if kind == "k2":
        return delta.square() / 2
    return (-delta).exp() + delta - 1
"""
CONFIGURED = """from config import Config
from penalties import penalty


class Trainer:
    def __init__(self, config: Config):
        self.config = config

    def compute_loss(self, model, inputs):
        logprobs = model(inputs["input_ids"]).logits.log_softmax(-1)
        logprobs = logprobs.gather(-1, inputs["labels"].unsqueeze(-1)).squeeze(-1)
        kl = penalty(logprobs, inputs["ref_logprobs"], self.config.kl_kind)
        return self.config.kl_coef * (kl * inputs["mask"]).sum(-1).mean()
"""
CONFIG = """from dataclasses import dataclass


@dataclass
class Config:
    kl_coef: float = 0.1
    kl_kind: str = {default}
"""
ARGUMENTS = """import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--kl-coef", type=float, default=0.1)
parser.add_argument("--kl-kind", default={default})


class Config:
    pass
"""
LOSS = ("--expect", "local_reverse_kl", "--environment", "sequence", "--select", "KL1")


@pytest.fixture
def configured(checkout):
    """A trainer whose term is one of three by an option, in a checkout of its own."""
    (checkout / "pyproject.toml").write_text("", encoding="utf-8")
    (checkout / "penalties.py").write_text(PENALTY, encoding="utf-8")
    (checkout / "configured.py").write_text(CONFIGURED, encoding="utf-8")

    def with_default(default: str, text: str = CONFIG) -> None:
        (checkout / "config.py").write_text(text.format(default=default), encoding="utf-8")

    return with_default


@pytest.mark.parametrize("text", first(1, [CONFIG, ARGUMENTS]), ids=["dataclass", "argparse"])
@pytest.mark.parametrize(("default", "code"), first(1, [("'k2'", 0), ("'k3'", 1)]))
def test_the_default_variant_decides(configured, default, text, code):
    configured(default, text)
    found, result = graded("configured.py:Trainer.compute_loss", *LOSS)
    assert found == code, result.output
    assert result.stdout.count("REFUTED") + result.stdout.count("CONFIRMED") == 1
    words = " ".join(result.stdout.split())
    assert "the default" in words
    assert f"does not count (config.kl_kind is {default} by default)" in words or "does not count (kl_kind" in words


@pytest.mark.scheduled
def test_what_does_not_decide_is_one_line_each_and_in_the_json(configured):
    configured("'k2'")
    formats = ("--quiet", "--output", "text", "--output", "json:found")
    _, result = graded("configured.py:Trainer.compute_loss", *formats, *LOSS)
    report = json.loads(Path("found").read_text(encoding="utf-8"))
    assert [one["verdict"] for one in report["variants"]] == ["refuted", "refuted"]
    assert all("by default" in one["why"] for one in report["variants"])
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.scheduled
def test_without_a_default_every_variant_decides_and_that_is_said(configured):
    configured("None", "class Config:\n    pass  # {default}\n")
    code, result = graded("configured.py:Trainer.compute_loss", *LOSS)
    assert code == 1
    assert "nothing says which variant is the default: each decides" in " ".join(result.stdout.split())
    assert "3 targets" in result.stdout


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("call", "code"), [("penalty(logprobs, ref, 'k3')", 1), ("", 0), ("penalty(logprobs, ref)", 0)]
)
def test_a_variant_that_a_call_site_uses_decides(checkout, call, code):
    (checkout / "pyproject.toml").write_text("", encoding="utf-8")
    (checkout / "penalties.py").write_text(PENALTY.replace('kind="k1"', 'kind="k2"'), encoding="utf-8")
    loss = f"def policy_loss(logprobs, ref, mask):\n    loss = ({call or 0} * mask).sum(-1).mean()\n    return loss\n"
    (checkout / "losses.py").write_text(f"from penalties import penalty\n\n\n{loss}", encoding="utf-8")
    found, result = graded("penalties.py:penalty", "--read", *LOSS)
    assert found == code, result.output
    assert ("used by policy_loss, losses.py:4" in " ".join(result.stdout.split())) == ("k3" in call)


@pytest.mark.scheduled
@pytest.mark.parametrize(("own", "code"), [("'k2'", 0), ("'k3'", 1)])
def test_a_call_site_that_leaves_it_open_uses_no_variant(configured, own, code):
    configured("None", "class Config:\n    pass  # {default}\n")
    Path("penalties.py").write_text(PENALTY.replace('kind="k1"', f"kind={own}"), encoding="utf-8")
    found, result = graded("penalties.py:penalty", "--read", *LOSS)
    assert found == code, result.output
    assert result.stdout.count("does not count (kind is") == 2


JSD = """from torch.nn.functional import kl_div
from transformers import Trainer


class Distilling(Trainer):
    def divergence(self, student_logits, teacher_logits, mask, beta=DEFAULT, top_k=None, probs=False):
        if top_k is not None and top_k > 0:
            kept = teacher_logits.topk(top_k, dim=-1)[1]
            student_logits, teacher_logits = student_logits.gather(-1, kept), teacher_logits.gather(-1, kept)
        if probs:
            student, teacher = student_logits.log(), teacher_logits.log()
        else:
            student, teacher = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        if beta == 0:
            kl = kl_div(student, teacher, reduction="none", log_target=True)
        else:
            kl = kl_div(teacher, student, reduction="none", log_target=True)
        return (kl.sum(-1) * mask).sum(-1).mean()

    def compute_loss(self, model, inputs):
        student, teacher = model(inputs["input_ids"]).logits, inputs["teacher_logits"]
        return self.divergence(student, teacher, inputs["mask"], beta=self.args.beta, top_k=self.top_k)


class Config:
    top_k: int = 0
"""


@pytest.mark.scheduled
@pytest.mark.parametrize(("default", "code"), [("0", 1), ("1", 0)])
def test_its_own_default_decides_where_nothing_says_what_it_is_given(checkout, default, code):
    (checkout / "jsd.py").write_text(JSD.replace("DEFAULT", default), encoding="utf-8")
    found, result = graded("jsd.py:Distilling.divergence", "--read", *LOSS)
    assert found == code, result.output
    assert result.stdout.count("REFUTED") + result.stdout.count("CONFIRMED") == 1
    words = " ".join(result.stdout.split())
    assert words.count("does not count") == 3
    # Zero is none of the likeliest tokens: the same sum as without them.
    assert words.count("top_k is 0 by default") == 2
    found, result = graded("jsd.py:Distilling.compute_loss", "--read", *LOSS)
    # What it hands on is asked of nobody: both decide.
    assert (found, " ".join(result.stdout.split()).count("as far as it is known, the default")) == (1, 2)


def test_what_cannot_be_called_nor_read_says_both(checkout):
    code, result = graded("trainer.py:Trainer.no_kl")
    assert code == 2
    assert "cannot be filled" in result.stderr
    assert "no KL term was found in it" in result.stderr
    assert len(result.stderr.splitlines()) <= 5


def loaded(file):
    """Return the module of a file as its users import it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPTIONS = {"expect": "local_reverse_kl", "environment": "sequence", "select": "KL1"}


@pytest.mark.scheduled
@pytest.mark.parametrize(("default", "verdict"), [("'k3'", "refuted"), ("'k2'", "confirmed")])
def test_python_reads_a_method_that_it_cannot_call(configured, default, verdict, monkeypatch):
    configured(default)
    monkeypatch.syspath_prepend(".")
    for name in ("config", "penalties"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    report = kltest.grade(loaded(Path("configured.py")).Trainer.compute_loss, **OPTIONS)
    assert report.verdict == verdict
    assert report.target.startswith("Trainer.compute_loss")
    assert "not called (call=True says why)" in report.read
    assert len(report.variants) == 2


@pytest.mark.scheduled
def test_python_takes_read_and_call_as_the_command_line_does(checkout):
    both = loaded(Path("both.py"))
    assert kltest.grade(both.k2, **OPTIONS).read == ""
    read = kltest.grade(both.k2, read=True, **OPTIONS)
    assert (read.verdict, bool(read.read)) == ("confirmed", True)
    trainer = "trainer.py:Trainer.compute_loss"
    assert kltest.grade(trainer, expect="local_forward_kl", environment="sequence", select="KL1").verdict == "confirmed"
    with pytest.raises(UsageError, match="cannot be filled"):
        kltest.grade(trainer, call=True)
    for option in ("call", "read"):
        with pytest.raises(UsageError, match=option):
            kltest.grade(trainer, **{option: "yes"})
    with pytest.raises(UsageError, match="exclude"):
        kltest.grade(trainer, call=True, read=True)
    with pytest.raises(UsageError, match="only a function of a file can be read"):
        kltest.grade(lambda logp: logp, read=True)


def test_python_says_why_neither_was_possible(checkout):
    with pytest.raises(UsageError) as error:
        kltest.grade("trainer.py:Trainer.no_kl")
    assert re.search(r"cannot be filled[\s\S]*no KL term was found in it", str(error.value))
    assert len(str(error.value).splitlines()) <= 5


@pytest.mark.parametrize("target", ["trainer.py:Trainer.compute_los", "k3-los"])
def test_of_what_is_not_there_nothing_is_said_of_reading(checkout, target):
    _, result = graded(target)
    assert "did you mean" in result.stderr
    assert "cannot be read" not in result.stderr


REWARDS = """def stale_rewards(token_level_scores, old_logprobs, ref_logprobs, kl_coef):
    return token_level_scores - kl_coef * (old_logprobs - ref_logprobs)


def fresh_rewards(token_level_scores, logprobs, ref_logprobs, kl_coef):
    return token_level_scores - kl_coef * (logprobs - ref_logprobs)
"""


@pytest.mark.parametrize(("name", "codes"), [("stale_rewards", ["KL305"]), ("fresh_rewards", [])])
@pytest.mark.parametrize("way", first(1, ["--read", "--call"]))
def test_a_reward_from_the_rollouts_own_log_probs_is_one_however_it_is_looked_at(checkout, name, codes, way):
    Path("rewards.py").write_text(REWARDS, encoding="utf-8")
    _, result = graded(f"rewards.py:{name}", way, "--output", "json", "--environment", "sequence", "--select", "KL3")
    checks = json.loads(result.stdout)["checks"]
    assert [check["code"] for check in checks if check["status"] == "fail"] == codes


FORMS = """def of_a_thousand(logprobs, ref_logprobs, mask):
    assert logprobs.shape[1] == 1000
    return ((logprobs - ref_logprobs) ** 2 / 2 * mask).sum(-1).mean()


def three(logprobs, ref_logprobs, mask):
    kl = (logprobs - ref_logprobs) ** 2 / 2 * mask
    return kl, 2 * kl, kl + 1


def crashes(logprobs, ref_logprobs, mask):
    raise RuntimeError("a bug")
    return ((logprobs - ref_logprobs) ** 2 / 2 * mask).sum(-1).mean()
"""


@pytest.mark.parametrize(
    ("name", "code", "read"), first(1, [("of_a_thousand", 0, True), ("three", 0, True), ("crashes", 3, False)])
)
def test_what_takes_other_sizes_or_returns_no_loss_is_read_and_what_crashes_is_not(checkout, name, code, read):
    Path("forms.py").write_text(FORMS, encoding="utf-8")
    found, result = graded(f"forms.py:{name}", *LOSS)
    assert found == code, result.output
    assert ("not called" in result.stdout) == read
