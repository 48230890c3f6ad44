"""Calls of whole TRL trainers, with a table as the model.

`grpo` gives `_compute_loss` the inputs that `GRPOTrainer._generate_and_score_completions` would. `grouped` lets the
trainer make them itself, rewards, advantages and reference included; only generation is replaced, by the rollouts. Both
then run the real forward pass. `grpo_from_logprobs` replaces that pass by a leaf of log-probs.
"""

from unittest import mock

import torch

from kltest.adapters.trl.trainers import LENGTHS, forward, held, in_mode, loss_of, sampled_at, scored, trainer_with
from kltest.errors import UsageError


def grpo(
    logits, ref_logits, old_logp, old_logits, tokens, mask, advantage, beta, evaluation=False, recipe=None, **settings
):
    """`GRPOTrainer._compute_loss` on given rollouts, and the KL that it logs; `settings` are those of GRPOConfig.

    The sampler's log-probs are among the inputs if the trainer itself would pass them. Rollouts count as drawn at the
    temperature at which the trainer generates. Raises UsageError for settings that this version does not have.
    """
    trainer = trainer_with("GRPO", beta, settings, recipe)
    # Early versions call the reference while they compute the loss.
    with in_mode(trainer, evaluation), held(trainer, trainer.ref_model, ref_logits):
        inputs = inputs_of(trainer, tokens, mask, advantage)
        with torch.no_grad():
            if "ref_per_token_logps" in trainer.names_of_inputs:
                inputs["ref_per_token_logps"] = forward(trainer, trainer.ref_model, inputs, ref_logits)[0]
            if "old_per_token_logps" in trainer.names_of_inputs:
                if sampled_at(trainer) != trainer.temperature:
                    raise UsageError(
                        "log-probs under the sampler are those at the trainer's temperature; generate at that one"
                    )
                # Padded positions hold what the trainer's own forward pass leaves there.
                passed = forward(trainer, trainer.model, inputs, old_logits)[0]
                old = old_logp.detach().to(trainer.dtype_of_tables)
                inputs["old_per_token_logps"] = old.where(mask != 0, passed)
        return loss_of(trainer, inputs, logits)


def grpo_from_logprobs(logp, ref_logp, old_logp, tokens, mask, advantage, beta, evaluation=False, **settings):
    """`grpo` with the forward pass replaced by log-probs; some versions compute those in float32 only."""
    trainer = trainer_with("GRPO", beta, settings)
    with in_mode(trainer, evaluation):
        inputs = inputs_of(trainer, tokens, mask, advantage)
        given = {"ref_per_token_logps": ref_logp, "old_per_token_logps": old_logp}
        inputs.update({name: value.detach() for name, value in given.items() if name in trainer.names_of_inputs})
        answer = (logp, torch.zeros_like(logp.detach()), None)[: trainer.results_of_forward]
        answer = answer if len(answer) > 1 else logp
        with mock.patch.object(trainer, trainer.name_of_forward, return_value=answer):
            return loss_of(trainer, inputs, None)


def grouped(
    logits, ref_logits, old_logits, tokens, mask, reward, group, beta, trainer, evaluation=False, recipe=None, **others
):
    """`_generate_and_score_completions` and `_compute_loss` of `trainer` ("GRPO", "RLOO") on whole groups of a prompt.

    The model holds the sampler's table while it scores, and the policy's table when the loss is computed.
    """
    order = torch.argsort(group, stable=True)
    sizes = set(torch.unique(group, return_counts=True)[1].tolist())
    if len(sizes) != 1:
        raise UsageError(f"TRL takes groups of one size; these have {sorted(sizes)} rollouts")
    (size,) = sizes
    if size < 2 and not evaluation:
        raise UsageError("TRL trains on groups of at least two rollouts of a prompt; this one has one")
    of_group = (
        {"num_generations_eval": size} if evaluation else {"num_generations": size, "per_device_train_batch_size": size}
    )
    built = trainer_with(trainer, beta, {**of_group, **others}, recipe)
    with in_mode(built, evaluation), held(built, built.ref_model, ref_logits):
        with held(built, built.model, old_logits):
            inputs = scored(built, tokens, mask, reward, order)
        return loss_of(built, inputs, logits)


def inputs_of(trainer, tokens, mask, advantage):
    """Return the inputs of the loss that need no model, under the names that the trainer uses."""
    from kltest.adapters.tabular import PROMPT

    rows = len(tokens)
    live = (mask != 0).long()
    number = torch.arange(rows)
    prompts = torch.full((rows, LENGTHS), PROMPT)
    prompts[:, -1] += number + 1
    of_batch = torch.arange(LENGTHS) >= LENGTHS - 1 - number[:, None] % LENGTHS
    # The count is over the whole generation batch, which holds several parts like this one.
    items = live.sum() * int(getattr(trainer.args, "steps_per_generation", 1) or 1)
    return {
        "prompt_ids": torch.where(of_batch, prompts, 0),
        "prompt_mask": of_batch.long(),
        "completion_ids": tokens,
        "completion_mask": live,
        "advantages": advantage.detach(),
        "num_items_in_batch": items,
        **trainer.absent_inputs,
    }
