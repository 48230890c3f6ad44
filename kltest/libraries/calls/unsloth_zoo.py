"""unsloth-zoo's GRPO loss, from log-probs."""

import functools
import inspect
import os

from kltest.libraries.calls.installed import part

# Without a GPU importing the package fails otherwise; it is read when the package is imported.
os.environ.setdefault("UNSLOTH_ZOO_DISABLE_GPU_INIT", "1")


def grpo(logp, old_logp, ref_logp, mask, tokens, advantage, beta, with_old=True, **settings):
    """`grpo_compute_loss` with its own defaults but for `settings`; `with_old=False`: as for one update a batch."""
    whole = part("unsloth_zoo.rl_replacements", "grpo_compute_loss")
    for name in settings:
        if f'"{name}"' not in source_of(whole):
            raise LookupError(
                f"in the installed version grpo_compute_loss has no {name!r}, which this setting is about"
            )
    offered = {
        "ref": ref_logp,
        "new": logp,
        "old": old_logp if with_old else None,
        "sampling_per_token_logps": None,
        "input_ids": tokens,
        "mask": mask,
        "beta": beta,
        "advantages": advantage,
    }
    arguments = taken_or_swallowed(whole, offered)
    loss, _, kl, *_ = whole(**arguments, num_items_in_batch=mask.sum(), **settings)
    return loss, {"kl": kl}


@functools.cache
def source_of(function):
    """The lines of a function, which tell the names that it takes out of its keyword arguments."""
    return inspect.getsource(function)


def taken_or_swallowed(function, offered):
    """The arguments that a function names; LookupError for one without a default that nothing fills."""
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if needed and parameter.name not in offered:
            raise LookupError(
                f"in the installed version grpo_compute_loss wants {parameter.name!r}, which is not known here"
            )
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}


def charged(logp, old_logp, ref_logp, mask, tokens, advantage, beta):
    """The recipe: advantages are charged with the KL, and the loss is called without one."""
    whole = part("unsloth_zoo.rl_replacements", "grpo_compute_loss")
    recipe = "kltest.libraries.recipes.unsloth_zoo"
    advantages = part(recipe, "charged")(advantage, logp, ref_logp, old_logp, mask, beta)
    offered = {
        "ref": None,
        "new": logp,
        "old": None,
        "sampling_per_token_logps": None,
        "input_ids": tokens,
        "mask": mask,
        "beta": 0.0,
        "advantages": advantages,
    }
    return whole(**taken_or_swallowed(whole, offered), **part(recipe, "SETTINGS"))[0]
