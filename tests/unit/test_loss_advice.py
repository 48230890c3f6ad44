"""Proposals for parameters that nothing fills: the printed options and shims are followed, and the losses graded."""

import re
from pathlib import Path

import pytest

import kltest
from kltest.errors import UsageError
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve

LOSSES = """
import torch

def summed(u, mask):
    return ((u * mask).sum(-1) ** 2 / 2).mean()

def nested(data):
    batch = data.batch
    return summed(batch["log_probs"] - batch["ref_log_prob"], batch["response_mask"])

def attributes(batch, cfg):
    return cfg.algorithm.kl_coef * summed(batch.logps - batch.ref_logps, batch.completion_mask)

def mixed(batch, cfg):
    return cfg["scale"] * summed(batch["logps"].double() - batch["ref_logps"], batch["mask"].to(torch.float64))

def both(batch):
    return batch["weight"] * summed(batch["logprobs"] - batch.get("ref_logprobs"), batch["loss_mask"])

def packed(logps, ref_logps, cu_seqlens, max_seqlen):
    assert max_seqlen >= 1
    u = logps - ref_logps
    return torch.stack([u[a:b].sum() ** 2 / 2 for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])]).mean()

def per_token(model, input_ids, attention_mask):
    logp = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, input_ids[:, 1:, None])[..., 0], attention_mask[:, 1:]

def two_models(model, ref_model, input_ids, attention_mask):
    logp, mask = per_token(model, input_ids, attention_mask)
    return summed(logp - per_token(ref_model, input_ids, attention_mask)[0].detach(), mask)

def of_inputs(model, inputs, num_items=None):
    logp, mask = per_token(model, inputs["input_ids"], inputs["attention_mask"])
    return summed(logp - inputs["ref_per_token_logps"], mask)

def with_labels(model, input_ids, labels, ref_logps):
    logp, _ = per_token(model, input_ids, torch.ones_like(input_ids))
    return summed(logp - ref_logps, labels[:, 1:] != -100)

class Trainer:
    def compute_loss(self, model, inputs, return_outputs=False):
        prompt, mask = inputs["prompt_ids"], torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logp, mask = per_token(model, torch.cat([prompt, inputs["completion_ids"]], dim=1), mask)
        return summed(logp - inputs["ref_per_token_logps"], mask)

def of_engines(inputs, scale):
    return scale * summed(inputs["trainer_logprobs"] - inputs["teacher_logprobs"], inputs["loss_mask"])

def unknown(x, y):
    return x.to(y.dtype) + y.sum(-1)
"""


@pytest.fixture
def proposed(tmp_path, monkeypatch):
    """Return what the refusal of a loss of LOSSES proposes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOSSES)

    def refused(name):
        with pytest.raises(UsageError) as refusal:
            resolve(f"mine.py:{name}", Call())
        before = re.split("(?:Or g|G)ive (?:it|each) a value", str(refusal.value))[0]
        return before.partition(" cannot be filled. ")[2]

    return refused


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nested", {"data.batch": "@rollout"}),
        ("attributes", {"batch": "@rollout", "cfg.algorithm": "@rollout"}),
        ("mixed", {"batch": "@rollout", "cfg.scale": "VALUE"}),
        (
            "both",
            {
                "batch.logprobs": "@logp",
                "batch.loss_mask": "@mask",
                "batch.ref_logprobs": "@ref_logp",
                "batch.weight": "VALUE",
            },
        ),
        (
            "of_engines",
            {"inputs.loss_mask": "@mask", "inputs.teacher_logprobs": "@ref_logp", "inputs.trainer_logprobs": "@logp"},
        ),
    ],
)
def test_the_options_that_are_proposed_fill_the_parameters(name, options, proposed):
    said = dict(re.findall(r"--arg (\S+)=([@\w]+)", proposed(name)))
    assert said == options
    arguments = {key: 2.0 if value == "VALUE" else value for key, value in said.items()}
    arguments |= {"scale": 2.0} if name == "of_engines" else {}
    report = kltest.grade(f"mine.py:{name}", arguments=arguments, select="KL1,KL2")
    assert report.verdict == "confirmed", report.error


@pytest.mark.parametrize("name", ["packed", "two_models", "of_inputs", "with_labels", "Trainer.compute_loss"])
def test_what_no_argument_can_give_is_said_with_the_guide_that_has_a_shim(name, proposed):
    wanted = "sequences without padding" if name == "packed" else "a model"
    said = proposed(name)
    assert f"It wants {wanted}: put a shim" in said
    assert (Path(__file__).parents[2] / re.search(r"\((docs/.*?)\)", said)[1]).is_file()


@pytest.mark.parametrize("arguments", [{"data.batch": "@FIELD"}, {"data": "VALUE"}])
def test_a_proposal_is_not_copied_as_it_stands(arguments, proposed):
    with pytest.raises(UsageError, match="in place of the capitals"):
        resolve("mine.py:nested", Call(arguments=arguments))


def test_nothing_is_proposed_for_what_is_not_told(proposed):
    assert proposed("unknown") == ""
