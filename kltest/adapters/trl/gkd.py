"""`GKDTrainer.compute_loss`, its forward passes included, with tables as the policy and as its teacher."""

import importlib

from kltest.adapters.trainers import bare, holding, inputs_of, tabular


def gkd(logits, ref_logits, tokens, mask, mixture=0.5):
    """`GKDTrainer.compute_loss` on rollouts of the policy; `mixture` is its beta, and the reference is the teacher."""
    teacher = tabular()
    kind = importlib.import_module("trl.experimental.gkd").GKDTrainer
    trainer = bare(kind, teacher_model=teacher, beta=mixture)
    with holding(trainer.model, logits), holding(teacher, ref_logits):
        return trainer.compute_loss(trainer.model, inputs_of(tokens, mask))
