"""`kltest grade FILE:NAME` of distillation losses as trainers write them: payloads, options and layouts are read."""

import json

import pytest
from typer.testing import CliRunner
from weekly import first, spread

from kltest.cli import app

# A payload of the teacher's likeliest tokens, side by side; what is said of the log-probs far away limits nothing.
PAYLOAD = """import torch


def {name}(student_logits, teacher_topk_log_probs, teacher_topk_ids, config):
    teacher_topk_log_probs = teacher_topk_log_probs.values().unsqueeze(0)
    teacher_topk_ids = teacher_topk_ids.values().unsqueeze(0)
    student = student_logits.log_softmax(-1).gather(-1, teacher_topk_ids)
    student = student.clamp_min(config.log_prob_min_clamp)
    teacher = teacher_topk_log_probs.clamp_min(config.log_prob_min_clamp)
    kl = {kl}
    return kl.sum(-1)
"""
FORWARD, REVERSE = "teacher.exp() * (teacher - student)", "student.exp() * (student - teacher)"
# Several tokens are those of an index that is gathered by as it is, and whatever meets them is of the same.
GATHERED = """import torch


def {name}(student_logits, target_token_ids, target_logprobs, target_mask):
    student = torch.log_softmax(student_logits, -1)
    student = torch.gather(student, -1, target_token_ids)
    student, teacher = student[target_mask.bool()], target_logprobs[target_mask.bool()]
    return ({kl}).sum()
"""
# The teacher's probabilities come with a temperature of their own, and the student's is the default of an option.
PROBABILITIES = """class Divergence:
    def __init__(self, config):
        self.config = config

    def __call__(self, logits, teacher_probs, teacher_log_probs, teacher_inf_mask):
        kld = self.{name}(logits, teacher_probs, teacher_log_probs, teacher_inf_mask)
        return kld

    def {name}(self, logits, teacher_probs, teacher_log_probs, teacher_inf_mask):
        logits = logits / self.config.kd_temperature
        student = logits.log_softmax(-1)
        kld = {kl}
        return kld.masked_fill(logits.isinf() | teacher_inf_mask, 0.0).sum(-1)
"""
MIXED = """import torch


class Divergence:
    def {name}(self, logits, teacher_logits, target):
        student, teacher = logits.softmax(-1), teacher_logits.softmax(-1)
        mixed = self.args.skew_lambda * teacher + (1 - self.args.skew_lambda) * student
        return (teacher * (teacher.log() - mixed.log())).sum(-1)
"""
ARGUMENTS = 'def add(parser):\n    parser.add_argument("--skew-lambda", type=float, default={default})\n'
# What is computed for other values of an option stands on lines of its own.
BY_BETA = """import torch


def _kl(target, given):
    return (target.exp() * (target - given)).sum(-1)


def {name}(model, student_logits, teacher_logits, beta: float = {default}):
    student, teacher = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    if beta <= 0.0:
        return _kl(teacher, student)
    if beta >= 1.0:
        return _kl(student, teacher)
    mixture = torch.logsumexp(torch.stack([teacher + beta.log(), student + (1 - beta).log()]), 0)
    return beta * (teacher.exp() * (teacher - mixture)).sum(-1) + (1 - beta) * (
        student.exp() * (student - mixture)
    ).sum(-1)
"""
CHUNKED = """def compute_opd_advantages(prev_logprobs, teacher_logprobs, **kwargs):
    num_action_chunks = kwargs.get("num_action_chunks")
    assert num_action_chunks is not None
    advantages = {kl}
    return advantages.reshape(*advantages.shape[:-1], num_action_chunks, -1), None
"""
ADAPTIVE = """class Divergence:
    def {name}(self, logits, teacher_logits, target):
        student, teacher = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        tail = teacher.exp().le({kl}).float()
        return (teacher.exp() * (1 - tail) * (teacher - student)).sum(-1)
"""
# A softmax of logits that are gathered is one over these tokens alone, whatever the logits are called.
OF_SOME = """import torch.nn.functional as F


def {name}(student_logits, teacher_logits, mask, top_k={default}):
    if top_k is not None and top_k > 0:
        _, ids = teacher_logits.topk(top_k, dim=-1)
        student_logits, teacher_logits = student_logits.gather(-1, ids), teacher_logits.gather(-1, ids)
    student, teacher = F.log_softmax(student_logits, -1), F.log_softmax(teacher_logits, -1)
    return (F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1) * mask).sum()
"""
# Weights of a rollout with a sum below the line, which a number that nothing says keeps from zero.
WEIGHTED = """class Trainer:
    def {name}(self, log_probs, teacher_log_probs, mask):
        gap = (teacher_log_probs - log_probs).detach()
        size = gap.abs()
        total = size.sum(1, keepdim=True)
        weights = {kl} / total.clamp_min(self.opd_epsilon)
        advantages = weights * gap
        loss = -log_probs * advantages
        return (loss * mask).sum()
"""
# A list of objects, beside one of log-probs: what is renormalised is of several tokens, and its logarithm says whose.
OF_OBJECTS = """import torch


def {name}(data, logprobs_list):
    total = torch.zeros(())
    for i, one in enumerate(data):
        weights = one.loss_fn_inputs["weights"].to_torch()
        slots = weights > 0
        log_teacher_renorm = torch.where(slots, weights.clamp(min=1e-30).log(), torch.zeros_like(weights))
        student = torch.where(slots, logprobs_list[i], torch.full_like(logprobs_list[i], float("-inf")))
        log_renorm = torch.log_softmax(student, dim=-1).nan_to_num(nan=0.0, neginf=0.0)
        total = total + ({kl} * slots.float()).sum()
    return total, {{}}
"""
# Advantages in a list of one tensor a rollout, and rewards of a batch, to which passes of a loop write in place.
IN_PLACE = """def {name}(args, rollout_data, advantages: list, student_log_probs: list):
    teacher_log_probs = [one.to(device="cpu") for one in rollout_data.get("teacher_log_probs")]
    for i, advantage in enumerate(advantages):
        kl = student_log_probs[i] - teacher_log_probs[i]
        advantages[i] = advantage {kl} args.opd_kl_coef * kl
"""
INTO_BATCH = """def {name}(args, batch):
    for i in range(len(batch["rewards"])):
        batch["rewards"][i] {kl}= args.kl_coef * (batch["log_probs"][i] - batch["teacher_log_probs"][i])
"""
ROWS = {
    "payload": (PAYLOAD, {"kl": FORWARD}, "local_forward_kl_top4", "loss"),
    "payload_reverse": (PAYLOAD, {"kl": REVERSE}, "local_reverse_kl_top4", "loss"),
    "gathered": (GATHERED, {"kl": FORWARD}, "local_forward_kl_top4", "loss"),
    "gathered_reverse": (GATHERED, {"kl": REVERSE}, "local_reverse_kl_top4", "loss"),
    "probabilities": (
        *(PROBABILITIES, {"kl": "teacher_probs * (teacher_log_probs - student)"}),
        *("local_forward_kl", "Divergence.loss"),
    ),
    "probabilities_reverse": (
        *(PROBABILITIES, {"kl": "student.exp() * (student - teacher_log_probs)"}),
        *("local_reverse_kl", "Divergence.loss"),
    ),
    "tenth": (MIXED, {"default": "0.1"}, "local_skewed_forward_kl10", "Divergence.loss"),
    "quarter": (MIXED, {"default": "0.25"}, "local_skewed_forward_kl25", "Divergence.loss"),
    "half": (BY_BETA, {"default": "0.5"}, "local_jensen_shannon", "loss"),
    "teacher": (BY_BETA, {"default": "0.0"}, "local_forward_kl", "loss"),
    "distil": (CHUNKED, {"kl": "teacher_logprobs - prev_logprobs"}, "local_reverse_kl", "compute_opd_advantages"),
    "undistil": (CHUNKED, {"kl": "prev_logprobs - teacher_logprobs"}, "local_reverse_kl", "compute_opd_advantages"),
    "head": (ADAPTIVE, {"kl": "0.0"}, "local_forward_kl", "Divergence.loss"),
    "all_tokens": (OF_SOME, {"default": "None"}, "local_forward_kl", "loss"),
    "some_tokens": (OF_SOME, {"default": "4"}, "local_forward_kl_top4_renormalised", "loss"),
    "weighted": (WEIGHTED, {"kl": "(total - size.cumsum(1) + size)"}, None, "Trainer.loss"),
    "weighted_by_one": (WEIGHTED, {"kl": "total"}, "local_reverse_kl", "Trainer.loss"),
    "objects": (
        *(OF_OBJECTS, {"kl": "log_renorm.exp() * (log_renorm - log_teacher_renorm).detach()"}),
        *("local_reverse_kl_top4_renormalised", "loss"),
    ),
    "objects_forward": (
        *(OF_OBJECTS, {"kl": "log_teacher_renorm.exp() * (log_teacher_renorm - log_renorm)"}),
        *("local_forward_kl_top4_renormalised", "loss"),
    ),
    "in_place": (IN_PLACE, {"kl": "-"}, "local_reverse_kl", "loss"),
    "in_place_added": (IN_PLACE, {"kl": "+"}, "local_reverse_kl", "loss"),
    "into_batch": (INTO_BATCH, {"kl": "-"}, "reverse_kl", "loss"),
    "into_batch_added": (INTO_BATCH, {"kl": "+"}, "reverse_kl", "loss"),
    "no_head": (ADAPTIVE, {"kl": "0.2"}, None, "Divergence.loss"),
}
NEGATIVE = ("undistil", "in_place_added", "into_batch_added")


@pytest.mark.parametrize("row", spread(1, ROWS))
def test_what_trainers_write_is_named(row: str, tmp_path, monkeypatch) -> None:
    text, parts, wanted, target = ROWS[row]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "losses.py").write_text(text.format(name="loss", **parts), encoding="utf-8")
    (tmp_path / "options").mkdir()
    (tmp_path / "options" / "arguments.py").write_text(ARGUMENTS.format(**{"default": 0.1, **parts}), encoding="utf-8")
    options = ("--read", "--output", "json", "--environment", "sequence", "--sampler", "current", "--select", "KL1")
    result = CliRunner().invoke(app, ["grade", f"losses.py:{target}", *options])
    assert result.stdout, result.stderr
    found = json.loads(result.stdout)
    (report,) = found if isinstance(found, list) else [found]
    (gradient,) = report["gradients"]
    followed = gradient["identified"]
    assert (followed and list(followed)) == (wanted and [wanted]), report["error"]
    assert not followed or (followed[wanted] < 0) is (row in NEGATIVE)


# What tensors refuse is read: lists of one tensor a rollout, and dictionaries of one rollout each.
OF_LISTS = """import torch


def loss(log_probs, teacher_log_probs, loss_masks):
    kl = {kl}(torch.cat(log_probs) - torch.cat(teacher_log_probs)).detach()
    return (kl * torch.cat(log_probs) * torch.cat(loss_masks)).sum() / len(log_probs)
"""
OF_DICTIONARIES = """def loss(rollouts, kl_coef):
    for one in rollouts:
        one["rewards"] = one["rewards"] + {kl}kl_coef * (one["teacher_logprobs"] - one["logprobs"])
"""


@pytest.mark.parametrize("sign", first(1, [1, -1]))
@pytest.mark.parametrize(
    ("text", "wanted"), first(1, [(OF_LISTS, "local_reverse_kl"), (OF_DICTIONARIES, "reverse_kl")])
)
def test_a_batch_that_is_laid_out_in_another_way_is_read(text, wanted, sign, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "losses.py").write_text(text.format(kl="" if sign > 0 else "-"), encoding="utf-8")
    options = ("--output", "json", "--environment", "sequence", "--sampler", "current", "--select", "KL1")
    report = json.loads(CliRunner().invoke(app, ["grade", "losses.py:loss", *options]).stdout)
    assert report["read"].startswith("from its source")
    (followed,) = report["gradients"]
    assert list(followed["identified"]) == [wanted]
    assert followed["identified"][wanted] * sign > 0


def test_a_mistake_that_is_none_of_layout_stays_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text("def loss(logp, ref_logp):\n    return logp - ref_logp.no\n", encoding="utf-8")
    found = CliRunner().invoke(app, ["grade", "losses.py:loss"])
    assert "has no attribute 'no'" in found.stdout + found.stderr
    assert "read " not in found.stdout
