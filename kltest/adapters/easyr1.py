"""EasyR1, a fork of verl: its KL in the reward, its KL loss, and `compute_kl` by every estimator."""

from types import SimpleNamespace

from kltest.adapters import SCORES, STEP, Adapter, Setting
from kltest.adapters.installed import found

COMMIT = "b44b311b66"
HOME = "https://github.com/hiyouga/EasyR1"
SOURCE = f"{HOME}/blob/{COMMIT}/verl/trainer/config.py"
ALGORITHMS = "verl.trainer.core_algos"
TRAINER = "verl.trainer.ray_trainer"
# Modules that it imports and these functions do not use.
UNUSED = ("transformers",)
KINDS = ("kl", "abs", "mse", "low_var_kl")


def kl_loss(logp, ref_logp, mask, kl_penalty="kl", loss_avg_mode="token"):
    """`compute_kl` and `average_loss`, as the actor calls them with `use_kl_loss`."""
    kl = found(ALGORITHMS, "compute_kl")(log_probs=logp, ref_log_probs=ref_logp, kl_penalty=kl_penalty)
    loss = found(ALGORITHMS, "average_loss")(kl, mask, mode=loss_avg_mode)
    return loss, {"kl": loss.detach()}


def kl_in_reward(logp, old_logp, ref_logp, mask, reward, group, beta):
    """`apply_kl_penalty`, `compute_advantage` and `compute_policy_loss` of one batch; the defaults of its actor."""

    class Rows(dict):
        batch_size = (len(mask),)

    scores = ref_logp.new_zeros(mask.shape).scatter(1, mask.long().sum(1, keepdim=True) - 1, reward[:, None])
    rows = Rows(old_log_probs=old_logp, ref_log_probs=ref_logp, response_mask=mask, token_level_scores=scores)
    data = SimpleNamespace(batch=rows, non_tensor_batch={"uid": group.tolist()})
    control = found(ALGORITHMS, "FixedKLController")(init_kl_coef=beta)
    data, metrics = found(TRAINER, "apply_kl_penalty", UNUSED)(data, control)
    found(TRAINER, "compute_advantage", UNUSED)(data, "grpo")
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0}
    actor = {**clips, "tau_positive": 1.0, "tau_negative": 1.05, "loss_type": "default", "loss_avg_mode": "token"}
    loss = found(ALGORITHMS, "compute_policy_loss")(old_logp, logp, rows["advantages"], mask, **actor)[0]
    return loss, {"kl": metrics["actor/kl_penalty"]}


FUNCTION = Setting.of(f"{ALGORITHMS}:compute_kl", {"log_probs": "@logp", "ref_log_probs": "@ref_logp"}, source=SOURCE)
LOSS = Setting.of(kl_loss, source=SOURCE)
ADAPTER = Adapter.cloned(
    "easyr1",
    HOME,
    COMMIT,
    ALGORITHMS,
    module=ALGORITHMS,
    settings=(
        Setting.of(kl_in_reward, options=STEP, source=SOURCE, policy=SCORES, ascends="dapo").by_default(
            "verl.trainer.config:AlgorithmConfig.kl_coef"
        ),
        LOSS.variant(name="defaults", note="`use_kl_loss` is on, and nothing else is set."),
        *(LOSS.variant({"kl_penalty": "low_var_kl", "loss_avg_mode": mode}) for mode in ("token", "seq")),
        *(FUNCTION.variant({"kl_penalty": kind}, kind) for kind in KINDS),
    ),
)
