"""OpenRLHF's KL loss, and its KL in the reward with the experience maker's advantages and the policy loss."""

import importlib
import types

from kltest.adapters.installed import called, costly, found, loaded
from kltest.adapters.openrlhf.recipes import sequence_kl, sums_over_tokens


def totals(mask):
    """The totals of a batch that is one step of the optimizer on one device."""
    return {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": (mask.sum(-1) > 0).sum()}


def aggregated(per_token, mask, **more):
    """The loss of a step, which is what is logged as well; early versions take `masked_mean` for it."""
    if hasattr(loaded("openrlhf.models.loss"), "aggregate_loss"):
        loss = called(found("openrlhf.models.loss", "aggregate_loss"), {"loss": per_token, "loss_mask": mask, **more})
    else:
        loss = called(found("openrlhf.models.utils", "masked_mean"), {"tensor": per_token, "mask": mask})
    return loss, {"kl": loss.detach()}


def kl_loss(logp, ref_logp, old_logp, mask, token_level_loss=True, **settings):
    """The KL loss of the actor's training step: `compute_approx_kl`, aggregated by `aggregate_loss`."""
    offered = {"log_probs": logp, "log_probs_base": ref_logp, "log_probs_old": old_logp}
    per_token = called(found("openrlhf.models.utils", "compute_approx_kl"), offered, settings)
    return aggregated(per_token, mask, token_level_loss=token_level_loss, **totals(mask))


def sequence_kl_loss(logp, ref_logp, old_logp, mask):
    """The recipe: a KL loss of whole sequences, aggregated by `aggregate_loss`."""
    return aggregated(sequence_kl(logp, ref_logp, old_logp, mask), mask, **sums_over_tokens(totals(mask)))


def kl_in_reward(logp, old_logp, ref_logp, mask, reward, group, beta, estimator, kl_estimator="k1", **settings):
    """`compute_approx_kl` of the sampler's log-probs in the reward, the experience maker's advantages, `PolicyLoss`.

    A critic's values are zeros. `settings` are those of `PolicyLoss`.
    """
    torch = importlib.import_module("torch")
    rows, prompts = len(group), len(group.unique())
    if rows == prompts and estimator not in ("gae", "reinforce", "flash_reinforce"):
        raise ValueError(f"{estimator} wants several rollouts a prompt")
    samples = rows // prompts if rows % prompts == 0 else rows
    # Early versions take rollouts of a prompt to follow one another.
    order = group.argsort(stable=True)
    with torch.no_grad():
        offered = {"log_probs": old_logp, "log_probs_base": ref_logp, "kl_estimator": kl_estimator}
        kl = called(found("openrlhf.models.utils", "compute_approx_kl"), offered)
    experience = types.SimpleNamespace(
        index=list(range(rows)),
        rewards=reward[order],
        kl=kl[order],
        action_mask=mask[order].long(),
        values=torch.zeros_like(kl),
        info={"response_length": mask[order].sum(-1)},
    )
    arguments = configured(estimator, samples)
    maker = found("openrlhf.trainer.ppo_utils.experience_maker", "RemoteExperienceMaker")
    stand_in = types.SimpleNamespace(
        strategy=types.SimpleNamespace(args=arguments),
        args=arguments,
        kl_ctl=types.SimpleNamespace(value=beta),
        advantage_estimator=estimator,
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(stand_in, name, types.MethodType(getattr(maker, name), stand_in))
    answer = maker.compute_advantages_and_returns(stand_in, [experience])
    experience = answer[0] if isinstance(answer[0], types.SimpleNamespace) else answer[0][0]

    policy_loss = called(found("openrlhf.models.loss", "PolicyLoss"), {}, settings)
    offered = {
        "log_probs": logp,
        "old_log_probs": old_logp,
        "advantages": experience.advantages[order.argsort()],
        "action_mask": mask,
        "rollout_log_probs": old_logp,
        **totals(mask),
    }
    loss = called(policy_loss.forward, offered)
    return loss[0], {"kl": (kl * mask).sum(-1) / mask.sum(-1)}


def configured(estimator, samples):
    """Arguments of the command line at their defaults, in groups and flat, since versions differ in that."""
    space = types.SimpleNamespace
    return space(
        advantage_estimator=estimator,
        n_samples_per_prompt=samples,
        overlong_buffer_len=None,
        stop_properly_penalty_coef=None,
        reward_clip_range=None,
        gamma=1.0,
        lambd=1.0,
        no_advantage_std_norm=False,
        rollout=space(n_samples_per_prompt=samples),
        reward=space(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        algo=space(advantage=space(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)),
    )


costly(kl_loss, kl_in_reward)
