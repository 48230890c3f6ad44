"""EasyR1, a fork of verl: `compute_kl`, by every estimator, and averaged as its KL loss is."""

from kltest.adapters import Setting
from kltest.adapters.checkout import cloned
from kltest.adapters.installed import found

COMMIT = "b44b311b66"
HOME = "https://github.com/hiyouga/EasyR1"
SOURCE = f"{HOME}/blob/{COMMIT}/verl/trainer/config.py"
ALGORITHMS = "verl.trainer.core_algos"
KINDS = ("kl", "abs", "mse", "low_var_kl")


def kl_loss(logp, ref_logp, mask, kl_penalty="kl", loss_avg_mode="token"):
    """`compute_kl` and `average_loss`, as the actor calls them with `use_kl_loss`."""
    kl = found(ALGORITHMS, "compute_kl")(log_probs=logp, ref_log_probs=ref_logp, kl_penalty=kl_penalty)
    loss = found(ALGORITHMS, "average_loss")(kl, mask, mode=loss_avg_mode)
    return loss, {"kl": loss.detach()}


FUNCTION = Setting(
    "compute_kl",
    f"{ALGORITHMS}:compute_kl",
    {"log_probs": "@logp", "ref_log_probs": "@ref_logp"},
    source=SOURCE,
)
LOSS = Setting("kl_loss", "kltest.adapters.easyr1:kl_loss", depth="loss", source=SOURCE)
ADAPTER = cloned(
    "easyr1",
    HOME,
    COMMIT,
    ALGORITHMS,
    module=ALGORITHMS,
    settings=(
        LOSS.variant(name="defaults", default=True),
        *(LOSS.variant({"kl_penalty": "low_var_kl", "loss_avg_mode": mode}) for mode in ("token", "seq")),
        *(FUNCTION.variant({"kl_penalty": kind}, kind) for kind in KINDS),
    ),
)
