"""Liger-Kernel: `k3_loss_fn`, the GRPO loss from log-probs by every loss type, and fused with the linear layer."""

from kltest.adapters import PAIRS, Adapter, Setting, label
from kltest.adapters.standalone import program

MODULE = "liger_kernel.chunked_loss.grpo_loss"
CALLS = "kltest.adapters.liger.calls"
DOCUMENTED = "https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/chunked_loss/grpo_loss.py"
# The documented default first.
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
CONSTANT = "A loss type that divides by a constant is given 3 for it, the length of the longest completion here."
LOSS = Setting("ppo_loss_fn", f"{CALLS}:ppo_loss_fn", options=PAIRS, depth="loss", source=DOCUMENTED)
FUSED = Setting("fused", f"{CALLS}:fused", options=PAIRS, depth="loss", source=DOCUMENTED)


def whole(loss_type: str, loss: Setting = LOSS, **settings: object) -> Setting:
    """The whole loss with a loss type and other settings."""
    constant = {"max_completion_length": 3} if loss_type == "dr_grpo" else {}
    return loss.variant(
        {"loss_type": loss_type, **constant, **settings},
        label(loss_type=loss_type, **settings),
        default=loss_type == "dapo" and not settings,
        # The ratio of the others is made of old log-probs: they are graded as they are used, off-policy too.
        options={} if loss_type == "cispo" else {"sampler": "both"},
        note=CONSTANT if constant else "",
    )


ADAPTER = Adapter(
    name="liger",
    distribution="liger-kernel",
    version="0.8.5",
    installs=(("--no-deps", "liger-kernel=={version}"),),
    module=MODULE,
    imports=(MODULE,),
    homepage="https://github.com/linkedin/Liger-Kernel",
    settings=(
        whole("dapo", FUSED),
        *map(whole, LOSS_TYPES),
        Setting(
            "k3_loss_fn/log_p=ref_logp",
            f"{MODULE}:k3_loss_fn",
            {"log_p": "@ref_logp", "log_q": "@logp"},
            source=DOCUMENTED,
            note="Called as the loss calls it: the reference first.",
        ),
        *(whole(name, use_bias_correction_kl=True) for name in ("dapo", "grpo", "dr_grpo", "luspo")),
        *(whole(name, importance_sampling_level="sequence") for name in ("grpo", "luspo")),
        whole("luspo", use_bias_correction_kl=True, importance_sampling_level="sequence"),
        whole("dr_grpo", FUSED),
        whole("dr_grpo", FUSED, use_bias_correction_kl=True),
        FUSED.variant(
            name="kl-in-advantages",
            target=f"{CALLS}:fused_with_charged_advantages",
            options={"sampler": "both", "ignore": "KL502"},
            recipe=True,
            note="The advantages are charged before the loss, after a pass without gradient; it costs the variance of "
            "the ratio of whole sequences. What stands at padding must be finite, as hidden states are (KL502).",
        ),
    ),
    standalone=program,
)
