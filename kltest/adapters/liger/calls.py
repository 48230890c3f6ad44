"""Liger-Kernel's GRPO losses: from log-probs, and fused with the linear layer from hidden states."""

import importlib

from kltest.adapters.installed import called, costly, part
from kltest.adapters.liger.recipes import SETTINGS, charged

MODULE = "liger_kernel.chunked_loss.grpo_loss"


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


costly(ppo_loss_fn, fused, fused_with_charged_advantages)
