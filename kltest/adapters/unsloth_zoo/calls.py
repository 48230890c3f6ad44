"""unsloth-zoo's GRPO loss, from log-probs."""

import inspect
import os

from kltest.adapters.installed import part, taken
from kltest.adapters.unsloth_zoo.recipes import SETTINGS, charged


def grpo(logp, old_logp, ref_logp, mask, tokens, advantage, beta, with_old=True, **settings):
    """`grpo_compute_loss` with `settings` over its own defaults; `with_old=False` is for one update a batch."""
    offered = {"ref": ref_logp, "new": logp, "old": old_logp if with_old else None, "beta": beta}
    loss, _, kl, *_ = called({**offered, "input_ids": tokens, "mask": mask, "advantages": advantage}, settings)
    return loss, {"kl": kl}


def with_charged_advantages(logp, old_logp, ref_logp, mask, tokens, advantage, beta):
    """The recipe: advantages are charged with the KL, and the loss is called without one."""
    advantages = charged(advantage, logp, ref_logp, old_logp, mask, beta)
    offered = {"ref": None, "new": logp, "old": None, "beta": 0.0}
    return called({**offered, "input_ids": tokens, "mask": mask, "advantages": advantages}, SETTINGS)[0]


def called(offered, settings):
    """`grpo_compute_loss` of the arguments that it names; LookupError for those it lacks, or needs in addition."""
    # Without a GPU the import fails unless one of these is set; which one depends on the version.
    for name in ("UNSLOTH_ZOO_DISABLE_GPU_INIT", "UNSLOTH_ALLOW_CPU"):
        os.environ.setdefault(name, "1")
    whole = part("unsloth_zoo.rl_replacements", "grpo_compute_loss")
    # It reads its settings from keyword arguments, by names that are constants of its code.
    known = inspect.unwrap(whole).__code__.co_consts
    for name in settings:
        if name not in known:
            raise LookupError(
                f"in the installed version grpo_compute_loss has no {name!r}, which this setting is about"
            )
    arguments = taken(whole, {**offered, "sampling_per_token_logps": None}, {})
    return whole(**arguments, num_items_in_batch=offered["mask"].sum(), **settings)
