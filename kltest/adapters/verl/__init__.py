"""verl: `kl_penalty` by every name, the KL loss by every aggregation, `ppo_loss` whole, and the KL in the reward."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kltest.adapters import PAIRS, SCORES, Adapter, Setting, label
from kltest.adapters.standalone import program
from kltest.adapters.verl import calls
from kltest.adapters.verl.recipes import OVERRIDES

CORE = "verl.trainer.ppo.core_algos"
DOCUMENTED = "https://verl.readthedocs.io/en/latest/algo/ppo.html"
CONFIGURED = "https://verl.readthedocs.io/en/latest/examples/config.html"

# The documented default of the loss first; the reward takes kl by default.
PENALTIES = ("low_var_kl", "kl", "k1", "abs", "mse", "k2", "k3", "full")
ENDED = tuple(f"{name}+" for name in PENALTIES)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = (
    *("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "grpo_passk"),
    *("gpg", "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo"),
)
# The first releases that have them, among those looked at; what is not named stands in all.
SINCE = {
    **{"gpg": "0.5", "rloo_vectorized": "0.6.1", "grpo_vectorized": "0.6.1", "optimal_token_baseline": "0.7"},
    **{"tir_optimal_token_baseline": "0.7", "gdpo": "0.7", "token-sum": "0.9"},
    # Up to 0.7.1 their forward pass takes the whole name for that of an estimator, and there is none.
    **dict.fromkeys(ENDED, "0.8"),
}
# Registered policy losses with the advantages of these, where there is one prompt in a batch.
ASCENDS = {
    **dict.fromkeys(("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), "reinforce-plus-plus"),
    **dict.fromkeys(("grpo", "grpo_vectorized"), "dapo"),
    **dict.fromkeys(("rloo", "rloo_vectorized"), "reinforce-leave-one-out"),
    **{"remax": "reinforce", "opo": "opo"},
}
PACKED = "Log-probs come packed, after a prompt of one token; one mini-batch in one micro-batch on one device."
CHARGES = "A critic's values and the rewards of greedy rollouts are zero where they are asked for; one device."
# The function alone, per token, as a loss.
PENALTY = Setting.of(f"{CORE}:kl_penalty", source=DOCUMENTED, brought=SINCE)
LOSS = Setting.of(calls.kl_loss, {"kl_penalty": "low_var_kl"}, source=CONFIGURED, brought=SINCE)
WHOLE = Setting.of(calls.ppo_loss, options=PAIRS, source=CONFIGURED, note=PACKED, since="0.8")
DISTILLED = Setting.of(
    calls.distilled,
    name="distillation",
    options={**PAIRS, "sampler": "both", "ignore": "KL502", "timeout": 900},
    source="https://verl.readthedocs.io/en/latest/algo/opd.html",
    note=f"The reference is the teacher. {PACKED}",
    since="0.8",
)
CHARGED = Setting.of(
    calls.kl_in_reward,
    options={**PAIRS, "sampler": "current"},
    source=DOCUMENTED,
    note=CHARGES,
    brought=SINCE,
    policy=SCORES,
)
BOTH, SUMMED = {"sampler": "both"}, {"loss_agg_mode": "seq-mean-token-sum"}


def charged(estimator: str, settings: Mapping[str, Any] = MappingProxyType({}), **others: Any) -> Setting:
    """The KL in the reward under an advantage estimator."""
    centred = "dr-grpo" if settings.get("norm_adv_by_std_in_grpo") is False else None
    others["ascends"] = centred or ASCENDS.get(estimator, "")
    if estimator.endswith("token_baseline"):
        others["target"] = f"{CHARGED.target}_with_probabilities"
    return CHARGED.variant({"adv_estimator": estimator, **settings}, label(estimator, **settings), **others)


def penalty(name: str) -> Setting:
    """The function under one of its names."""
    return PENALTY.variant({"kl_penalty": name}, name)


def distilled(loss_mode: str, **settings: Any) -> Setting:
    """A distillation loss; in the advantage if it is a `reward`."""
    few = "A support has two tokens of four, where its default is 32." if "topk" in settings else ""
    note = f"{DISTILLED.note} {few}".strip()
    return DISTILLED.variant({"loss_mode": loss_mode, **settings}, note=note)


def recipe() -> Setting:
    """The recipe in `recipes`, as arguments of the call."""
    algorithm = {name.removeprefix("algorithm."): value for name, value in OVERRIDES.items()}
    correction = "rollout_correction."
    return CHARGED.variant(
        {
            "adv_estimator": algorithm["adv_estimator"],
            "kl_penalty": algorithm["kl_penalty"],
            "loss_agg_mode": OVERRIDES["actor_rollout_ref.actor.loss_agg_mode"],
            "rollout_correction": {
                name.removeprefix(correction): value for name, value in algorithm.items() if name.startswith(correction)
            },
        },
        "sequence-corrected",
        options=BOTH,
        recipe=True,
        ascends=None,
        since="0.6.1",
        source="https://verl.readthedocs.io/en/latest/algo/rollout_corr.html",
        note="Settings alone, with one update a batch; it costs the variance of the ratio of whole sequences.",
    )


ADAPTER = Adapter(
    name="verl",
    distribution="verl",
    version="0.9.1",
    installs=(("verl=={version}",), ("cachetools", "uvicorn", "fastapi")),
    module=CORE,
    since="0.4",
    # Before `ppo_loss` the actor called these two; their defaults are those of its configuration.
    history=(
        LOSS.variant({"loss_agg_mode": "token-mean"}, "nothing-set", default=True),
        penalty("low_var_kl"),
        charged("rloo"),
    ),
    imports=(
        CORE,
        "verl.workers.config",
        "verl.workers.utils.losses",
        "verl.trainer.ppo.ray_trainer",
        "verl.trainer.config",
    ),
    homepage="https://github.com/verl-project/verl",
    settings=(
        WHOLE.by_default("verl.workers.config:ActorConfig.use_kl_loss", name="use_kl_loss", options=BOTH),
        charged("gae", options=BOTH, default=True, coefficient="verl.trainer.config:AlgoConfig.use_kl_in_reward"),
        *map(penalty, (*PENALTIES, *ENDED)),
        *(LOSS.variant({"loss_agg_mode": mode}, mode) for mode in AGGREGATIONS),
        WHOLE.variant({"kl_loss_type": "k1+", **SUMMED}, options={"sampler": "current"}),
        *map(charged, ESTIMATORS[1:]),
        charged("rloo", SUMMED, options=BOTH),
        charged("grpo", {"norm_adv_by_std_in_grpo": False, **SUMMED}),
        charged("reinforce_plus_plus", SUMMED),
        charged("remax", SUMMED),
        DISTILLED.by_default("verl.workers.config:DistillationConfig.enabled"),
        distilled("k2"),
        distilled("k1", use_policy_gradient=True),
        distilled("k3", use_policy_gradient=True),
        distilled("forward_kl_topk", topk=2),
        distilled("forward_kl_topk", topk=2, use_policy_gradient=True),
        recipe(),
    ),
    standalone=partial(program, parameters=("logprob", "ref_logprob")),
)
