"""OpenRLHF: a KL loss that follows ∇KL(π‖ref) of whole sequences, from rollouts of the policy or of an older one.

In `openrlhf/trainer/ray/ppo_actor.py`, with `--algo.kl.use_loss`, instead of `compute_approx_kl` and `aggregate_loss`:

    kl = sequence_kl(action_log_probs, base_action_log_probs, old_action_log_probs, experience.action_mask)
    kl_loss = aggregate_loss(kl, experience.action_mask, **sums_over_tokens(loss_batch_info))
"""


def sequence_kl(log_probs, log_probs_base, log_probs_old, action_mask):
    """(B, T) terms that are summed over tokens and averaged over sequences.

    With u = log π − log ref and ρ = π(y)/μ(y) of the whole sequence, both detached where they are weights: the value of
    a token is ρ·u_t, whose sum has the mean KL(π‖ref); the weight on ∇log π is ρ·Σu for every token, whose mean is
    ∇KL(π‖ref). Nothing is clipped: the variance is that of the sequence ratio.
    """
    live = action_mask.bool()
    log_ratio = (log_probs - log_probs_base).where(live, 0.0)
    ratio = (log_probs - log_probs_old).where(live, 0.0).sum(-1, keepdim=True).exp()
    value = (ratio * log_ratio).detach()
    followed = (ratio * log_ratio.sum(-1, keepdim=True)).detach() * log_ratio
    return value + followed - followed.detach()


def sums_over_tokens(loss_batch_info):
    """The totals of a step with which `aggregate_loss` sums over tokens and averages over sequences."""
    return {**loss_batch_info, "batch_num_tokens": loss_batch_info["global_batch_size"]}
