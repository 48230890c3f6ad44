"""Liger-Kernel: `k3_loss_fn`, the GRPO loss from log-probs by every loss type, fused, and its distillation."""

import importlib

from kltest.adapters import PAIRS, Adapter, Setting, label
from kltest.adapters.installed import called, part
from kltest.adapters.liger.recipes import SETTINGS, charged
from kltest.adapters.standalone import program

MODULE = "liger_kernel.chunked_loss.grpo_loss"
DOCUMENTED = "https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/chunked_loss/grpo_loss.py"
# Of the newest release, its default first, and the release in which each appeared.
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
SINCE = {
    **{"dapo": "0.6.4", "cispo": "0.7", "sapo": "0.7", "luspo": "0.8", "vespo": "0.8"},
    **{"use_bias_correction_kl": "0.8", "importance_sampling_level": "0.6.3"},
}
CONSTANT = "A loss type that divides by a constant is given 3 for it, the length of the longest completion here."


def ppo_loss_fn(logp, logits, old_logp, ref_logp, ref_logits, tokens, mask, advantage, beta, **settings):
    """`ppo_loss_fn` of the fused function, from log-probs; early versions take the log-probs of all tokens."""
    function = part(MODULE, "LigerFusedLinearGRPOFunction.ppo_loss_fn")
    offered = {
        "per_token_logps": logp,
        "attention_mask": mask,
        "advantages": advantage,
        "full_attention_mask": mask,
        "ref_per_token_logps": ref_logp,
        "old_per_token_logps": old_logp,
        "beta": beta,
        "log_probs": logits,
        "ref_log_probs": ref_logits,
        "selected_token_ids": tokens,
    }
    loss, metrics = called(function, offered, settings)
    return loss, {"kl": metrics[0]} if beta else {}


def fused(logits, old_logp, ref_logits, tokens, mask, advantage, beta, **settings):
    """`LigerFusedLinearGRPOLoss` from hidden states that equal the logits: the linear layer is the identity."""
    torch = importlib.import_module("torch")
    usual = {"beta": beta, "compiled": False, "use_ref_model": True, "chunk_size": len(tokens)}
    loss = called(part(MODULE, "LigerFusedLinearGRPOLoss"), usual, settings)
    weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
    offered = {
        "_input": logits,
        "lin_weight": weight,
        "selected_token_ids": tokens,
        "attention_mask": mask,
        "advantages": advantage,
        "ref_input": ref_logits,
        "ref_weight": weight,
        "old_per_token_logps": old_logp,
    }
    value, metrics = called(loss.forward, offered)
    return value, {"kl": metrics[0]} if beta else {}


def fused_with_charged_advantages(logits, logp, old_logp, ref_logp, tokens, mask, advantage, beta):
    """The recipe: the fused loss without KL and old log-probs, with the KL as a cost in the advantages."""
    advantages = charged(advantage, logp.detach(), ref_logp, old_logp, mask, beta)
    return fused(logits, None, None, tokens, mask, advantages, **SETTINGS)[0]


def distilled(logits, ref_logits, tokens, mask, mixture=0.5):
    """`LigerFusedLinearJSDLoss` from hidden states that equal the logits, of labels alone that are live; no hard loss.

    `mixture` is its beta: 0 for KL(teacher‖policy), 1 for KL(policy‖teacher), else the Jensen-Shannon divergence.
    """
    torch = importlib.import_module("torch")
    settings = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": mixture, "compiled": False}
    loss = part("liger_kernel.chunked_loss.jsd_loss", "LigerFusedLinearJSDLoss")(**settings)
    weight, labels = torch.eye(logits.shape[-1], dtype=logits.dtype), tokens.where(mask != 0, -100)
    return loss(logits.flatten(0, 1), weight, ref_logits.flatten(0, 1), weight, labels.flatten())


LOSS = Setting.of(ppo_loss_fn, options=PAIRS, source=DOCUMENTED, brought=SINCE)
DISTILLED = Setting.of(
    distilled,
    name="distillation",
    source=DOCUMENTED.replace("grpo_loss", "jsd_loss"),
    note="The reference is the teacher, and its part alone is graded: the other half is the loss of the labels.",
    since="0.8",
)
FUSED = Setting.of(fused, options=PAIRS, source=DOCUMENTED, brought=SINCE)


def whole(loss_type: str, loss: Setting = LOSS, **settings: object) -> Setting:
    """The whole loss with a loss type and other settings."""
    constant = {"max_completion_length": 3} if loss_type == "dr_grpo" else {}
    return loss.variant(
        {"loss_type": loss_type, **constant, **settings},
        label(loss_type=loss_type, **settings),
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
    since="0.6",
    history=(
        FUSED.variant(name="nothing-set", default=True),
        whole("grpo"),
        whole("grpo", use_bias_correction_kl=True),
    ),
    imports=(MODULE,),
    homepage="https://github.com/linkedin/Liger-Kernel",
    settings=(
        FUSED.by_default(
            f"{MODULE}:LigerFusedLinearGRPOLoss(beta)", {"loss_type": LOSS_TYPES[0]}, options={"sampler": "both"}
        ),
        *map(whole, LOSS_TYPES),
        Setting.of(
            f"{MODULE}:k3_loss_fn",
            {"log_p": "@ref_logp", "log_q": "@logp"},
            name="k3_loss_fn/log_p=ref_logp",
            source=DOCUMENTED,
            note="Called as the loss calls it: the reference first.",
        ),
        *(whole(name, use_bias_correction_kl=True) for name in ("dapo", "grpo", "dr_grpo", "luspo")),
        *(whole(name, importance_sampling_level="sequence") for name in ("grpo", "luspo")),
        whole("luspo", use_bias_correction_kl=True, importance_sampling_level="sequence"),
        whole("dr_grpo", FUSED),
        whole("dr_grpo", FUSED, use_bias_correction_kl=True),
        DISTILLED.by_default("the loss itself"),
        DISTILLED.variant({"mixture": 0.0}, "beta=0"),
        DISTILLED.variant({"mixture": 1.0}, "beta=1"),
        FUSED.variant(
            name="kl-in-advantages",
            target=f"{__name__}:fused_with_charged_advantages",
            options={"sampler": "both", "ignore": "KL502"},
            recipe=True,
            note="The advantages are charged before the loss, after a pass without gradient; it costs the variance of "
            "the ratio of whole sequences. What stands at padding must be finite, as hidden states are (KL502).",
        ),
    ),
    standalone=program,
)
