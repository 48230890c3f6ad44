"""unsloth-zoo: the KL as a cost in the advantages, which follows ∇KL(π‖ref) of whole sequences, on- and off-policy.

    advantages = charged(advantages, new, ref, old, mask, beta)  # log-probs of the sampled tokens, (B, T)
    loss = grpo_compute_loss(None, new, None, None, input_ids, mask, 0.0, advantages, **SETTINGS)[0]

The price is variance: that of k1 over sequences, and off-policy that of an unclipped sequence ratio, which replaces the
clipped ratios of the tokens.
"""

# Tokens are summed, sequences averaged, without a further coefficient.
SETTINGS = {"loss_type": "dr_grpo", "max_completion_length": 1}


def charged(advantages, new, ref, old, mask, beta):
    """(B,) ρ·(A − β·Σu), with u = log π − log ref and ρ = π(y)/μ(y) of the whole sequence; `old` None means ρ = 1."""
    live = mask.bool()
    log_ratio = (new - ref).where(live, 0.0).sum(-1)
    ratio = 1.0 if old is None else (new - old).where(live, 0.0).sum(-1).exp()
    return (ratio * (advantages - beta * log_ratio)).detach()
