"""Trainers without their constructors: `compute_loss(model, inputs)` of a Hugging Face trainer, graded on tables."""

import numpy as np
import pytest

import kltest
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import exact
from kltest.truth import gradient

pytest.importorskip("transformers")
from transformers import Trainer

from kltest.adapters.trainers import bare, holding, inputs_of, tabular


class Distils(Trainer):
    """KL(student‖teacher) of the next token, summed over labels; `late` reads each label one position too late."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        own, other = (each(**given).logits[:, :-1].log_softmax(-1) for each in (model, self.teacher_model))
        labels = inputs["labels"][:, :-1] if self.args.late else inputs["labels"][:, 1:]
        loss = (own.exp() * (own - other)).sum(-1)[labels != -100].sum() / len(labels)
        self._metrics["train"]["kl"].append(loss.item())
        return self.accelerator.gather(loss) / self.args.gradient_accumulation_steps


def distilled(logits, ref_logits, tokens, mask, late=False):
    trainer = bare(Distils, args={"late": late}, teacher_model=tabular())
    with holding(trainer.model, logits), holding(trainer.teacher_model, ref_logits):
        loss = trainer.compute_loss(trainer.model, inputs_of(tokens, mask))
    return loss, {"kl": trainer._metrics["train"]["kl"][-1]}


@pytest.mark.scheduled
def test_a_trainers_loss_is_graded_through_its_forward_pass():
    """The next token's KL, summed over tokens, averaged over rollouts, of equal and of differing lengths."""
    report = kltest.grade(distilled, environment="sequence,ragged", sampler="current", select="KL1")
    assert [row.identified for row in report.gradients] == [{"local_reverse_kl": pytest.approx(1.0)}] * 2


def test_a_label_that_is_read_one_position_late_is_noticed():
    """The first of the T positions that predict a token is lost."""
    instance = instances("sequence", 0)[0]
    found = [exact(bind(distilled, Call(arguments={"late": late})), instance).gradient for late in (False, True)]
    away = [np.linalg.norm(each - gradient("local_reverse_kl", instance)) for each in found]
    assert away[0] < 1e-9 < 1e-2 < away[1]
