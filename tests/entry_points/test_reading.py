"""`kltest grade FILE:Class.method`: what cannot be called is read; where both can be done, they agree."""

import json

import pytest
from typer.testing import CliRunner

from kltest.cli import app

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


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "squared", "per_row_mean"])
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
