"""SkyRL: `compute_approx_kl` by every estimator, and averaged as the policy worker averages its KL loss."""

from types import SimpleNamespace

from kltest.adapters import Adapter, Setting
from kltest.adapters.installed import found

COMMIT = "a9564572eb"
HOME = "https://github.com/NovaSky-AI/SkyRL"
MODULE = "skyrl.backends.skyrl_train.utils.ppo_utils"
SOURCE = f"{HOME}/blob/{COMMIT}/skyrl/train/config/config.py"
KINDS = ("k1", "abs", "k2", "k3")


def kl_loss(logp, ref_logp, mask, kl_estimator_type="k3"):
    """`compute_approx_kl` and `masked_mean`, as the worker calls them with `use_kl_loss`."""
    per_token = found(MODULE, "compute_approx_kl")(logp, ref_logp, loss_mask=mask, kl_estimator_type=kl_estimator_type)
    loss = found("skyrl.backends.skyrl_train.utils.torch_utils", "masked_mean")(per_token, mask, dim=-1).mean()
    return loss, {"kl": loss.detach()}


def policy_loss(logp, old_logp, mask, reward, group):
    """`compute_grpo_outcome_advantage`, the reduction "token_mean" and `ppo_policy_loss`, as its trainer by default."""
    scores = reward.new_zeros(mask.shape).scatter(1, mask.long().sum(1, keepdim=True) - 1, reward[:, None])
    advantages = found(MODULE, "compute_grpo_outcome_advantage")(scores, mask, group.tolist())[0]
    reduced = found(MODULE, "apply_loss_reduction_to_advantages_minibatch")
    advantages = reduced(advantages, mask, "token_mean", len(mask), mask.shape[1])
    config = {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "off_policy_correction": None}
    return found(MODULE, "ppo_policy_loss")(logp, old_logp, advantages, SimpleNamespace(**config), mask)[0]


LOSS = Setting.of(kl_loss, source=SOURCE, policy=(f"{__name__}:policy_loss", {}))
FUNCTION = Setting.of(
    f"{MODULE}:compute_approx_kl",
    {"log_probs": "@logp", "log_probs_base": "@ref_logp", "loss_mask": "@mask"},
    source=SOURCE,
)

ADAPTER = Adapter.cloned(
    "skyrl",
    HOME,
    COMMIT,
    MODULE,
    module="skyrl",
    settings=(
        LOSS.by_default("skyrl.train.config.config:AlgorithmConfig.use_kl_loss", ascends="dapo"),
        *(LOSS.variant({"kl_estimator_type": kind}) for kind in ("k1", "k2")),
        *(FUNCTION.variant({"kl_estimator_type": kind}, kind) for kind in KINDS),
    ),
)
