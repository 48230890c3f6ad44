"""tunix: a policy loss whose KL follows ∇KL(π‖ref) of whole sequences, on- and off-policy.

    import tunix_sequence_kl  # this file, before the learner is made
    GRPOConfig(policy_loss_fn="grpo-sequence-kl", beta=0.04)

Advantages are charged with β·Σ(log π − log ref) and weighted by the ratio of policy and sampler over the whole
sequence, tokens are summed and sequences averaged; the rest is the library's own loss. The price: one more forward pass
without gradient, the variance of k1 over sequences, and off-policy the variance of a sequence ratio, which replaces the
clipped token ratios.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import algo_core, common, function_registry


def sequence_kl_loss_fn(model, train_example, algo_config, pad_id, eos_id, **kwargs):
    """`grpo_loss_fn` with ρ·(A − β·Σu) for the advantages, and E[ρ·Σu] for the logged "kl"."""
    graphdef, state = nnx.split(model)
    new = common.compute_per_token_logps(
        graphdef,
        state,
        prompt_tokens=train_example.prompt_ids,
        completion_tokens=train_example.completion_ids,
        pad_id=pad_id,
        eos_id=eos_id,
        temperature=algo_config.temperature,
    )
    new = jax.lax.stop_gradient(new[0] if isinstance(new, tuple) else new)
    live = train_example.completion_mask > 0
    old, ref = train_example.old_per_token_logps, train_example.ref_per_token_logps
    weight = 1.0 if old is None else jnp.exp(jnp.where(live, new - old, 0.0).sum(-1))
    log_ratio = jnp.where(live, new - ref, 0.0).sum(-1)
    charged = dataclasses.replace(
        train_example,
        advantages=weight * (train_example.advantages - algo_config.beta * log_ratio),
        old_per_token_logps=None,
    )
    config = copy.copy(algo_config)
    config.beta, config.loss_agg_mode = 0.0, "seq-mean-token-sum"
    loss, metrics = algo_core.grpo_loss_fn(model, charged, config, pad_id, eos_id, **kwargs)
    return loss, {**metrics, "kl": (weight * log_ratio).mean()}


function_registry.register_policy_loss_fn("grpo-sequence-kl")(sequence_kl_loss_fn)
