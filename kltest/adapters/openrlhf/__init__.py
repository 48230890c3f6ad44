"""OpenRLHF: `compute_approx_kl`, the KL loss of the actor's step, and the KL in the reward under every estimator."""

from dataclasses import replace
from importlib import import_module

from kltest.adapters import PAIRS, Adapter, Setting, label
from kltest.adapters.standalone import program

UTILS = "openrlhf.models.utils"
CALLS = "kltest.adapters.openrlhf.calls"
DOCUMENTED = "https://openrlhf.readthedocs.io/en/latest/rl.html"
KINDS = ("k1", "k2", "k3")
CORRECTED = {"unbiased_gradient": True}
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
# The releases that brought `aggregate_loss`, `unbiased_gradient` and an estimator.
AGGREGATED, UNBIASED, FLASH = "0.10.3", "0.11.1", "0.11.2"
ALONE = "Its files are loaded without what the full installation wants; float32 inside."

# The function alone, per token, as a loss.
APPROXIMATE = Setting("compute_approx_kl", f"{UTILS}:compute_approx_kl", source=DOCUMENTED, note=ALONE)
LOSS = Setting("kl_loss", f"{CALLS}:kl_loss", depth="loss", source=DOCUMENTED, note=ALONE)
CHARGED = Setting(
    "kl_in_reward",
    f"{CALLS}:kl_in_reward",
    options={**PAIRS, "sampler": "current"},
    depth="loss",
    source=DOCUMENTED,
    note=f"{ALONE} A critic's values are zero.",
)


def charged(estimator: str, kind: str = "k1", **others: object) -> Setting:
    """The KL in the reward under an advantage estimator."""
    name = estimator if kind == "k1" else f"{estimator},{kind}"
    return CHARGED.variant({"estimator": estimator, "kl_estimator": kind}, name, **others)


def loss(kind: str, **settings: object) -> Setting:
    """The KL loss of a training step."""
    return LOSS.variant({"kl_estimator": kind, **settings}, label(kind, **settings))


def standalone(setting: Setting) -> str:
    """The program of a setting; its files are loaded as for grading, without what the full installation wants."""
    from kltest.adapters.installed import found

    old = {"log_probs_old": "old_logp"} if "unbiased_gradient" in setting.arguments else {}
    return program(setting, {"log_probs": "logp", "log_probs_base": "ref_logp", **old}, find=found)


ADAPTER = Adapter(
    name="openrlhf",
    distribution="openrlhf",
    version="0.11.2",
    installs=(("--no-deps", "openrlhf=={version}"),),
    module=UTILS,
    loads=lambda: import_module(CALLS).loaded(UTILS),
    since="0.8.5",
    changed={"0.8.6": ("support log_ratio.clamp", "https://github.com/OpenRLHF/OpenRLHF/commit/d90b3d1f")},
    history=(loss("k1"), loss("k2"), loss("k3"), *(charged(name) for name in ("reinforce", "rloo", "group_norm"))),
    imports=("transformers", "torch._dynamo"),
    homepage="https://github.com/OpenRLHF/OpenRLHF",
    settings=(
        charged(
            "gae",
            default=True,
            options={"sampler": "both"},
            coefficient="openrlhf.cli.train_ppo_ray:--algo.kl.init_coef",
        ),
        *(APPROXIMATE.variant({"kl_estimator": kind}, kind) for kind in KINDS),
        *(
            APPROXIMATE.variant(
                {"kl_estimator": kind, "unbiased_gradient": True}, f"{kind},unbiased_gradient", since=UNBIASED
            )
            for kind in KINDS
        ),
        *map(loss, KINDS),
        replace(loss("k3", token_level_loss=False), since=AGGREGATED),
        *(replace(loss(kind, **CORRECTED), since=UNBIASED) for kind in KINDS),
        *(charged(name, since=FLASH if name == "flash_reinforce" else "") for name in ESTIMATORS[1:]),
        charged("rloo", "k2"),
        charged("rloo", "k3"),
        LOSS.variant(
            name="sequence",
            target=f"{CALLS}:sequence_kl_loss",
            options={"sampler": "both"},
            recipe=True,
            since=AGGREGATED,
            note="Two calls in the actor's training step are replaced; it costs the variance of the ratio of whole "
            "sequences.",
        ),
    ),
    standalone=standalone,
)
