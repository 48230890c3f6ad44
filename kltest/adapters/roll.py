"""ROLL: the loss of its actor, its KL function, and its divergences for distillation."""

from types import SimpleNamespace

from kltest.adapters import STEP_OF_TOKENS, Adapter, Setting
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
    worker = found("roll.pipeline.rlvr.actor_worker", "ActorWorker")
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False))
    config = SimpleNamespace(**{**USUAL, **settings}, kl_loss_coef=beta, train_infer_correction=correction)
    batch = {"response_mask": mask[:, [0, *range(mask.shape[1])]], "ref_log_probs": ref_logp, "input_ids": mask}
    batch |= {"attention_mask": mask, "train_infer_is_weight": mask, "advantages": advantage[:, None].expand_as(mask)}
    totals = {"batch_num_tokens": {"response_mask": mask.sum()}, "global_valid_samples": {"response_mask": len(mask)}}
    data = SimpleNamespace(batch=batch, meta_info=totals, non_tensor_batch={})
    stand_in = SimpleNamespace(
        pipeline_config=config,
        strategy=SimpleNamespace(op_compute_log_probs=lambda **_: logp),
        get_old_log_probs_with_cache=lambda *_: old_logp,
        compute_sample_weights=lambda _, live: logp.new_ones(len(live)),
    )
    loss, metrics = worker.loss_func(stand_in, data, logp)
    return loss, {"kl": metrics["actor/kl_loss@sum"]}


def distilled(logits, ref_logits, kd_objective, kd_temperature=1.0):
    """`VariousDivergence` of each token; the reference is the teacher."""
    config = SimpleNamespace(kd_objective=kd_objective, kd_temperature=kd_temperature)
    divergence = found("roll.pipeline.distill.various_divergence", "VariousDivergence")(config)
    return divergence(logits, ref_logits.exp(), ref_logits, ref_logits.isinf())


LOSS = Setting.of(actor_loss, options=STEP_OF_TOKENS, source=f"{TREE}/configs/base_config.py")
FUNCTION = Setting.of(
    f"{FUNCTIONS}:compute_approx_kl",
    {"log_probs": "@logp", "log_probs_base": "@ref_logp", "action_mask": "@mask"},
    source=LOSS.source,
)
DISTILLED = Setting.of(
    distilled,
    name="distillation",
    depth="function",
    source=f"{TREE}/pipeline/distill/various_divergence.py",
    note="The reference is the teacher.",
)

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
        *(DISTILLED.variant({"kd_objective": f"{kind}_kl"}, kind) for kind in ("forward", "reverse")),
    ),
)
