"""AReaL: PPO's KL in the reward, and the KL to a teacher in `grpo_loss_fn`."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

from kltest.adapters import SCORES, STEP_OF_TOKENS, Adapter, Setting
from kltest.adapters.installed import loaded
from kltest.adapters.standalone import program

MODULE = "areal.trainer.ppo.actor"
SOURCE = "https://github.com/inclusionAI/AReaL/blob/main/areal/api/cli_args.py"


def actor_loss(actor, logp, data):
    """`grpo_loss_fn` at its configuration's defaults; its statistics are not kept."""
    with mock.patch.object(actor, "stats_tracker", mock.MagicMock()):
        return actor.grpo_loss_fn(logp, logp, data, eps_clip=0.2, eps_clip_higher=None, c_clip=None)


def distilled(logp, old_logp, ref_logp, mask, advantage, beta, rl_loss_weight=1.0):
    """`grpo_loss_fn` with a teacher, which is the reference; beta is `distill_loss_weight`."""
    data = {"logprobs": old_logp, "prox_logp": old_logp, "teacher_logp": ref_logp, "loss_mask": mask}
    data |= {"advantages": advantage[:, None].expand_as(logp), "rl_loss_weight": rl_loss_weight}
    return actor_loss(loaded(MODULE), logp, {**data, "distill_loss_weight": beta})


def kl_in_reward(logp, old_logp, ref_logp, mask, reward, beta, kl_estimator="k1"):
    """`PPOActor.compute_advantages` and `grpo_loss_fn`; a column in front stands for the prompt."""
    actor, columns = loaded(MODULE), [0, *range(mask.shape[1])]
    config = {"overlong_reward_penalty": False, "use_decoupled_loss": False, "recompute_logprob": False}
    usual = {"reward_bias": 0.0, "reward_scaling": 1.0, "reward_clip": 20.0, "reward_norm": None, "adv_norm": None}
    usual |= {"discount": 1.0, "gae_lambda": 1.0, "mask_no_eos_with_zero": False}
    estimator = actor.KLEstimator(kl_estimator)
    stand_in = SimpleNamespace(**usual, config=SimpleNamespace(**config), kl_ctl=beta, kl_estimator=estimator)
    prompt = mask[:, :1] * 0
    live, sampled, ref = mask[:, columns], old_logp[:, columns].clone(), ref_logp.roll(0)
    live[:, :1], attended = prompt, live.clone()
    attended[:, :1] = 1
    data = {"input_ids": live, "attention_mask": attended, "loss_mask": live, "logprobs": sampled}
    data |= {"rewards": reward.clone(), "ref_logp": ref[:, [*columns[1:], 0]].clone()}
    data = actor.PPOActor._compute_advantages(stand_in, data)
    width = mask.shape[1]
    return actor_loss(actor, logp, {name: value[:, :width] for name, value in data.items() if value.ndim == 2})


REWARD = Setting.of(kl_in_reward, options=STEP_OF_TOKENS, source=SOURCE, policy=SCORES, ascends="reinforce")
TEACHER = Setting.of(
    distilled, name="teacher", options=STEP_OF_TOKENS, source=SOURCE, note="The reference is the teacher."
)

ADAPTER = Adapter(
    name="areal",
    distribution="areal",
    version="1.0.4",
    installs=(("--no-deps", "areal=={version}", "colorlog"),),
    module="areal",
    homepage="https://github.com/inclusionAI/AReaL",
    settings=(
        REWARD.by_default("areal.api.cli_args:PPOConfig.ref"),
        TEACHER.by_default("areal.api.cli_args:PPOConfig.teacher"),
        TEACHER.variant({"rl_loss_weight": 0}),
    ),
    loads=partial(loaded, MODULE),
    standalone=program,
)
