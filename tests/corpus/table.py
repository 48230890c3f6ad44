"""The corpus: one row a loss, with how it is to be graded, whether it is right, and which checks are true of it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    target: str  # file:function or file:Class.method
    right: bool
    expect: str = "reverse_kl"
    placement: str = "loss"
    credit: str = "return"
    sampler: str | None = None  # None: the default
    arguments: dict[str, Any] = field(default_factory=dict)
    group_size: int | None = None
    batch_size: int | None = None
    environment: str | None = None
    defect: str = ""
    level: str = ""  # of the defect: error, or warning where ordinary input shows nothing
    codes: frozenset[str] = frozenset()  # one of them at least is to be named
    forbidden: frozenset[str] = frozenset()  # these would be false
    # how far out the defect shows: tokens of a rollout, rows of a batch, log-ratio of a token to the reference or to
    # the sampler (rollouts of two tokens), columns beyond the longest rollout of three; empty: in small environments
    reach: dict[str, float] = field(default_factory=dict)
    tolerance: float = 1e-9


def codes(text: str) -> frozenset[str]:
    return frozenset(f"KL{code}" for code in text.split())


def right(target: str, expect: str = "reverse_kl", forbidden: str = "", name: str = "", **options: Any) -> Case:
    return Case(name or target.partition(":")[2], target, True, expect, forbidden=codes(forbidden), **options)


def wrong(
    target: str,
    defect: str,
    named: str,
    expect: str = "reverse_kl",
    forbidden: str = "",
    level: str = "error",
    **options: Any,
) -> Case:
    name = target.partition(":")[2]
    return Case(
        name,
        target,
        False,
        expect,
        defect=defect,
        level=level,
        codes=codes(named),
        forbidden=codes(forbidden),
        **options,
    )


TRAINERS, TERMS, CAREFUL, GROUPS = "losses_trainers.py:", "losses_terms.py:", "losses_careful.py:", "losses_groups.py:"
OFF_POLICY, FAR, WRONG = "losses_offpolicy.py:", "losses_far.py:", "losses_wrong.py:"
LOCAL, LOCAL_FORWARD = "local_reverse_kl", "local_forward_kl"
SHAPED: dict[str, Any] = {"placement": "shaped-reward"}
# what is never true of a right loss without groups, whatever warnings it earns
FALSE = "101 102 103 105 201 202 203 204 205 206 207 501 505 507 508 510 601"
GROUPED = "101 102 103 105 203 204 206 207 402 403 501 505 510"

RIGHT = [
    right(TRAINERS + "compute_policy_loss", LOCAL, FALSE),
    right(TRAINERS + "dr_grpo_loss", LOCAL, FALSE + " 106"),
    right(TRAINERS + "PPOTrainer.compute_loss", LOCAL, FALSE),
    right(TRAINERS + "cispo_loss", LOCAL, FALSE + " 106"),
    right(TRAINERS + "gspo_loss", forbidden=FALSE),
    right(TRAINERS + "reinforce_plus_plus_loss", forbidden=FALSE),
    right(TRAINERS + "ppo_with_entropy_bonus", LOCAL, FALSE + " 702"),
    right(TRAINERS + "MicroBatchActor.update_policy", LOCAL, FALSE),
    right(TRAINERS + "grpo_named_tuple", LOCAL, FALSE),
    right(TRAINERS + "actor_loss_dataclass", forbidden=FALSE),
    right(TRAINERS + "AdaptiveTrainer.loss", forbidden=FALSE),
    right(TRAINERS + "loss_under_autocast", LOCAL, FALSE),
    right(TRAINERS + "reinforce_with_empty_rows", forbidden=FALSE),
    right(TRAINERS + "loss_in_float32", LOCAL, FALSE, tolerance=1e-4),
    right(TRAINERS + "loss_with_nan_guard", LOCAL, FALSE + " 502"),
    right(TRAINERS + "loss_with_wide_clamp", LOCAL, FALSE),
    right(TRAINERS + "loss_by_packed_tokens", LOCAL, FALSE + " 502"),
    right(TRAINERS + "summed_loss", LOCAL, FALSE),
    right(TRAINERS + "chunked_vocabulary_loss", LOCAL, FALSE),
    right(
        TRAINERS + "EMAReferenceTrainer.kl_loss",
        forbidden=FALSE,
        arguments={"policy_lp": "@logp", "anchor_lp": "@ref_logp", "live": "@mask"},
    ),
    right(TRAINERS + "kl_with_baseline", forbidden=FALSE + " 402"),
    right(TRAINERS + "GradientAccumulator.forward", forbidden=FALSE),
    right(TERMS + "low_var_kl", LOCAL_FORWARD, FALSE),
    right(TERMS + "mse_kl", LOCAL, FALSE),
    right(TERMS + "masked_mse_kl", LOCAL, FALSE + " 502"),
    right(TERMS + "straight_through_kl", LOCAL, FALSE),
    right(TERMS + "sequence_k3", "forward_kl", FALSE),
    right(TERMS + "full_kl_div", LOCAL, FALSE),
    right(TERMS + "full_kl_forward", LOCAL_FORWARD, FALSE),
    right(TERMS + "full_kl_by_logsumexp", LOCAL, FALSE),
    right(TERMS + "generalized_divergence", LOCAL, FALSE + " 403"),
    right(TERMS + "rao_blackwell_loss", forbidden=FALSE),
    right(TERMS + "top_k_with_sampled_tail", LOCAL, FALSE + " 701"),
    right(TERMS + "chi_square_penalty", "chi_square", FALSE),
    right(TERMS + "absolute_penalty", "total_variation", FALSE),
    right(TERMS + "sequence_ratio_k2", forbidden=FALSE + " 301 302 303 306"),
    right(TERMS + "sequence_ratio_differentiable", forbidden=FALSE + " 301 302 303 306"),
    right(TERMS + "prefix_ratio_k2", LOCAL, FALSE + " 301 302 303 306"),
    right(TERMS + "prefix_ratio_to_go", forbidden=FALSE + " 301 302 303 306"),
    right(TERMS + "token_ratio_k3", LOCAL, FALSE, name="token_ratio_k3_on_policy", sampler="current"),
    right(TERMS + "token_ratio_k3", LOCAL + "@sampler", FALSE + " 303", sampler="stale"),
    right(TERMS + "token_ratio_k3_detached", LOCAL_FORWARD + "@sampler", FALSE + " 303", sampler="stale"),
    right(TERMS + "apply_kl_penalty", forbidden=FALSE, **SHAPED),
    right(TERMS + "apply_kl_penalty", forbidden=FALSE, name="apply_kl_penalty_to_go", credit="to-go", **SHAPED),
    right(TERMS + "shape_rewards", forbidden=FALSE, **SHAPED),
    right(TERMS + "compute_reward", forbidden=FALSE, **SHAPED),
    right(TERMS + "RewardManager.discounted", forbidden=FALSE + " 502", **SHAPED),
    right(
        TERMS + "RewardManager.penalty",
        forbidden=FALSE,
        placement="reward",
        arguments={"policy_logprobs": "@logp", "reference_logprobs": "@ref_logp", "alive": "@mask"},
    ),
    right(TERMS + "kl_penalty", forbidden=FALSE, placement="reward"),
    right(TERMS + "kl_penalty", LOCAL, FALSE, "kl_penalty_immediate", placement="reward", credit="immediate"),
    right(TERMS + "sequence_k3_value", "reverse_kl-forward_kl", FALSE + " 104", placement="reward"),
    right(TERMS + "weighted_cost", forbidden=FALSE + " 301 306", placement="reward"),
    right(TERMS + "half_and_half", forbidden=FALSE + " 502", placement="both"),
    right(GROUPS + "rloo_loss", forbidden=GROUPED, group_size=4),
    right(GROUPS + "grpo_loss", LOCAL, GROUPED + " 401", group_size=4),
    right(GROUPS + "grpo_loss_by_ids", forbidden=GROUPED + " 401", group_size=4),
    right(GROUPS + "corrected_group_mean", forbidden=GROUPED + " 106", group_size=4),
    right(GROUPS + "GroupTrainer.compute_loss", forbidden=GROUPED + " 401", group_size=2),
    right(CAREFUL + "mean_times_width", LOCAL, FALSE),
    right(CAREFUL + "token_mean_times_tokens", LOCAL, FALSE),
    right(CAREFUL + "mse_sum", LOCAL, FALSE + " 502"),
    right(CAREFUL + "decorated_distribution_kl", LOCAL, FALSE),
    right(CAREFUL + "cross_entropy_less_entropy", LOCAL, FALSE),
    right(CAREFUL + "soft_target_distillation", LOCAL_FORWARD, FALSE),
    right(CAREFUL + "immediate_score", LOCAL, FALSE),
    right(
        CAREFUL + "outer_product_penalty",
        forbidden=FALSE,
        arguments={"pi_lp": "@logp", "base_lp": "@ref_logp", "keep": "@mask"},
    ),
    right(CAREFUL + "local_and_future", forbidden=FALSE),
    right(CAREFUL + "entropy_and_cross_term", LOCAL, FALSE),
    right(CAREFUL + "generous_window", forbidden=FALSE),
    right(CAREFUL + "generous_ratio", forbidden=FALSE + " 301 302 303"),
    right(CAREFUL + "product_of_ratios", LOCAL, FALSE + " 301 302 303 306"),
    right(CAREFUL + "ratio_in_both_places", forbidden=FALSE + " 301 302 303 306"),
    right(CAREFUL + "generalised_advantages", forbidden=FALSE),
    right(CAREFUL + "row_by_row", forbidden=FALSE + " 502"),
    right(CAREFUL + "keyword_only", LOCAL, FALSE),
    right(CAREFUL + "KLEstimator.k2", LOCAL, FALSE),
    right(CAREFUL + "KLEstimator.estimate", forbidden=FALSE),
    right(CAREFUL + "k3_both", forbidden=FALSE + " 502", placement="both"),
    right(CAREFUL + "control_variate", forbidden=FALSE, placement="both"),
    right(CAREFUL + "reward_without_overlong", forbidden=FALSE, **SHAPED),
    right(CAREFUL + "spread_reward", forbidden=FALSE, **SHAPED),
    right(CAREFUL + "low_precision_metrics", LOCAL, FALSE),
    right(CAREFUL + "leave_one_out_by_ids", forbidden=GROUPED, group_size=4),
    right(CAREFUL + "tied_groups_keep_penalty", LOCAL, GROUPED + " 401", group_size=4),
    right(CAREFUL + "groups_looped", forbidden=GROUPED + " 401", group_size=2),
]

CAP = {"defect": "ratio cap", "named": "306"}
LATE, CUT, CLAMP = "late window", "batch coupling", "reference clamp"
WRONG_CASES = [
    wrong(
        OFF_POLICY + "truncated_token_ratio", expect=LOCAL + "@sampler", sampler="stale", reach={"sampler": 2}, **CAP
    ),
    wrong(
        OFF_POLICY + "bias_corrected_with_cap", expect=LOCAL + "@sampler", sampler="stale", reach={"sampler": 3}, **CAP
    ),
    wrong(OFF_POLICY + "OffPolicyCorrection.sequence_truncated", reach={"sampler": 5}, **CAP),
    wrong(OFF_POLICY + "OffPolicyCorrection.bounded_log_ratio", expect=LOCAL, reach={"sampler": 3}, **CAP),
    wrong(OFF_POLICY + "OffPolicyCorrection.veto", "off-policy rows dropped", "306 105", reach={"sampler": 5}),
    wrong(
        OFF_POLICY + "OffPolicyCorrection.geometric_mask", "off-policy rows dropped", "306 105", reach={"sampler": 3}
    ),
    wrong(OFF_POLICY + "OffPolicyCorrection.far_cap", level="warning", reach={"sampler": 14}, **CAP),
    wrong(OFF_POLICY + "missing_ratio_reward", "missing ratio", "301", sampler="both"),
    wrong(OFF_POLICY + "token_ratio_only", "token ratio only", "303", LOCAL),
    wrong(OFF_POLICY + "detached_ratio", "detached ratio", "302 102"),
    wrong(OFF_POLICY + "broadcast_sequence_ratio", "broadcast ratio", "304", LOCAL),
    wrong(OFF_POLICY + "stale_kl_reward", "stale log-probs", "305"),
    wrong(OFF_POLICY + "sampler_as_reference", "stale reference", "101 105 305"),
    wrong(OFF_POLICY + "clipped_penalty_ratio", "clipped ratio", "306"),
    wrong(OFF_POLICY + "self_moving_reference", "moving reference", "105 106 506"),
    wrong(OFF_POLICY + "inverse_ratio", "inverse ratio", "105", forbidden="301"),
    wrong(FAR + "bounded_k2", CLAMP, "504", LOCAL, reach={"reference": 3}),
    wrong(FAR + "clamped_low_var_kl", CLAMP, "504", LOCAL_FORWARD, reach={"reference": 4}),
    wrong(FAR + "bounded_kl_reward", CLAMP, "504", reach={"reference": 5}, **SHAPED),
    wrong(FAR + "huber_kl", CLAMP, "504 105", LOCAL, reach={"reference": 4}),
    wrong(FAR + "far_bounded_k2", CLAMP, "504", LOCAL, level="warning", reach={"reference": 14}),
    wrong(FAR + "far_bounded_row", CLAMP, "504", level="warning", reach={"reference": 10}),
    wrong(FAR + "BatchedTrainer.truncated_batch", CUT, "204 206 106", reach={"rows": 9}),
    wrong(FAR + "BatchedTrainer.dropped_remainder", CUT, "204 206 106", reach={"rows": 5}),
    wrong(FAR + "BatchedTrainer.summed_micro_batches", CUT, "204 206 106", reach={"rows": 9}),
    wrong(FAR + "BatchedTrainer.unequal_micro_batches", CUT, "206", level="warning", reach={"rows": 17}),
    wrong(FAR + "BatchedTrainer.longest_dropped", CUT, "204 206 105", reach={"rows": 9}),
    wrong(FAR + "BatchedTrainer.token_budget", CUT, "204 206 203", reach={"rows": 17}),
    wrong(FAR + "BatchedTrainer.centred_beyond_four", CUT, "402 204 206", reach={"rows": 5}),
    wrong(FAR + "bessel_rows", "(n-1)/n", "204 206 106", forbidden="402", reach={"rows": 2}),
    wrong(FAR + "smoothed_mean", "(n-1)/n", "204 206 106", forbidden="402", reach={"rows": 2}),
    wrong(FAR + "last_row_left_out", "(n-1)/n", "204 206 106", forbidden="402", reach={"rows": 2}),
    wrong(FAR + "discount_after_eight", LATE, "205 105", reach={"tokens": 8}, **SHAPED),
    wrong(FAR + "first_sixteen", LATE, "105 205 201 504", LOCAL, reach={"tokens": 16}),
    wrong(FAR + "windowed_credit", LATE, "205 105 201", reach={"tokens": 40}),
    wrong(FAR + "decayed_credit", LATE, "205 105 201", reach={"tokens": 5}),
    wrong(FAR + "overlong_filter", LATE, "105 101 203 504", reach={"tokens": 40}),
    wrong(FAR + "long_rows_divided", LATE, "203 105", reach={"tokens": 6}),
    wrong(FAR + "prefix_exempt_later", LATE, "105 205 201", LOCAL, reach={"tokens": 5}),
    wrong(FAR + "autocast_full_kl", "precision", "508", LOCAL, level="warning", reach={"float32": 1}),
    wrong(FAR + "half_k2", "precision", "508", LOCAL, level="warning", reach={"float32": 1}),
    wrong(FAR + "bfloat16_ratio", "precision", "508", LOCAL_FORWARD, level="warning", reach={"float32": 1}),
    wrong(FAR + "quantised_log_ratio", "precision", "508", reach={"float32": 1}),
    wrong(FAR + "batch_k2", "batch in one ratio", "206", forbidden="204 105", level="warning"),
    wrong(FAR + "batch_reinforce", "batch in one ratio", "206", forbidden="204 105", level="warning"),
    wrong(FAR + "batch_k3", "batch in one ratio", "206", "forward_kl", forbidden="204 105", level="warning"),
    wrong(FAR + "batch_token_k2", "batch in one ratio", "206", LOCAL, forbidden="204 105", level="warning"),
    wrong(FAR + "mean_over_columns", "padded columns", "207", LOCAL, forbidden="501"),
    wrong(FAR + "mean_over_batch_width", "padded columns", "207", forbidden="501"),
    wrong(FAR + "padded_to_eight", "padded columns", "207", forbidden="501", reach={"padding": 6}),
    wrong(FAR + "cut_at_twelve", "padded columns", "207", forbidden="501", reach={"padding": 10}),
    wrong(WRONG + "k1_penalty", "k1 as loss", "101"),
    wrong(WRONG + "k3_penalty", "k3 as loss", "102", LOCAL),
    wrong(WRONG + "swapped_kl_div", "swapped kl_div", "102", LOCAL),
    wrong(WRONG + "token_k2", "partial gradient", "201"),
    wrong(WRONG + "full_kl_as_sequence", "partial gradient", "201"),
    wrong(WRONG + "wrong_sign", "sign", "103", **SHAPED),
    wrong(WRONG + "wrong_sign_loss", "sign", "103"),
    wrong(WRONG + "row_mean", "1/T", "203", LOCAL),
    wrong(WRONG + "mean_log_ratio_return", "1/T", "203"),
    wrong(WRONG + "token_mean_ppo", "1/T", "203 204", LOCAL),
    wrong(WRONG + "last_token_only", "last token", "202"),
    wrong(WRONG + "k3_reward", "k3 in reward", "104", **SHAPED),
    wrong(WRONG + "discounted_returns", "discount", "205 105"),
    wrong(WRONG + "truncated_head", "top-k", "701 105", LOCAL),
    wrong(WRONG + "tempered_policy", "temperature", "702 105", LOCAL),
    wrong(WRONG + "PenaltyTrainer.ignored", "coefficient ignored", "510 101 509"),
    wrong(WRONG + "PenaltyTrainer.hinge", "batch gate", "204 105 504", LOCAL, forbidden="510"),
    wrong(WRONG + "PenaltyTrainer.gated", "batch gate", "204 105 504", forbidden="510"),
    wrong(WRONG + "PenaltyTrainer.scaled_by_kl", "batch gate", "204 105", LOCAL, forbidden="510"),
    wrong(WRONG + "entropy_bonus_reward", "entropy in reward", "105 104", forbidden="702", **SHAPED),
    wrong(WRONG + "soft_reward", "entropy in reward", "105 104", forbidden="702", **SHAPED),
    wrong(WRONG + "max_entropy_loss", "entropy in reward", "105 104", forbidden="702"),
    wrong(WRONG + "mixture_of_directions", "mixture called beta", "105", LOCAL, forbidden="106 403 104"),
    wrong(WRONG + "skewed_kl", "mixture called beta", "105", LOCAL, forbidden="106 403 510"),
    wrong(WRONG + "jensen_shannon", "mixture called beta", "105", LOCAL, forbidden="106 403 510"),
    wrong(WRONG + "unmasked_sum", "padding leak", "501", LOCAL),
    wrong(WRONG + "mask_one_late", "padding leak", "501", LOCAL),
    wrong(WRONG + "mask_from_tokens", "padding leak", "501"),
    wrong(WRONG + "masked_after_sum", "padding leak", "501"),
    wrong(WRONG + "masked_token_k2", "NaN at masked", "502", LOCAL, level="warning"),
    wrong(WRONG + "masked_token_k1", "NaN at masked", "502", level="warning", placement="reward"),
    wrong(WRONG + "masked_token_full", "NaN at masked", "502", LOCAL, level="warning"),
    wrong(WRONG + "overflowing_ratio", "overflow", "503", level="warning"),
    wrong(WRONG + "mutated_reference", "input mutated", "505", LOCAL),
    wrong(WRONG + "logs_unmasked_mean", "logged value", "601 604", LOCAL),
    wrong(WRONG + "logs_k2", "logged value", "601", LOCAL),
    wrong(WRONG + "logs_weighted", "logged value", "601 602"),
    wrong(WRONG + "logs_mutated", "logged value", "601 603"),
    wrong(GROUPS + "GroupTrainer.masked_groups", "masked groups", "401", LOCAL, group_size=2),
    wrong(GROUPS + "tied_groups_dropped", "masked groups", "401", LOCAL, group_size=4),
    wrong(GROUPS + "dynamic_sampling_loss", "masked groups", "401", LOCAL, group_size=4),
    wrong(GROUPS + "rloo_self_inclusive", "self in baseline", "402", group_size=4),
    wrong(GROUPS + "kl_in_normalised_reward", "KL before normalisation", "403 105", group_size=4),
    wrong(GROUPS + "grpo_token_mean", "grouped token mean", "204", LOCAL, "203", group_size=4),
    wrong(GROUPS + "dapo_loss", "grouped token mean", "204", LOCAL, "203", group_size=2),
    wrong(GROUPS + "grpo_mean_group_length", "grouped token mean", "204", LOCAL, "203", group_size=4),
    wrong(GROUPS + "best_of_group_penalty", "group selection", "105 401", LOCAL, "203", group_size=4),
]

CASES = RIGHT + WRONG_CASES
