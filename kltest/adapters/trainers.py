"""`compute_loss(model, inputs)` of a trainer in the style of Hugging Face, with a table as its model.

An adapter's call is a few lines:

    def gkd(logits, ref_logits, tokens, mask, **settings):
        trainer = bare(part("trl.experimental.gkd", "GKDTrainer"), **settings, teacher_model=tabular())
        with holding(trainer.model, logits), holding(trainer.teacher_model, ref_logits):
            return trainer.compute_loss(trainer.model, inputs_of(tokens, mask))

The trainer's own constructor is not called: what it would set is given, or stands in for one device and one step.
"""

from collections import defaultdict
from types import SimpleNamespace

from kltest.adapters.tabular import PROMPT, TabularConfig, TabularLM, chains


def tabular():
    """Return a causal language model whose logits are those that `holding` gives it."""
    return TabularLM(TabularConfig())


def holding(model, logits):
    """Inside, a model has these (B, T, V) log-probs at the tokens of B rollouts; they may be leaves of a graph."""
    return model.holding(chains(logits))


def bare(kind, args=(), **attributes):
    """Return a trainer of a class without calling its constructor.

    Args:
        kind: the class.
        args: its arguments by name, beside those of one step on one device.
        attributes: what its constructor would set; they win over what stands in, as a table does for its model.
    """
    trainer = object.__new__(kind)
    usual = {"gradient_accumulation_steps": 1, "n_gpu": 1, "past_index": -1, "average_tokens_across_devices": False}
    same = {name: lambda value, *_, **__: value for name in ("gather", "gather_for_metrics", "unwrap_model", "reduce")}
    trainer.__dict__ |= {
        "model": tabular(),
        "args": SimpleNamespace(**{**usual, **dict(args)}),
        "accelerator": SimpleNamespace(**same, num_processes=1, process_index=0, is_main_process=True),
        "label_smoother": None,
        "compute_loss_func": None,
        "model_accepts_loss_kwargs": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        **attributes,
    }
    return trainer


def inputs_of(tokens, mask):
    """Return rollouts behind prompts of one token, as inputs of trainers: in one piece, and prompts apart.

    In one piece they are `input_ids`, `attention_mask` and `labels`, −100 where nothing is live, with `prompts` (B, 1)
    for trainers that count its tokens. A teacher has the same prompts.
    """
    rows, live = len(tokens), mask != 0
    prompts = (tokens.new_tensor(range(rows)) + PROMPT + 1)[:, None]
    ids = tokens.new_zeros(rows, tokens.shape[1] + 1)
    ids[:, :1], ids[:, 1:] = prompts, tokens
    attended, labels = ids * 0 + 1, ids.clone()
    attended[:, 1:], labels[:, :1] = live, -100
    labels[:, 1:] = tokens.where(live, -100)
    one = {"input_ids": ids, "attention_mask": attended}
    apart = {"prompt_ids": prompts, "prompt_mask": attended[:, :1], "completion_ids": tokens}
    apart |= {"completion_mask": live.long(), "num_items_in_batch": live.sum()}
    return {
        **one,
        **{f"teacher_{name}": value for name, value in one.items()},
        "labels": labels,
        "prompts": prompts,
        **apart,
    }
