"""verl: `kl_penalty` by every name, the KL loss by every aggregation, `ppo_loss` whole, and the KL in the reward."""

from __future__ import annotations

from functools import partial

from kltest.adapters.adapter import Adapter, Setting, label
from kltest.adapters.standalone import program
from kltest.adapters.verl.recipes import OVERRIDES

CORE = "verl.trainer.ppo.core_algos"
CALLS = "kltest.adapters.verl.calls"
DOCUMENTED = "https://verl.readthedocs.io/en/latest/algo/ppo.html"
CONFIGURED = "https://verl.readthedocs.io/en/latest/examples/config.html"

# The documented default of the loss first; the reward takes kl by default.
PENALTIES = ("low_var_kl", "kl", "k1", "abs", "mse", "k2", "k3", "full")
ENDED = tuple(f"{name}+" for name in PENALTIES)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = (
    "gae",
    "grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)
PACKED = "Log-probs come packed, after a prompt of one token; one mini-batch in one micro-batch on one device."
CHARGED = "A critic's values and the rewards of greedy rollouts are zero where they are asked for; one device."
# Every group is called, some several times; groups of two keep that to seconds.
PAIRS = {"group_size": 2, "timeout": 300}


def penalty(name: str) -> Setting:
    """`kl_penalty` alone, per token, as a loss."""
    return Setting(
        f"kl_penalty/{name}",
        f"{CORE}:kl_penalty",
        {"kl_penalty": name},
        default=name == "low_var_kl",
        source=DOCUMENTED,
    )


def aggregated(mode: str) -> Setting:
    """The KL loss as the actor adds it, with the documented kind of KL."""
    arguments = {"kl_penalty": "low_var_kl", "loss_agg_mode": mode}
    return Setting(f"kl_loss/{mode}", f"{CALLS}:kl_loss", arguments, depth="loss", source=CONFIGURED)


def charged(name: str, *, both: bool = False, **settings: object) -> Setting:
    """The KL in the reward under an advantage estimator; `both` measures stale rollouts as well."""
    with_probabilities = "_with_probabilities" if name.endswith("token_baseline") else ""
    return Setting(
        f"kl_in_reward/{label(name, **settings)}",
        f"{CALLS}:kl_in_reward{with_probabilities}",
        {"adv_estimator": name, **settings},
        {**PAIRS, "sampler": "both" if both else "current"},
        depth="loss",
        default=name == "gae" and not settings,
        source=DOCUMENTED,
        note=CHARGED,
    )


def recipe() -> Setting:
    """The recipe in `recipes`, as arguments of the call."""
    algorithm = {name.removeprefix("algorithm."): value for name, value in OVERRIDES.items()}
    correction = "rollout_correction."
    return Setting(
        "kl_in_reward/sequence-corrected",
        f"{CALLS}:kl_in_reward",
        {
            "adv_estimator": algorithm["adv_estimator"],
            "kl_penalty": algorithm["kl_penalty"],
            "loss_agg_mode": OVERRIDES["actor_rollout_ref.actor.loss_agg_mode"],
            "rollout_correction": {
                name.removeprefix(correction): value for name, value in algorithm.items() if name.startswith(correction)
            },
        },
        {**PAIRS, "sampler": "both"},
        depth="loss",
        recipe=True,
        source="https://verl.readthedocs.io/en/latest/algo/rollout_corr.html",
        note="Settings alone, with one update a batch; it costs the variance of the ratio of whole sequences.",
    )


def discover() -> list[Setting]:
    """Advantage estimators that the installed version registers beside those above."""
    from importlib import import_module

    registered = getattr(import_module(CORE), "ADV_ESTIMATOR_REGISTRY", {})
    return [charged(name) for name in registered if name not in ESTIMATORS]


ADAPTER = Adapter(
    name="verl",
    distribution="verl",
    version="0.9.1",
    installs=(("verl=={version}",), ("cachetools", "uvicorn", "fastapi")),
    module=CORE,
    imports=(
        CORE,
        "verl.workers.config",
        "verl.workers.utils.losses",
        "verl.trainer.ppo.ray_trainer",
        "verl.trainer.config",
    ),
    homepage="https://github.com/verl-project/verl",
    settings=(
        Setting(
            "ppo_loss/use_kl_loss",
            f"{CALLS}:ppo_loss",
            options={**PAIRS, "sampler": "both"},
            depth="loss",
            default=True,
            source=CONFIGURED,
            note=PACKED,
        ),
        charged("gae", both=True),
        *map(penalty, (*PENALTIES, *ENDED)),
        *map(aggregated, AGGREGATIONS),
        Setting(
            "ppo_loss/kl_loss_type=k1+,loss_agg_mode=seq-mean-token-sum",
            f"{CALLS}:ppo_loss",
            {"kl_loss_type": "k1+", "loss_agg_mode": "seq-mean-token-sum"},
            {**PAIRS, "sampler": "current"},
            depth="loss",
            source=CONFIGURED,
            note=PACKED,
        ),
        *map(charged, ESTIMATORS[1:]),
        charged("rloo", both=True, loss_agg_mode="seq-mean-token-sum"),
        charged("grpo", norm_adv_by_std_in_grpo=False, loss_agg_mode="seq-mean-token-sum"),
        charged("reinforce_plus_plus", loss_agg_mode="seq-mean-token-sum"),
        charged("remax", loss_agg_mode="seq-mean-token-sum"),
        recipe(),
    ),
    discover=discover,
    standalone=partial(program, fields={"logprob": "logp", "ref_logprob": "ref_logp"}),
)
