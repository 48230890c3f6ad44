"""OpenRLHF: `compute_approx_kl`, the KL loss of the actor's step, and the KL in the reward under every estimator."""

from kltest.adapters import PAIRS, Adapter, Setting, label
from kltest.adapters.standalone import program

UTILS = "openrlhf.models.utils"
CALLS = "kltest.adapters.openrlhf.calls"
DOCUMENTED = "https://openrlhf.readthedocs.io/en/latest/rl.html"
KINDS = ("k1", "k2", "k3")
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
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
        charged("gae", default=True, options={"sampler": "both"}),
        *(APPROXIMATE.variant({"kl_estimator": kind}, kind) for kind in KINDS),
        *(
            APPROXIMATE.variant({"kl_estimator": kind, "unbiased_gradient": True}, f"{kind},unbiased_gradient")
            for kind in KINDS
        ),
        *map(loss, KINDS),
        loss("k3", token_level_loss=False),
        *(loss(kind, unbiased_gradient=True) for kind in KINDS),
        *map(charged, ESTIMATORS[1:]),
        charged("rloo", "k2"),
        charged("rloo", "k3"),
        LOSS.variant(
            name="sequence",
            target=f"{CALLS}:sequence_kl_loss",
            options={"sampler": "both"},
            recipe=True,
            note="Two calls in the actor's training step are replaced; it costs the variance of the ratio of whole "
            "sequences.",
        ),
    ),
    standalone=standalone,
)
