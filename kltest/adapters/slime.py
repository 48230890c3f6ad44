"""slime: its KL function, and a whole step from log-probs: KL in the loss, in the reward, on-policy distillation."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kltest.adapters import STEP, STEP_OF_TOKENS, Adapter, Setting, label
from kltest.adapters.installed import found, loaded, packed

COMMIT = "624b824a89"
HOME = "https://github.com/THUDM/slime"
SOURCE = f"{HOME}/blob/{COMMIT}/slime/utils/arguments.py"
LOSSES = "slime.backends.megatron_utils.loss"
# Arguments of the command line at their defaults, with each KL term switched on and without a coefficient.
USUAL = {
    **{"loss_type": "policy_loss", "advantage_estimator": "grpo", "kl_loss_type": "k1"},
    **{"gamma": 1.0, "rollout_top_p": 1.0},
    **{"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "entropy_coef": 0.0, "opd_type": "megatron"},
    **dict.fromkeys(("use_kl_loss", "use_opd"), True),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "opd_kl_coef"), 0.0),
    **dict.fromkeys(("use_unbiased_kl", "use_rollout_logprobs", "use_opsm", "use_tis", "get_mismatch_metrics"), False),
    **dict.fromkeys(("calculate_per_token_loss", "normalize_advantages", "recompute_loss_function"), False),
    **dict.fromkeys(("rewards_normalization", "grpo_std_normalization"), True),
    **dict.fromkeys(("allgather_cp", "custom_advantage_function_path"), None),
}


def step(logp, old_logp, ref_logp, mask, advantage, beta, coefficient="kl_loss_coef", **settings):
    """`compute_advantages_and_returns` and `loss_function` on one device; beta is the argument `coefficient`.

    The reference is the teacher as well. `settings` are arguments of the command line.
    """
    losses = loaded(LOSSES)
    if unknown := settings.keys() - USUAL.keys():
        raise LookupError(f"no argument {sorted(unknown)[0]!r} is known here, which this setting is about")
    arguments = SimpleNamespace(**{**USUAL, **settings, coefficient: beta})
    new, old, ref, live = (packed(each, mask) for each in (logp, old_logp, ref_logp, mask.to(logp.dtype)))
    lengths = [len(row) for row in live]
    batch = {
        **{"log_probs": old, "ref_log_probs": ref, "teacher_log_probs": ref, "rewards": advantage.tolist()},
        **{"loss_masks": live, "rollout_mask_sums": [row.sum() for row in live], "unconcat_tokens": live},
        **{"total_lengths": lengths, "response_lengths": lengths},
    }
    scored = None, {"log_probs": new, "entropy": [row.detach() * 0 for row in new]}
    one = {"get_context_parallel_world_size": lambda: 1, "get_data_parallel_world_size": lambda **_: 1}
    device = SimpleNamespace(**one, get_context_parallel_rank=lambda: 0, is_pipeline_last_stage=lambda: True)
    device.get_context_parallel_group = lambda: None
    with (
        mock.patch.object(losses, "mpu", device),
        mock.patch.object(loaded("slime.backends.megatron_utils.cp_utils"), "mpu", device),
        mock.patch.object(losses, "get_log_probs_and_entropy", return_value=scored),
    ):
        losses.compute_advantages_and_returns(arguments, batch)
        loss, tokens, logged = losses.loss_function(arguments, batch, 1, len(live), logp)
    of_rollouts = tokens if arguments.calculate_per_token_loss else len(live)
    kl = dict(zip(logged["keys"], logged["values"][1:], strict=True))["kl_loss"] / of_rollouts
    return loss / tokens, {"kl": kl} if coefficient == "kl_loss_coef" else {}


def scored(logp, old_logp, ref_logp, mask, reward, group, beta, **settings):
    """`RolloutManager._post_process_rewards`, which computes in float32, and `step`; rollouts of a prompt follow."""
    order, prompts = group.argsort(stable=True), len(group.unique())
    given = {**USUAL, **settings, "rollout_batch_size": prompts, "n_samples_per_prompt": len(group) // prompts}
    if given["n_samples_per_prompt"] == 1:  # as its arguments are validated
        given["grpo_std_normalization"] = False
    samples = [SimpleNamespace(get_reward_value=lambda _, value=value: value) for value in reward[order].tolist()]
    manager = SimpleNamespace(args=SimpleNamespace(**given), custom_reward_post_process_func=None)
    rewards = found("slime.ray.rollout", "RolloutManager")._post_process_rewards(manager, samples)[1]
    advantage = reward.new_tensor(rewards)[order.argsort()]
    return step(logp, old_logp, ref_logp, mask, advantage, beta, **settings)[0]


LOSS = Setting.of(step, name="kl_loss", options=STEP, source=SOURCE, policy=(f"{__name__}:scored", {}))
OPD = Setting.of(
    step,
    {"coefficient": "opd_kl_coef"},
    name="opd",
    options=STEP,
    source=SOURCE,
    note="On-policy distillation: the reference is the teacher.",
)
FUNCTION = Setting.of(
    "slime.utils.ppo_utils:compute_approx_kl", {"log_probs": "@logp", "log_probs_base": "@ref_logp"}, source=SOURCE
)


def loss(kind: str, options: Mapping[str, Any] = STEP, ascends: str | None = None, **settings: object) -> Setting:
    """The KL in the loss, by its type and other arguments."""
    return LOSS.variant({"kl_loss_type": kind, **settings}, label(kind, **settings), options=options, ascends=ascends)


ADAPTER = Adapter.cloned(
    "slime",
    HOME,
    COMMIT,
    LOSSES,
    module="slime.utils.ppo_utils",
    imports=("torch._dynamo",),
    settings=(
        LOSS.by_default("slime.utils.arguments:--use-kl-loss", ascends="grpo"),
        *(loss(kind) for kind in ("k2", "low_var_kl")),
        *(loss(kind, use_unbiased_kl=True) for kind in ("k1", "low_var_kl")),
        loss("low_var_kl", STEP_OF_TOKENS, "dapo", calculate_per_token_loss=True),
        loss("low_var_kl", ascends="grpo-without-std", grpo_std_normalization=False),
        *(loss("low_var_kl", ascends=name, advantage_estimator=name) for name in ("gspo", "cispo")),
        OPD.by_default("slime.utils.arguments:--use-opd"),
        LOSS.variant({"coefficient": "kl_coef"}, "kl_coef,advantage_estimator=grpo"),
        *(FUNCTION.variant({"kl_loss_type": kind}, kind) for kind in ("k1", "k2", "low_var_kl")),
    ),
)
