"""verl: settings with which the KL in the reward follows ∇KL(π‖ref) of whole sequences, on- and off-policy.

The reward is charged with log π − log ref of log-probs that are computed anew before the update; every token gets the
whole return, minus the mean of the other rollouts of its prompt; tokens are summed, sequences averaged; rollouts of
another policy (an older one, or the inference engine's) are weighted by the ratio of whole sequences, cut off where it
would be a million. One update a batch (`ppo_epochs=1`, mini-batches as large as the batch): a second one would follow a
policy that the reward does not know. The price is the variance of the sequence ratio, and of k1 over sequences.
"""

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
"""As on verl's command line; beside them the number of rollouts a prompt is to be more than one."""
