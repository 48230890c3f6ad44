"""unsloth-zoo: `grpo_compute_loss` by every loss type and the options that change its KL term."""

from kltest.adapters import PAIRS, Adapter, Setting
from kltest.adapters.standalone import program

MODULE = "unsloth_zoo.rl_replacements"
CALLS = "kltest.adapters.unsloth_zoo.calls"
SOURCE = "https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/rl_replacements.py"
ALONE = (
    "The function's own defaults; unsloth's trainer hands on what is set in its configuration. One device, one step."
)
# Without "vespo", which needs a function of TRL that the trainer passes in.
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
LOSS = Setting(
    "grpo_compute_loss",
    f"{CALLS}:grpo",
    options={"sampler": "both", **PAIRS},
    depth="loss",
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
            target=f"{CALLS}:with_charged_advantages",
            recipe=True,
            note="Advantages are charged; it costs the variance of k1 over sequences, and off-policy of their ratio.",
        ),
    ),
    standalone=program,
)
