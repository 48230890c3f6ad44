"""verl's KL loss, its whole actor loss, with distillation too, and its KL in the reward with its policy loss."""

import dataclasses
import importlib
import inspect
import types

from kltest.adapters.installed import called, part

CORE = "verl.trainer.ppo.core_algos"
# What the command line takes where nothing is set.
DISTILLATION = "distillation/distillation.yaml"


def actor(settings):
    """The actor's configuration at its documented defaults, with settings."""
    kind = early("verl.workers.config", "ActorConfig", None)
    if kind is None:
        return types.SimpleNamespace(**{"loss_agg_mode": "token-mean", **settings})
    return called(kind, {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}, settings)


def early_algorithm(adv_estimator, norm_adv_by_std_in_grpo=True):
    """The algorithm's configuration before it had a class."""
    names = {"adv_estimator": adv_estimator, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    found = types.SimpleNamespace(**names, gamma=1.0, lam=1.0)
    found.get = lambda name, otherwise=None: getattr(found, name, otherwise)
    return found


def early(module, names, instead):
    """A part of a module, or what early versions have instead of it."""
    try:
        return part(module, names)
    except LookupError:
        return instead


def computed(live, *log_probs):
    """Log-probs as verl computes them from packed tokens, with zeros at padding."""
    torch = importlib.import_module("torch")
    return [torch.where(live, values, 0.0) for values in log_probs]


def kl_loss(logp, ref_logp, mask, kl_penalty, loss_agg_mode):
    """The KL loss that an actor adds to its policy loss: `kl_penalty`, aggregated by `agg_loss`."""
    live = mask.bool()
    logp, ref_logp = computed(live, logp, ref_logp)
    per_token = part(CORE, "kl_penalty")(logprob=logp, ref_logprob=ref_logp, kl_penalty=kl_penalty)
    offered = {"loss_mat": per_token, "loss_mask": live}
    loss = called(part(CORE, "agg_loss"), offered, {"loss_agg_mode": loss_agg_mode})
    return loss, {"kl": loss.detach()}


def packed(values, live):
    """A (B, T) field as the nested tensor of its live tokens."""
    torch = importlib.import_module("torch")
    return torch.nested.as_nested_tensor(
        [row[kept] for row, kept in zip(values, live, strict=True)], layout=torch.jagged
    )


def packed_batch(live, tokens, advantage, **fields):
    """One mini-batch in one micro-batch: (B, T) fields come packed, after a prompt of one token, and may be nested."""
    rows = {
        "prompts": packed(tokens.new_ones(len(tokens), 1), live.new_ones(len(live), 1)),
        "responses": packed(tokens, live),
        "response_mask": packed(live.long(), live),
        "advantages": packed(advantage[:, None] * live, live),
        **{name: values if values.is_nested else packed(values, live) for name, values in fields.items()},
    }
    data = part("tensordict", "TensorDict")(rows, batch_size=len(live))
    batch = {"dp_size": 1, "batch_num_tokens": int(live.sum()), "global_batch_size": len(live)}
    part("verl.utils.tensordict_utils", "assign_non_tensor")(data, **batch)
    return data


def before(values, live):
    """(B, T, …) values of tokens at the positions before them, packed behind the prompt; the last one is unused."""
    torch = importlib.import_module("torch")
    everywhere = torch.arange(live.shape[1] + 1) <= live.sum(1, keepdim=True)
    return packed(torch.cat([values, torch.zeros_like(values[:, :1])], dim=1), everywhere)


def ppo_loss(logp, old_logp, ref_logp, mask, tokens, advantage, beta, **settings):
    """`ppo_loss` whole; log-probs come packed."""
    live = mask.bool()
    data = packed_batch(live, tokens, advantage, old_log_probs=old_logp, ref_log_prob=ref_logp)
    config = actor({"use_kl_loss": True, "kl_loss_coef": beta, **settings})
    offered = {"config": config, "model_output": {"log_probs": before(logp, live)}, "data": data}
    loss, metrics = called(part("verl.workers.utils.losses", "ppo_loss"), offered)
    logged = [value for name, value in metrics.items() if name.endswith("kl_loss")]
    return loss, {"kl": getattr(logged[0], "values", logged)[0]} if logged else {}


def distilled(
    logp, logits, old_logp, ref_logp, ref_logits, mask, tokens, advantage, beta, loss_mode=None, topk=None, **settings
):
    """`distillation_ppo_loss` whole, at the defaults of the command line; the reference is the teacher.

    beta is `distillation_loss_coef`, and `topk` the number of the teacher's log-probs, of the sampled token if None.
    """
    module, live = "verl.trainer.distillation.losses", mask.bool()
    defaults = importlib.import_module("yaml").safe_load(written("verl.trainer.config", DISTILLATION))
    named = {"loss_mode": loss_mode, "topk": topk, **settings, "distillation_loss_coef": beta}
    values = {**defaults["distillation_loss"], **{name: value for name, value in named.items() if value is not None}}
    values.pop("_target_")
    loss = called(part("verl.workers.config", "DistillationLossConfig"), {}, values)
    config, distillation = actor({}), types.SimpleNamespace(distillation_loss=loss)
    given, output = {"teacher_logprobs": before(ref_logp[..., None], live)}, {"log_probs": before(logp, live)}
    if topk:
        top = ref_logits.log_softmax(-1).topk(topk, dim=-1)
        given = {"teacher_logprobs": before(top.values, live), "teacher_ids": before(top.indices, live)}
    data = packed_batch(live, tokens, advantage, old_log_probs=old_logp, **given)
    if topk:
        student = before(logits, live)
        offered = {"config": config, "distillation_config": distillation, "data": data, "data_format": "thd"}
        offered["student_logits"] = student.values()[None]
        found = called(part(module, "compute_topk_loss"), offered)
        nested = importlib.import_module("torch").nested.nested_tensor_from_jagged
        output |= {name: nested(values[0], offsets=student.offsets()) for name, values in found.items()}
    offered = {"config": config, "distillation_config": distillation, "model_output": output, "data": data}
    return called(part(module, "distillation_ppo_loss"), offered)[0]


def written(module, file):
    """The text of a file beside a module."""
    return importlib.import_module("pathlib").Path(part(module, "__file__")).parent.joinpath(file).read_text()


def kl_in_reward(logp, old_logp, ref_logp, mask, reward, group, beta, adv_estimator, tensors=(), **settings):
    """`apply_kl_penalty`, an advantage estimator, and the policy loss, from one batch.

    A critic's values and the rewards of greedy rollouts are zeros if an estimator needs them; `tensors` are what else
    it needs. `settings` are those of `apply_kl_penalty`, of the algorithm's and of the actor's configuration;
    `loss_mode` names a policy loss.
    """
    torch, numpy = importlib.import_module("torch"), importlib.import_module("numpy")
    trainer = "verl.trainer.ppo.ray_trainer"
    penalty, loss_mode = settings.pop("kl_penalty", "kl"), settings.pop("loss_mode", "vanilla")
    corrected = settings.pop("rollout_correction", None)
    kind = early("verl.trainer.config", "AlgoConfig", None)
    names = {field.name for field in dataclasses.fields(kind)} if kind else {"norm_adv_by_std_in_grpo"}
    asked = {name: settings.pop(name) for name in list(settings) if name in names}
    algorithm = called(kind or early_algorithm, {"adv_estimator": adv_estimator}, asked)

    logp, old_logp, ref_logp = computed(mask.bool(), logp, old_logp, ref_logp)
    last = mask.long().sum(1, keepdim=True) - 1
    scores = torch.zeros_like(ref_logp).scatter_(1, last, reward[:, None].to(ref_logp.dtype))
    # With a rollout correction the trainer computes its own log-probs before it updates.
    old, rollouts = (old_logp, {}) if corrected is None else (logp.detach(), {"rollout_log_probs": old_logp})
    tensors = {
        "old_log_probs": old,
        "ref_log_prob": ref_logp,
        "response_mask": mask.long(),
        # Early versions read lengths from these.
        "responses": mask.long(),
        "attention_mask": mask.long(),
        "token_level_scores": scores,
        "values": torch.zeros_like(ref_logp),
        **rollouts,
        **dict(tensors),
    }
    estimator = part(CORE, "get_adv_estimator_fn")(adv_estimator)
    if "reward_baselines" in inspect.signature(estimator).parameters:
        # The trainer computes baselines for these estimators only, but passes them to any.
        tensors["reward_baselines"] = torch.zeros_like(reward)
    uid = numpy.array([str(int(each)) for each in group], dtype=object)
    data = part("verl", "DataProto").from_dict(tensors=tensors, non_tensors={"uid": uid})
    charge = {"data": data, "kl_ctrl": part(CORE, "FixedKLController")(kl_coef=beta)}
    data, metrics = called(part(trainer, "apply_kl_penalty"), charge, {"kl_penalty": penalty})
    if corrected is not None:
        helper = "verl.trainer.ppo.rollout_corr_helper"
        correction = part("verl.trainer.config.algorithm", "RolloutCorrectionConfig")(**corrected)
        data, _ = part(helper, "compute_rollout_correction_and_add_to_batch")(data, correction)
    offered = {
        "data": data,
        "adv_estimator": adv_estimator,
        "norm_adv_by_std_in_grpo": getattr(algorithm, "norm_adv_by_std_in_grpo", True),
        "config": algorithm,
    }
    data = called(part(trainer, "compute_advantage"), offered)
    config = actor(settings)
    offered = {
        "old_log_prob": data.batch["old_log_probs"],
        "log_prob": logp,
        "advantages": data.batch["advantages"],
        "response_mask": data.batch["response_mask"].bool(),
        "loss_agg_mode": config.loss_agg_mode,
        "config": config,
        "rollout_is_weights": data.batch.get("rollout_is_weights", None),
    }
    if early(CORE, "compute_policy_loss_vanilla", None):
        loss = called(part(CORE, "get_policy_loss_fn")(loss_mode), offered)
    else:
        # The actor passed the clip of its configuration.
        loss = called(part(CORE, "compute_policy_loss"), {**offered, "cliprange": 0.2})
    logged = [value for name, value in metrics.items() if name.endswith("reward_kl_penalty")]
    return (loss[0] if isinstance(loss, tuple) else loss), {"kl": logged[0]} if logged else {}


def kl_in_reward_with_probabilities(
    logp, old_logp, old_logits, ref_logp, mask, reward, group, beta, adv_estimator, **settings
):
    """`kl_in_reward` for estimators that weigh tokens by the sum of squared probabilities."""
    squares = {"sum_pi_squared": old_logits.detach().softmax(-1).square().sum(-1)}
    return kl_in_reward(logp, old_logp, ref_logp, mask, reward, group, beta, adv_estimator, squares, **settings)
