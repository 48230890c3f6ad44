"""Liger-Kernel: the KL as a cost in the advantages, which follows ∇KL(π‖ref) of whole sequences.

with torch.no_grad():  # the policy's log-probs of the sampled tokens
    logps = selective_log_probs(hidden, weight, tokens)
advantages = charged(advantages, logps, ref_logps, old_logps, attention_mask, beta)
loss, _ = LigerFusedLinearGRPOLoss(**SETTINGS)(hidden, weight, tokens, attention_mask, advantages)
"""

# No KL term in the loss; tokens are summed, sequences averaged. No old log-probs: the ratio is in the advantages.
SETTINGS = {"beta": 0.0, "use_ref_model": False, "loss_type": "dr_grpo", "max_completion_length": 1}


def charged(advantages, logps, ref_logps, old_logps, attention_mask, beta):
    """(B,) ρ·(A − β·Σu), with u = log π − log ref and ρ = π(y)/μ(y) of the whole sequence.

    It needs the policy's log-probs before the loss, a pass without gradient. Nothing is clipped: the variance is that
    of the sequence ratio, which is 1 if the rollouts are the policy's own.
    """
    live = attention_mask.bool()
    log_ratio = (logps - ref_logps).where(live, 0.0).sum(-1)
    ratio = (logps - old_logps).where(live, 0.0).sum(-1).exp()
    return (ratio * (advantages - beta * log_ratio)).detach()
