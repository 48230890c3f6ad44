"""verl: settings with which the KL in the reward follows ∇KL(π‖ref) of whole sequences, on- and off-policy.

The reward is charged with log π − log ref, from log-probs computed anew before the update. Every token gets the whole
return minus the mean of the other rollouts of its prompt. Tokens are summed and sequences averaged. Rollouts of another
policy (an older one, or the inference engine's) are weighted by the ratio of whole sequences, cut off at a million.
There is one update a batch (`ppo_epochs=1`, mini-batches as large as the batch): in a second one the reward would hold
the log-probs of an older policy. The price is the variance of the sequence ratio, and of k1 over sequences.
"""

# Overrides of verl's command line. There must be more than one rollout a prompt.
OVERRIDES = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.adv_estimator": "rloo",
    "algorithm.rollout_correction.rollout_is": "sequence",
    "algorithm.rollout_correction.rollout_is_threshold": 1e6,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum",
    "actor_rollout_ref.actor.ppo_epochs": 1,
}
