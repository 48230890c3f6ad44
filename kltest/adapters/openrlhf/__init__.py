"""OpenRLHF: `compute_approx_kl`, the KL loss of the actor's step, and the KL in the reward under every estimator."""

from __future__ import annotations

from kltest.adapters.adapter import Adapter, Setting, label
from kltest.adapters.standalone import program

UTILS = "openrlhf.models.utils"
CALLS = "kltest.adapters.openrlhf.calls"
DOCUMENTED = "https://openrlhf.readthedocs.io/en/latest/rl.html"
KINDS = ("k1", "k2", "k3")
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
ALONE = "Its files are loaded without what the full installation wants; float32 inside."
PAIRS = {"group_size": 2, "timeout": 300}


def approximate(kind: str, unbiased: bool | None = None) -> Setting:
    """`compute_approx_kl` alone, per token, as a loss; `unbiased` for versions that have that switch."""
    more = {} if unbiased is None else {"unbiased_gradient": unbiased}
    return Setting(
        f"compute_approx_kl/{kind}" + (",unbiased_gradient" if unbiased else ""),
        f"{UTILS}:compute_approx_kl",
        {"kl_estimator": kind, **more},
        source=DOCUMENTED,
        note=ALONE,
    )


def loss(kind: str, **settings: object) -> Setting:
    """The KL loss of a training step."""
    name, arguments = f"kl_loss/{label(kind, **settings)}", {"kl_estimator": kind, **settings}
    return Setting(name, f"{CALLS}:kl_loss", arguments, depth="loss", source=DOCUMENTED, note=ALONE)


def charged(estimator: str, kind: str = "k1", *, both: bool = False) -> Setting:
    """The KL in the reward; `both`: with stale rollouts too."""
    return Setting(
        f"kl_in_reward/{estimator}" + ("" if kind == "k1" else f",{kind}"),
        f"{CALLS}:kl_in_reward",
        {"estimator": estimator, "kl_estimator": kind},
        {**PAIRS, "sampler": "both" if both else "current"},
        depth="loss",
        default=estimator == "gae" and kind == "k1",
        source=DOCUMENTED,
        note=f"{ALONE} A critic's values are zero.",
    )


def standalone(setting: Setting) -> str:
    """The program of a setting; its files are loaded as for grading, without what the full installation wants."""
    from kltest.adapters.openrlhf.calls import found

    old = {"log_probs_old": "old_logp"} if "unbiased_gradient" in setting.arguments else {}
    return program(setting, {"log_probs": "logp", "log_probs_base": "ref_logp", **old}, find=found)


ADAPTER = Adapter(
    name="openrlhf",
    distribution="openrlhf",
    version="0.11.2",
    installs=(("--no-deps", "openrlhf=={version}"),),
    module=UTILS,
    imports=("transformers", "torch._dynamo"),
    homepage="https://github.com/OpenRLHF/OpenRLHF",
    settings=(
        charged("gae", both=True),
        *map(approximate, KINDS),
        *(approximate(kind, True) for kind in KINDS),
        *map(loss, KINDS),
        loss("k3", token_level_loss=False),
        *(loss(kind, unbiased_gradient=True) for kind in KINDS),
        *map(charged, ESTIMATORS[1:]),
        charged("rloo", "k2"),
        charged("rloo", "k3"),
        Setting(
            "kl_loss/sequence",
            f"{CALLS}:sequence_kl_loss",
            options={"sampler": "both"},
            depth="loss",
            recipe=True,
            source=DOCUMENTED,
            note="Two calls in the actor's training step are replaced; it costs the variance of the ratio of whole "
            "sequences.",
        ),
    ),
    standalone=standalone,
)
