"""Policy losses as trainers write them, with what each follows, derived by hand."""

import torch


def summed(values, mask):
    return values.where(mask != 0, 0.0).sum(-1)


def reinforce(logp, reward, mask):
    return -reward * summed(logp, mask)


def with_a_given_advantage(logp, advantages, mask):
    return -advantages * summed(logp, mask)


def ratio_of_sequences(logp, old_logp, advantages, mask):
    return -advantages * summed(logp - old_logp, mask).exp()


def ratio_of_tokens(logp, old_logp, advantages, mask):
    return -summed((logp - old_logp).exp() * advantages.unsqueeze(-1), mask)


def clipped_ratio(logp, old_logp, advantages, mask):
    ratio, advantages = (logp - old_logp).exp(), advantages.unsqueeze(-1)
    return -summed(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages), mask)


def truncated_at(cap):
    def truncated(logp, old_logp, advantages, mask):
        weight = summed(logp - old_logp, mask).exp().clamp(max=cap).detach()
        return -weight * advantages * summed(logp, mask)

    return truncated


def masked_beyond_a_band(logp, old_logp, reward, mask):
    weight = summed(logp - old_logp, mask).exp().detach()
    return -weight.where((weight > 0.8) & (weight < 1.25), 0.0) * reward * summed(logp, mask)


def failures_left_out(logp, old_logp, advantages, mask):
    log_ratio = summed(logp - old_logp, mask)
    kept = ~((advantages < 0) & (log_ratio.detach() < -0.1))
    return -log_ratio.exp() * advantages * kept


def weighted_by_the_mean_ratio(logp, old_logp, advantages, mask):
    weight = summed((logp - old_logp).exp(), mask) / (mask != 0).sum(-1)
    return -weight.detach() * advantages * summed(logp, mask)


def ratio_of_the_geometric_mean(logp, rollout_logprobs, reward, mask):
    return -(summed(logp - rollout_logprobs, mask) / (mask != 0).sum(-1)).exp() * (reward - 1)


def weighted_by_what_the_engine_told(logp, rollout_logprobs, advantages, mask):
    return -summed(logp - rollout_logprobs, mask).exp() * advantages


def tokens_weighted_by_what_the_engine_told(logp, vllm_logps, advantages, mask):
    return -summed((logp - vllm_logps).exp().detach() * logp * advantages.unsqueeze(-1), mask)


def squared_distance_to_the_sampler(logp, old_logp, reward, mask):
    centred = (reward - reward.mean()).unsqueeze(-1)
    return -summed(centred * logp - 0.1 * (logp - old_logp) ** 2 / 2, mask).mean()


def centred(logp, reward, mask):
    return -((reward - reward.mean()) * summed(logp, mask)).mean()


def left_out(logp, reward, mask):
    return -((reward - (reward.sum() - reward) / (len(reward) - 1)) * summed(logp, mask)).mean()


def over_the_deviation(logp, reward, mask):
    return -((reward - reward.mean()) / (reward.std() + 1e-6) * summed(logp, mask)).mean()


def over_the_deviation_of_the_population(logp, reward, mask):
    deviation = reward.std(correction=0).clamp_min(1e-12)
    return -((reward - reward.mean()) / deviation * summed(logp, mask)).mean()


def with_a_kl_term(logp, ref_logp, reward, mask, beta=0.04):
    log_ratio = ref_logp - logp
    return -reward * summed(logp, mask) + beta * summed(log_ratio.exp() - log_ratio - 1, mask)


def with_entropy(logp, reward, mask):
    return -reward * summed(logp, mask) + 0.1 * summed(logp, mask).detach() * summed(logp, mask)


def over_all_tokens(logp, reward, mask):
    return -(reward.unsqueeze(-1) * logp).where(mask != 0, 0.0).sum() / mask.sum()


def over_a_constant(logp, reward, mask):
    return -summed(reward.unsqueeze(-1) * logp, mask) / 1024


def discounted(logp, reward, mask):
    left = mask.flip(-1).cumsum(-1).flip(-1) - 1
    return -summed(0.5**left * reward.unsqueeze(-1) * logp, mask)


def later_tokens_count_more(logp, reward, mask):
    return -summed(mask.cumsum(-1) * reward.unsqueeze(-1) * logp, mask)


def wrong_sign(logp, reward, mask):
    return reward * summed(logp, mask)


OF_CUT = {"sampler": "truncated:k=2", "expect": "expected_reward@rollouts"}
# What is graded, the options, the verdict, the codes that fail, and words that the report has.
LOSSES = [
    (reinforce, {}, "confirmed", [], ["{'expected_reward': 1"]),
    (with_a_kl_term, {}, "confirmed", [], ["{'expected_reward': 1"]),
    (with_a_given_advantage, {}, "confirmed", [], []),
    # The whole ratio brings the policy back; those of single tokens leave the sampler's prefixes, which are fixed, so
    # that what is followed, the surrogate, is the gradient of a function of the policy all the same; clipped, too.
    (ratio_of_sequences, {"sampler": "both"}, "confirmed", [], []),
    (ratio_of_tokens, {"sampler": "current"}, "confirmed", [], []),
    (ratio_of_tokens, {"sampler": "both"}, "refuted", ["KL901"], ["'expected_reward@sampler': 1"]),
    (clipped_ratio, {"sampler": "both", "environment": "sequence"}, "refuted", ["KL901"], ["so that it is a gradient"]),
    # A cap that the sampler does not reach, and masks and caps that act; the same two on fresh rollouts.
    (truncated_at(100.0), {"sampler": "both"}, "confirmed", [], []),
    (truncated_at(1.1), {"sampler": "both", "environment": "sequence"}, "refuted", ["KL904"], ["exceeds the noise of a mean over"]),
    (truncated_at(1.1), {"sampler": "current"}, "confirmed", [], []),
    (masked_beyond_a_band, {"sampler": "stale", "environment": "sequence"}, "refuted", ["KL904"], ["right nearer to"]),
    (failures_left_out, {"sampler": "stale", "environment": "sequence"}, "refuted", ["KL904"], []),
    (failures_left_out, {"sampler": "current"}, "confirmed", [], []),
    # Of one token the mean is the ratio.
    (weighted_by_the_mean_ratio, {"sampler": "both", "environment": "bandit"}, "confirmed", [], []),
    (weighted_by_the_mean_ratio, {"sampler": "stale", "environment": "ragged"}, "refuted", ["KL905"], ["arithmetic mean"]),
    (ratio_of_the_geometric_mean, {"sampler": "engine", "environment": "sequence"}, "refuted", ["KL905"], ["geometric"]),
    (weighted_by_what_the_engine_told, {"sampler": "engine"}, "confirmed", [], []),
    (weighted_by_what_the_engine_told, OF_CUT, "refuted", ["KL906"], ["a kept mass of"]),
    (tokens_weighted_by_what_the_engine_told, OF_CUT, "refuted", ["KL906"], ["a kept mass of"]),
    (with_a_given_advantage, OF_CUT, "confirmed", [], []),
    (
        squared_distance_to_the_sampler,
        {"sampler": "stale", "environment": "sequence"},
        "refuted",
        ["KL901"],
        ["'local_to_sampler_kl@rollouts': -0.1000", "'expected_reward@rollouts': 0.7"],
    ),
    (left_out, {}, "confirmed", [], []),
    (centred, {"group_size": 4}, "refuted", ["KL902"], ["{'expected_reward': 0.75", "(n − 1)/n"]),
    (centred, {"group_size": 4, "expect": "0.75*expected_reward"}, "confirmed", [], []),
    (over_the_deviation, {"environment": "bandit"}, "refuted", ["KL902"], ["utility of the success rate"]),
    (over_the_deviation, {"environment": "bandit"}, "refuted", ["KL902"], ["'success_utility_of4': 0.866"]),
    (over_the_deviation_of_the_population, {"expect": "success_utility_of4"}, "confirmed", [], []),
    (over_a_constant, {}, "confirmed", [], []),
    (over_all_tokens, {"environment": "bandit,sequence"}, "refuted", ["KL902"], ["{'expected_reward': 0.333"]),
    (with_entropy, {}, "refuted", ["KL901"], ["'entropy': 0.1"]),
    (with_entropy, {"expect": "expected_reward+0.1*entropy"}, "confirmed", [], []),
    (discounted, {}, "refuted", ["KL903"], ["no function has it for a gradient"]),
    (later_tokens_count_more, {"environment": "sequence"}, "refuted", ["KL903"], []),
    (wrong_sign, {}, "refuted", ["KL901"], ["{'expected_reward': -1"]),
]
