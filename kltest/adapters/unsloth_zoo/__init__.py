"""unsloth-zoo: `grpo_compute_loss` by every loss type and the options that change its KL term."""

from __future__ import annotations

from kltest.adapters.adapter import Adapter, Setting, label
from kltest.adapters.standalone import program

MODULE = "unsloth_zoo.rl_replacements"
CALLS = "kltest.adapters.unsloth_zoo.calls"
SOURCE = "https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/rl_replacements.py"
ALONE = (
    "The function's own defaults; unsloth's trainer hands on what is set in its configuration. One device, one step."
)
# Without "vespo", which needs a function of TRL that the trainer passes in.
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")


def setting(*, default: bool = False, **settings: object) -> Setting:
    """The loss with settings over its own defaults."""
    return Setting(
        f"grpo_compute_loss/{label(**settings) or 'alone'}",
        f"{CALLS}:grpo",
        settings,
        {"sampler": "both", "group_size": 2, "timeout": 300},
        depth="loss",
        default=default,
        source=SOURCE,
        note=ALONE,
    )


ADAPTER = Adapter(
    name="unsloth-zoo",
    distribution="unsloth_zoo",
    version="2026.10.9",
    installs=(
        ("--no-deps", "unsloth_zoo=={version}"),
        ("transformers>=4.57.6,<=5.17.0", "datasets>=3.4.1,<5,!=4.4.*,!=4.5.0"),
    ),
    module="unsloth_zoo",
    homepage="https://github.com/unslothai/unsloth-zoo",
    settings=(
        setting(default=True),
        *(setting(loss_type=name) for name in TYPES[1:]),
        setting(loss_type="dr_grpo", max_completion_length=1),
        setting(use_bias_correction_kl=True),
        setting(use_bias_correction_kl=True, loss_type="luspo"),
        setting(use_bias_correction_kl=True, importance_sampling_level="sequence", loss_type="luspo"),
        setting(importance_sampling_level="sequence"),
        setting(with_old=False),
        Setting(
            "grpo_compute_loss/charged",
            f"{CALLS}:with_charged_advantages",
            options={"sampler": "both", "group_size": 2, "timeout": 300},
            depth="loss",
            recipe=True,
            source=SOURCE,
            note="Advantages are charged; it costs the variance of k1 over sequences, and off-policy of their ratio.",
        ),
    ),
    standalone=program,
)
