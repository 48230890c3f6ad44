"""SkyRL: `compute_approx_kl` by every estimator, and averaged as the policy worker averages its KL loss."""

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


LOSS = Setting.of(kl_loss, source=SOURCE)
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
        LOSS.by_default("skyrl.train.config.config:AlgorithmConfig.use_kl_loss"),
        *(LOSS.variant({"kl_estimator_type": kind}) for kind in ("k1", "k2")),
        *(FUNCTION.variant({"kl_estimator_type": kind}, kind) for kind in KINDS),
    ),
)
