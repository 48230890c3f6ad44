"""NeMo RL: `ClippedPGLossFn` with its KL in the loss, its on-policy distillation, and `DistillationLossFn`."""

from kltest.adapters import STEP_OF_TOKENS, Adapter, Setting
from kltest.adapters.installed import found

COMMIT = "7ea279abfb"
HOME = "https://github.com/NVIDIA-NeMo/RL"
MODULE = "nemo_rl.algorithms.loss.loss_functions"
# Modules that it imports and the losses do not use; importing them depends on the version.
UNUSED = ("transformers", "ray")
# Needed by pydantic.
PYDANTIC = ("annotated-types", "typing-inspection", "typing-extensions")


def configured(name, settings):
    """Return a loss of that name; LookupError for a setting that its configuration would swallow and not use."""
    configuration = found(MODULE, f"{name}Config", UNUSED)
    if unknown := settings.keys() - configuration.model_fields.keys():
        raise LookupError(f"in this commit {name}Config has no {sorted(unknown)[0]!r}, which this setting is about")
    return found(MODULE, f"{name}Fn", UNUSED)(configuration(**settings))


def shifted(rows):
    """The same with the column in front that such losses leave out."""
    return rows[:, [0, *range(rows.shape[1])]]


def clipped(logp, old_logp, ref_logp, mask, advantage, beta, **settings):
    """`ClippedPGLossFn` on one device, the sampler's log-probs being those of generation and of the step before."""
    data = {
        "token_mask": shifted(mask),
        "sample_mask": mask.new_ones(len(mask)),
        "advantages": shifted(advantage[:, None].expand_as(mask)),
        "prev_logprobs": shifted(old_logp),
        "generation_logprobs": shifted(old_logp),
        "reference_policy_logprobs": shifted(ref_logp),
    }
    function = configured("ClippedPGLoss", {"reference_policy_kl_penalty": beta, **settings})
    loss, metrics = function(logp, data, mask.new_tensor(len(mask)), mask.sum())
    return loss, {"kl": metrics["kl_penalty"]} if beta else {}


def scored(logp, old_logp, ref_logp, mask, reward, group, beta, **settings):
    """`GRPOAdvantageEstimator` at its configuration's defaults, which computes in float32, and `ClippedPGLossFn`."""
    module = "nemo_rl.algorithms.advantage_estimator"
    configuration = found(module, "AdvEstimatorConfig", UNUSED)()
    estimator = found(module, "GRPOAdvantageEstimator", UNUSED)(configuration, None)
    advantages = estimator.compute_advantage(group[:, None], reward.float(), mask).to(logp.dtype)
    return clipped(logp, old_logp, ref_logp, mask, advantages[:, 0], beta, **settings)


def distilled(logits, ref_logits, mask, topk, **settings):
    """`DistillationLossFn` on the top k of the teacher, the reference, as a worker prepares them."""
    data = {"token_mask": shifted(mask), "sample_mask": mask.new_ones(len(mask)), "input_ids": mask}
    function, top = configured("DistillationLoss", settings), ref_logits.topk(topk, dim=-1)
    outside = function.zero_outside_topk
    of_topk = found("nemo_rl.distributed.model_utils", "get_distillation_topk_logprobs_from_logits", UNUSED)
    # It leaves out the last position, which predicts nothing.
    prepared = of_topk(
        *(longer(each) for each in (logits, top.values, top.indices)),
        zero_outside_topk=outside,
        calculate_entropy=outside and function.kl_type != "forward",
    )
    return function(*prepared, data, mask.new_tensor(len(mask)), mask.sum())[0]


def longer(rows):
    """The same with a column behind."""
    return rows[:, [*range(rows.shape[1]), -1]]


def opd(logp, old_logp, ref_logp, mask):
    """`OPDAdvantageEstimator` and `ClippedPGLossFn` as its docstring configures it; the reference is the teacher."""
    estimator = found("nemo_rl.algorithms.advantage_estimator", "OPDAdvantageEstimator", UNUSED)({}, {})
    sampled, live = shifted(old_logp), shifted(mask)
    advantages = estimator.compute_advantage(
        None, None, live, teacher_logprobs=shifted(ref_logp), prev_logprobs=sampled
    )
    data = {"token_mask": live, "sample_mask": mask.new_ones(len(mask)), "advantages": advantages}
    data |= {"prev_logprobs": sampled, "generation_logprobs": sampled, "reference_policy_logprobs": sampled}
    settings = {
        **{"disable_ppo_ratio": True, "use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0},
        "truncated_importance_sampling_type": "icepop",
        **{"truncated_importance_sampling_ratio_min": 0.5, "truncated_importance_sampling_ratio": 5.0},
    }
    return configured("ClippedPGLoss", settings)(logp, data, mask.new_tensor(len(mask)), mask.sum())[0]


TREE = f"{HOME}/blob/{COMMIT}"
LOSS = Setting.of(
    clipped,
    name="clipped_pg",
    options=STEP_OF_TOKENS,
    source=f"{TREE}/docs/guides/grpo.md",
    policy=(f"{__name__}:scored", {}),
)
DISTILLATION = Setting.of(
    distilled,
    {"topk": 2},
    name="distillation",
    options={"ignore": "KL206"},
    source=f"{TREE}/{MODULE.replace('.', '/')}.py",
    note="The reference is the teacher. A support has two tokens of four, where its default is 64 of a model's.",
)
OPD = Setting.of(
    opd, options=STEP_OF_TOKENS, source=f"{TREE}/nemo_rl/algorithms/opd.py", note="The reference is the teacher."
)

ADAPTER = Adapter.cloned(
    "nemo-rl",
    HOME,
    COMMIT,
    MODULE,
    UNUSED,
    installs=(("--no-deps", "pydantic==2.13.4", "pydantic-core==2.46.4", *PYDANTIC),),
    module="nemo_rl",
    settings=(
        LOSS.by_default(f"{MODULE}:ClippedPGLossConfig.reference_policy_kl_penalty", ascends=""),
        LOSS.variant({"reference_policy_kl_type": "k1"}),
        LOSS.variant({"use_on_policy_kl_approximation": True}),
        DISTILLATION.by_default("the loss itself"),
        *(DISTILLATION.variant({"kl_type": kind}) for kind in ("forward", "reverse")),
        *(DISTILLATION.variant({"zero_outside_topk": True, "kl_type": kind}) for kind in ("forward", "reverse")),
        OPD.by_default("the estimator of advantages itself"),
    ),
)
