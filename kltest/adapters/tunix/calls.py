"""`grpo_loss_fn` compiled; in a module of its own, since what a loss's module keeps between calls is reset with it."""

from kltest.adapters.installed import called, part

PAD, END = -1, -2


def table(logits):
    """A model that returns these logits after a prompt of one token, whatever the tokens are."""
    import jax.numpy as jnp
    from flax import nnx

    class Table(nnx.Module):
        def __init__(self, logits):
            self.logits = nnx.Param(logits)

        def __call__(self, tokens, positions=None, cache=None, attention_mask=None):
            logits = self.logits[...]
            return jnp.concatenate([logits, jnp.zeros_like(logits[:, :1])], axis=1), cache

    return Table(logits)


def example(old_logp, ref_logp, mask, tokens, advantage):
    """A training example after a prompt of one token."""
    import jax.numpy as jnp

    offered = {
        "prompt_ids": jnp.zeros_like(tokens[:, :1]),
        "prompt_mask": jnp.ones_like(mask[:, :1]),
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": advantage,
        "ref_per_token_logps": ref_logp,
        "old_per_token_logps": old_logp,
    }
    return called(part("tunix.rl.common", "TrainExample"), offered)


def advantages(reward, group, estimator):
    """What a registered estimator makes of rewards; the learner hands it those of one prompt after another."""
    import numpy as np

    rewards, groups = np.asarray(reward), np.asarray(group)
    order = np.argsort(groups, kind="stable")
    function = part("tunix.rl.function_registry", "get_advantage_estimator")(estimator)
    found = np.empty_like(rewards)
    found[order] = function(rewards=rewards[order], num_generations=len(groups) // len(np.unique(groups)))
    return found


def compiled(recipe, with_old, beta, settings):
    """`grpo_loss_fn` as a function of arrays, compiled once for settings, as the trainer compiles it."""
    import jax

    known = compiled.__dict__.setdefault("known", {})
    asked = recipe, with_old, beta, settings
    if asked in known:
        return known[asked]

    whole = part("tunix.rl.algo_core", "grpo_loss_fn")
    if recipe:
        whole = part("kltest.adapters.tunix.recipes", "sequence_kl_loss_fn")
    config = called(part("tunix.rl.grpo.grpo_learner", "GRPOConfig"), {}, {"beta": beta, **dict(settings)})
    if not hasattr(config, "temperature"):
        # The learner writes the rollout's temperature onto the configuration.
        object.__setattr__(config, "temperature", 1.0)

    def loss(logits, old_logp, ref_logp, mask, tokens, advantage):
        batch = example(old_logp if with_old else None, ref_logp, mask, tokens, advantage)
        offered = {"model": table(logits), "train_example": batch, "algo_config": config, "pad_id": PAD, "eos_id": END}
        return called(whole, offered)

    known[asked] = jax.jit(loss)
    return known[asked]
