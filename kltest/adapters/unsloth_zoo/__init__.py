"""unsloth-zoo: `grpo_compute_loss` by every loss type and the options that change its KL term."""

import inspect
import os

from kltest.adapters import STEP, Adapter, Setting
from kltest.adapters.installed import part, taken
from kltest.adapters.standalone import program
from kltest.adapters.unsloth_zoo.recipes import SETTINGS, charged

MODULE = "unsloth_zoo.rl_replacements"
SOURCE = "https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/rl_replacements.py"
ALONE = (
    "The function's own defaults; unsloth's trainer hands on what is set in its configuration. One device, one step."
)
# Without "vespo", which needs a function of TRL that the trainer passes in.
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")


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


def found():
    """`grpo_compute_loss`, imported without a GPU: one of these must be set, which one depends on the version."""
    for name in ("UNSLOTH_ZOO_DISABLE_GPU_INIT", "UNSLOTH_ALLOW_CPU"):
        os.environ.setdefault(name, "1")
    return part("unsloth_zoo.rl_replacements", "grpo_compute_loss")


def called(offered, settings):
    """`grpo_compute_loss` of the arguments that it names; LookupError for those it lacks, or needs in addition."""
    whole = found()
    # It reads its settings from keyword arguments, by names that are constants of its code.
    known = inspect.unwrap(whole).__code__.co_consts
    for name in settings:
        if name not in known:
            raise LookupError(
                f"in the installed version grpo_compute_loss has no {name!r}, which this setting is about"
            )
    arguments = taken(whole, {**offered, "sampling_per_token_logps": None}, {})
    return whole(**arguments, num_items_in_batch=offered["mask"].sum(), **settings)


LOSS = Setting.of(grpo, name="grpo_compute_loss", options=STEP, source=SOURCE, note=ALONE)

ADAPTER = Adapter(
    name="unsloth-zoo",
    distribution="unsloth_zoo",
    version="2026.10.9",
    installs=(
        ("--no-deps", "unsloth_zoo=={version}"),
        # torch is installed alone, and what the library uses of it needs sympy.
        ("transformers>=4.57.6,<=5.17.0", "datasets>=3.4.1,<5,!=4.4.*,!=4.5.0", "sympy"),
    ),
    module="unsloth_zoo",
    homepage="https://github.com/unslothai/unsloth-zoo",
    settings=(
        LOSS.variant(name="alone", default=True),
        *(LOSS.variant({"loss_type": name}) for name in TYPES[1:]),
        LOSS.variant({"loss_type": "dr_grpo", "max_completion_length": 1}),
        LOSS.variant({"use_bias_correction_kl": True}),
        LOSS.variant({"use_bias_correction_kl": True, "loss_type": "luspo"}),
        LOSS.variant({"use_bias_correction_kl": True, "importance_sampling_level": "sequence", "loss_type": "luspo"}),
        LOSS.variant({"importance_sampling_level": "sequence"}),
        LOSS.variant({"with_old": False}),
        LOSS.variant(
            name="charged",
            target=f"{__name__}:with_charged_advantages",
            recipe=True,
            note="Advantages are charged; it costs the variance of k1 over sequences, and off-policy of their ratio.",
        ),
    ),
    loads=found,
    standalone=program,
)
