"""OpenRLHF: `compute_approx_kl`, the KL loss of the actor's step, and the KL in the reward under every estimator."""

import importlib
import types
from functools import partial
from typing import Any

from kltest.adapters import PAIRS, SCORES, Adapter, Setting, label
from kltest.adapters.installed import called, found, loaded
from kltest.adapters.openrlhf.recipes import sequence_kl, sums_over_tokens
from kltest.adapters.standalone import program

UTILS = "openrlhf.models.utils"
DOCUMENTED = "https://openrlhf.readthedocs.io/en/latest/rl.html"
KINDS = ("k1", "k2", "k3")
CORRECTED = {"unbiased_gradient": True}
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
# Registered policy losses with the advantages of these, where there is one prompt in a batch.
ASCENDS = {
    **dict.fromkeys(("gae", "reinforce", "reinforce_baseline"), "reinforce-plus-plus"),
    **dict.fromkeys(("dr_grpo", "flash_reinforce"), "grpo-without-std"),
    **{"rloo": "reinforce-leave-one-out", "group_norm": "dapo"},
}
# The releases that brought `aggregate_loss`, and arguments and values of them.
AGGREGATED = "0.10.3"
BROUGHT = {"token_level_loss": AGGREGATED, "unbiased_gradient": "0.11.1", "flash_reinforce": "0.11.2"}
ALONE = "Its files are loaded without what the full installation wants; float32 inside."


def totals(mask):
    """The totals of a batch that is one step of the optimizer on one device."""
    return {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": (mask.sum(-1) > 0).sum()}


def aggregated(per_token, mask, **more):
    """The loss of a step, which is what is logged as well; early versions take `masked_mean` for it."""
    if hasattr(loaded("openrlhf.models.loss"), "aggregate_loss"):
        loss = called(found("openrlhf.models.loss", "aggregate_loss"), {"loss": per_token, "loss_mask": mask, **more})
    else:
        loss = called(found("openrlhf.models.utils", "masked_mean"), {"tensor": per_token, "mask": mask})
    return loss, {"kl": loss.detach()}


def kl_loss(logp, ref_logp, old_logp, mask, token_level_loss=True, **settings):
    """The KL loss of the actor's training step: `compute_approx_kl`, aggregated by `aggregate_loss`."""
    offered = {"log_probs": logp, "log_probs_base": ref_logp, "log_probs_old": old_logp}
    per_token = called(found("openrlhf.models.utils", "compute_approx_kl"), offered, settings)
    return aggregated(per_token, mask, token_level_loss=token_level_loss, **totals(mask))


def sequence_kl_loss(logp, ref_logp, old_logp, mask):
    """The recipe: a KL loss of whole sequences, aggregated by `aggregate_loss`."""
    return aggregated(sequence_kl(logp, ref_logp, old_logp, mask), mask, **sums_over_tokens(totals(mask)))


def kl_in_reward(logp, old_logp, ref_logp, mask, reward, group, beta, estimator, kl_estimator="k1", **settings):
    """`compute_approx_kl` of the sampler's log-probs in the reward, the experience maker's advantages, `PolicyLoss`.

    A critic's values are zeros. `settings` are those of `PolicyLoss`.
    """
    torch = importlib.import_module("torch")
    rows, prompts = len(group), len(group.unique())
    if rows == prompts and estimator not in ("gae", "reinforce", "flash_reinforce"):
        raise ValueError(f"{estimator} wants several rollouts a prompt")
    samples = rows // prompts if rows % prompts == 0 else rows
    # Early versions take rollouts of a prompt to follow one another.
    order = group.argsort(stable=True)
    with torch.no_grad():
        offered = {"log_probs": old_logp, "log_probs_base": ref_logp, "kl_estimator": kl_estimator}
        kl = called(found("openrlhf.models.utils", "compute_approx_kl"), offered)
    experience = types.SimpleNamespace(
        index=list(range(rows)),
        rewards=reward[order],
        kl=kl[order],
        action_mask=mask[order].long(),
        values=torch.zeros_like(kl),
        info={"response_length": mask[order].sum(-1)},
    )
    arguments = configured(estimator, samples)
    maker = found("openrlhf.trainer.ppo_utils.experience_maker", "RemoteExperienceMaker")
    stand_in = types.SimpleNamespace(
        strategy=types.SimpleNamespace(args=arguments),
        args=arguments,
        kl_ctl=types.SimpleNamespace(value=beta),
        advantage_estimator=estimator,
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(stand_in, name, types.MethodType(getattr(maker, name), stand_in))
    answer = maker.compute_advantages_and_returns(stand_in, [experience])
    experience = answer[0] if isinstance(answer[0], types.SimpleNamespace) else answer[0][0]

    policy_loss = called(found("openrlhf.models.loss", "PolicyLoss"), {}, settings)
    offered = {
        "log_probs": logp,
        "old_log_probs": old_logp,
        "advantages": experience.advantages[order.argsort()],
        "action_mask": mask,
        "rollout_log_probs": old_logp,
        **totals(mask),
    }
    loss = called(policy_loss.forward, offered)
    return loss[0], {"kl": (kl * mask).sum(-1) / mask.sum(-1)}


def configured(estimator, samples):
    """Arguments of the command line at their defaults, in groups and flat, since versions differ in that."""
    space = types.SimpleNamespace
    usual = {"gamma": 1.0, "lambd": 1.0, "n_samples_per_prompt": samples}
    usual |= dict.fromkeys(("overlong_buffer_len", "stop_properly_penalty_coef", "reward_clip_range", "clip_range"))
    usual |= {"advantage_estimator": estimator, "no_advantage_std_norm": False}
    advantage = space(**usual, estimator=estimator, no_std_norm=False)
    return space(**usual, rollout=space(**usual), reward=space(**usual), algo=space(advantage=advantage))


# The function alone, per token, as a loss.
APPROXIMATE = Setting.of(f"{UTILS}:compute_approx_kl", source=DOCUMENTED, note=ALONE, brought=BROUGHT)
LOSS = Setting.of(kl_loss, source=DOCUMENTED, note=ALONE, brought=BROUGHT)
CHARGED = Setting.of(
    kl_in_reward,
    options={**PAIRS, "sampler": "current"},
    source=DOCUMENTED,
    note=f"{ALONE} A critic's values are zero.",
    brought=BROUGHT,
    policy=SCORES,
)


def charged(estimator: str, kind: str = "k1", **others: object) -> Setting:
    """The KL in the reward under an advantage estimator."""
    name = estimator if kind == "k1" else f"{estimator},{kind}"
    # The estimator of the KL is none of the policy part's.
    ascends = ASCENDS.get(estimator, "") if kind == "k1" else None
    return CHARGED.variant({"estimator": estimator, "kl_estimator": kind}, name, ascends=ascends, **others)


def loss(kind: str, **settings: object) -> Setting:
    """The KL loss of a training step."""
    return LOSS.variant({"kl_estimator": kind, **settings}, label(kind, **settings))


def standalone(setting: Setting, **others: Any) -> str:
    """The program of a setting; its files are loaded as for grading, without what the full installation wants."""
    old = ("log_probs_old",) if "unbiased_gradient" in setting.arguments else ()
    return program(setting, ("log_probs", "log_probs_base", *old), find=found, **others)


ADAPTER = Adapter(
    name="openrlhf",
    distribution="openrlhf",
    version="0.11.2",
    installs=(("--no-deps", "openrlhf=={version}"),),
    # Each release has a wheel for this version, and none yet for 3.13.
    python="3.11",
    module=UTILS,
    loads=partial(loaded, UTILS),
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
        *(APPROXIMATE.variant({"kl_estimator": kind, **CORRECTED}, f"{kind},unbiased_gradient") for kind in KINDS),
        *map(loss, KINDS),
        loss("k3", token_level_loss=False),
        *(loss(kind, **CORRECTED) for kind in KINDS),
        *map(charged, ESTIMATORS[1:]),
        charged("rloo", "k2"),
        charged("rloo", "k3"),
        LOSS.variant(
            name="sequence",
            target=f"{__name__}:sequence_kl_loss",
            options={"sampler": "both"},
            recipe=True,
            since=AGGREGATED,
            note="Two calls in the actor's training step are replaced; it costs the variance of the ratio of whole "
            "sequences.",
        ),
    ),
    standalone=standalone,
)
