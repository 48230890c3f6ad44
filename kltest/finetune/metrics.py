"""Metrics that a run writes, with their meaning; the documentation is made from this table."""


def _ends(name: str, kind: str = "") -> dict[str, str]:
    lower = f"Lower end of its 95 % interval{kind and ' '}{kind}."
    return {f"{name}_low": lower, f"{name}_high": "Upper end of that interval."}


JACKKNIFE = "(jackknife over parts, Student's t)"
METRICS: dict[str, str] = {
    "step": "Number of training steps before; all other numbers of the line are of the policy at that moment.",
    "reward": "Mean reward of the step's training rollouts.",
    "kl_logged": "KL that the term logs on the training rollouts, in nats a rollout: an estimate, and for some terms "
    "not of KL(π‖ref); `kl` is the measurement.",
    "length": "Mean number of tokens of the training rollouts, their end included.",
    "ended": "Share of the training rollouts that ended within max_tokens.",
    "tied_groups": "Share of the step's groups whose rewards are all equal: their advantages are zero, and only the KL "
    "term moves the policy there.",
    "gradient_norm": "Euclidean norm of the gradient over all parameters, before it is scaled down to max_norm; "
    "for several inner epochs that of the first.",
    "gradient_norm_last": "The same of the last inner epoch.",
    "ratio_largest": "Largest importance ratio of a token, π over the sampler, in the last inner epoch.",
    "clipped": "Share of tokens whose ratio lies beyond clip on the side where its gradient is cut, last inner epoch.",
    "sampler_gap": "Largest difference between a token's log-prob in generation and in the update's forward pass: "
    "rounding, or a sampler that is not the policy.",
    "reward_held_out": "Mean reward of fresh rollouts, one for each of eval_prompts held-out prompts.",
    **_ends("reward_held_out", "(Wilson's, which holds for all rewards between 0 and 1; Student's t for others)"),
    "gold_held_out": "Mean of the task's gold score, which training does not see, on the same rollouts.",
    **_ends("gold_held_out"),
    "reward_out_of_distribution": "The reward on prompts longer than any trained on.",
    **_ends("reward_out_of_distribution"),
    "kl": "KL(π‖ref) in nats a rollout, on held-out prompts: the mean of Σ_t KL(π(·|s_t)‖ref(·|s_t)) over the same "
    "fresh rollouts (Rao–Blackwell), independent of the KL term that is trained with.",
    **_ends("kl", "(Student's t over rollouts, each of another prompt)"),
    "kl_out_of_distribution": "The same on prompts longer than any trained on: how far training moves the policy "
    "on prompts that it was never trained on, whether or not it earns anything there.",
    **_ends("kl_out_of_distribution"),
    "entropy": "Mean entropy of the next token, in nats, over the tokens of these rollouts.",
    "length_held_out": "Mean number of tokens of these rollouts.",
    "kl_gradient_cosine": "Cosine between the expected gradient of the KL term as it is placed and the gradient of "
    "KL(π‖ref), both estimated from fresh rollouts of the present policy in gradient_chunks independent parts, the "
    "latter by the Rao–Blackwellised gradient. Inner products are between different parts only, so that noise does not "
    "add to them: the estimate is of the expectations' cosine, and may lie beyond 1. Missing if either "
    "is statistically indistinguishable from 0.",
    **_ends("kl_gradient_cosine", JACKKNIFE),
    "kl_gradient_size": "Norm of the term's expected gradient over that of the gradient of KL(π‖ref), from the same "
    "inner products; 1 for an unbiased term. Missing if the latter "
    "is statistically indistinguishable from 0.",
    **_ends("kl_gradient_size", JACKKNIFE),
    "kl_gradient_noise": "Root of the summed variances of the term's gradient in one batch of the run's size, over the "
    "norm of the gradient of KL(π‖ref).",
    "stale_gradient_cosine": "As `kl_gradient_cosine` before the last inner epoch, with the term on fresh rollouts of "
    "the step's sampler, which is inner_epochs − 1 updates old by then. The gradient of KL(π‖ref) is still from "
    "rollouts of the present policy.",
    **_ends("stale_gradient_cosine", JACKKNIFE),
    "stale_gradient_size": "As `kl_gradient_size`, with these rollouts.",
    **_ends("stale_gradient_size", JACKKNIFE),
    "stale_gradient_noise": "As `kl_gradient_noise`, with these rollouts.",
}
