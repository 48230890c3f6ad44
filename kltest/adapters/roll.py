"""ROLL: the loss of its actor, on-policy distillation too, its KL function, and its divergences for distillation."""

from functools import partial
from types import SimpleNamespace

from kltest.adapters import STEP_OF_TOKENS, Adapter, Setting, label
from kltest.adapters.installed import found

COMMIT = "8eb27cc2dc"
HOME = "https://github.com/alibaba/ROLL"
TREE = f"{HOME}/blob/{COMMIT}/roll"
FUNCTIONS = "roll.utils.functionals"
# Of `PPOConfig`, with the KL loss switched on and without coefficient.
USUAL = {
    **{"use_kl_loss": True, "loss_agg_mode": "seq-mean-token-mean", "importance_sampling": "token", "pg_clip": 0.2},
    **{"use_pg_clip_range": False, "pg_clip_low": 0.2, "pg_clip_high": 0.2, "dual_clip_loss": False},
    **{"rl_loss_coef": 1.0, "entropy_loss_coef": 0.0, "enable_old_logprobs_recompute": True},
    **{"difficulty_loss_weight": False, "length_loss_weight": False},
}


def actor_loss(logp, old_logp, ref_logp, mask, advantage, beta, **settings):
    """`ActorWorker.loss_func` of the pipeline for verifiable rewards, from log-probs."""
    loss, metrics = acted(logp, old_logp, ref_logp, mask, advantage[:, None].expand_as(mask), beta, **settings)
    return loss, {"kl": metrics["actor/kl_loss@sum"]}


def scored(logp, old_logp, ref_logp, mask, reward, group, beta, **settings):
    """`reward_norm` of whole groups, as `adv_estimator=grpo` sets it, and `actor_loss`."""
    order, size = group.argsort(stable=True), len(group) // len(group.unique())
    normalised = found(FUNCTIONS, "reward_norm")(reward[order], size, norm_mean_type="group", norm_std_type="group")
    return actor_loss(logp, old_logp, ref_logp, mask, normalised[order.argsort()], beta, **settings)


def acted(logp, old_logp, ref_logp, mask, advantages, beta, **settings):
    """The loss and the metrics of a worker, with advantages of tokens."""
    worker = found("roll.pipeline.rlvr.actor_worker", "ActorWorker")
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False))
    config = SimpleNamespace(**{**USUAL, **settings}, kl_loss_coef=beta, train_infer_correction=correction)
    batch = {"response_mask": mask[:, [0, *range(mask.shape[1])]], "ref_log_probs": ref_logp, "input_ids": mask}
    batch |= {"attention_mask": mask, "train_infer_is_weight": mask, "advantages": advantages}
    totals = {"batch_num_tokens": {"response_mask": mask.sum()}, "global_valid_samples": {"response_mask": len(mask)}}
    data = SimpleNamespace(batch=batch, meta_info=totals, non_tensor_batch={})
    stand_in = SimpleNamespace(
        pipeline_config=config,
        strategy=SimpleNamespace(op_compute_log_probs=lambda **_: logp),
        get_old_log_probs_with_cache=lambda *_: old_logp,
        compute_sample_weights=lambda _, live: logp.new_ones(len(live)),
    )
    return worker.loss_func(stand_in, data, logp)


def distilled(logits, ref_logits, topk, kd_objective="forward_kl", **settings):
    """`VariousDivergence` of each token, on the teacher's top k as a strategy prepares it; 0 for all tokens.

    The reference is the teacher.
    """
    defaults = {"kd_temperature": 1.0, "adaptive_kl_alpha": 0.5, "skew_lambda": 0.1}
    config = SimpleNamespace(**{**defaults, **settings}, kd_objective=kd_objective)
    divergence = found("roll.pipeline.distill.various_divergence", "VariousDivergence")(config)
    strategy = found("roll.distributed.strategy.strategy", "InferenceStrategy")
    stand_in = SimpleNamespace(op_compute_topk_logits=partial(strategy.op_compute_topk_logits, None))
    chances, log_chances, ids, infinite = strategy.op_compute_topk_probs_and_indices(stand_in, ref_logits, topk)
    student = strategy.op_compute_gather_by_teacher_indices(None, logits, ids if topk else None)
    return divergence(student, chances, log_chances, infinite)


def opd(logp, old_logp, ref_logp, mask, beta):
    """`compute_advantage` with `is_pure_opd`, and `ActorWorker.loss_func`; beta is a teacher's `opd_kl_coef`."""
    teacher = {"default": SimpleNamespace(opd_kl_coef=beta)}
    config = SimpleNamespace(is_pure_opd=True, enable_old_logprobs_recompute=True, reference_configs=teacher)
    batch = {"old_log_probs": old_logp, "ref_log_probs_default": ref_logp}
    data = SimpleNamespace(batch=batch, meta_info={})
    named = {"gamma": 0, "lambd": 0.95, "adv_estimator": "reinforce", "response_mask": mask, "pipeline_config": config}
    advantages = found(FUNCTIONS, "compute_advantage")(data, **named).batch["advantages"]
    return acted(logp, old_logp, ref_logp, mask, advantages.to(logp.dtype), beta, use_kl_loss=False)[0]


LOSS = Setting.of(
    actor_loss,
    options=STEP_OF_TOKENS,
    source=f"{TREE}/configs/base_config.py",
    policy=(f"{__name__}:scored", {}),
    ascends="grpo",
)
FUNCTION = Setting.of(
    f"{FUNCTIONS}:compute_approx_kl",
    {"log_probs": "@logp", "log_probs_base": "@ref_logp", "action_mask": "@mask"},
    source=LOSS.source,
)
DISTILLED = Setting.of(
    distilled,
    {"topk": 2},
    name="distillation",
    depth="function",
    source=f"{TREE}/pipeline/distill/various_divergence.py",
    note="The reference is the teacher. A support has two tokens of four, where its default is 64 of a model's.",
)
OPD = Setting.of(
    opd,
    options=STEP_OF_TOKENS,
    source=LOSS.source,
    note="Pure on-policy distillation: the reference is the teacher, and there is no reward.",
)
KINDS = ("forward_kl", "reverse_kl", "skewed_forward_kl", "skewed_reverse_kl", "js_divergence", "adaptive_kl")

ADAPTER = Adapter.cloned(
    "roll",
    HOME,
    COMMIT,
    FUNCTIONS,
    module=FUNCTIONS,
    settings=(
        LOSS.by_default("roll.configs.base_config:PPOConfig.use_kl_loss"),
        LOSS.variant({"loss_agg_mode": "seq-mean-token-sum"}),
        *(FUNCTION.variant({"kl_penalty": kind}, kind) for kind in ("kl", "abs", "mse", "k3")),
        DISTILLED.by_default("the loss itself"),
        DISTILLED.variant({"kd_objective": "reverse_kl"}, "reverse_kl"),
        *(
            DISTILLED.variant(
                {"kd_objective": kind, "topk": 0}, label(kind, topk=0), note="The reference is the teacher."
            )
            for kind in KINDS
        ),
        OPD.by_default("roll.configs.base_config:PPOConfig.is_pure_opd"),
    ),
)
