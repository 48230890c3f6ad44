"""Policy losses by their advantages: what a trainer makes of the rewards of a group, and how it averages tokens.

SPECs say what is ascended, the negative of the expected gradient. Their coefficients are those of groups of four with
rewards of 0 and 1, and of two tokens where rollouts have one length.
"""

from kltest.estimators.groups import group_sum
from kltest.estimators.spec import Combination, everywhere, policy_loss

# What torch.std leaves of the population's normalisation in groups of four, and of eight tokens.
OF_FOUR, OF_EIGHT = (3 / 4) ** 0.5, (7 / 8) ** 0.5


def at_equal_lengths(bandit: Combination, tokens: Combination) -> dict[str, Combination | None]:
    """Return the row of a combination that has no name where lengths vary."""
    return {"bandit": bandit, "sequence": tokens, "ragged": None, "mdp": tokens}


def of_tokens(values, mask):
    """(B,) sums of `values` (B, T) over live tokens."""
    return values.where(mask != 0, 0.0).sum(dim=1)


def lengths(mask):
    """(B,) numbers of live tokens."""
    return (mask != 0).sum(dim=1).double()


def centred(reward, group):
    """(B,) rewards less the mean of their group."""
    return reward - group_sum(reward, group) / group_sum(reward.new_ones(len(reward)), group)


def normalised(reward, group, epsilon):
    """(B,) centred rewards over the group's standard deviation (n − 1) and a small constant."""
    advantage = centred(reward, group)
    rows = group_sum(reward.new_ones(len(reward)), group)
    return advantage / ((group_sum(advantage.square(), group) / (rows - 1).clamp(min=1)).sqrt() + epsilon)


def clipped(logp, old_logp, advantage, low, high):
    """(B, T) PPO's −min(ρA, clip(ρ)A) of each token, for an advantage (B,) or (B, T)."""
    advantage = advantage if advantage.dim() == 2 else advantage.unsqueeze(1)
    ratio = (logp - old_logp).exp()
    return -(ratio * advantage).minimum(ratio.clamp(1 - low, 1 + high) * advantage)


SURROGATE = "−min(ρ_t·A, clip(ρ_t, 1 ± 0.2)·A)"
STD = "A = (R − mean)/(std + 1e−8) over the group's n rollouts"


@policy_loss(
    "reinforce",
    formula="−R·Σ_t log π_t",
    source="Williams 1992 (Machine Learning 8)",
    claims="the policy gradient",
    known_false="without a ratio, rollouts of another sampler bring its preferences along",
    current=everywhere({"expected_reward": 1.0}),
)
def reinforce(logp, mask, reward):
    """−R·Σlog π. Ascends: ∇E[R]. (B, T) → (B,)."""
    return -reward * of_tokens(logp, mask)


@policy_loss(
    "reinforce-leave-one-out",
    formula="−(R_i − (1/(n−1))Σ_(j≠i) R_j)·Σ_t log π_t",
    source="Ahmadian et al. 2024 (RLOO, arXiv 2402.14740); Kool et al. 2019",
    claims="the policy gradient, with less noise",
    known_false="off-policy it needs the full-sequence ratio",
    current=everywhere({"expected_reward": 1.0}),
    stale=everywhere({"expected_reward@rollouts": 1.0}),
    couples=True,
)
def reinforce_leave_one_out(logp, mask, reward, group):
    """−(R − the others' mean of R)·Σlog π. Ascends: ∇E[R]. (B, T) → (B,)."""
    rows = group_sum(reward.new_ones(len(reward)), group)
    advantage = centred(reward, group) * rows / (rows - 1).clamp(min=1)
    return -advantage * of_tokens(logp, mask)


@policy_loss(
    "grpo",
    formula=f"(1/L)Σ_t {SURROGATE},  {STD}",
    source="Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300)",
    claims="the policy gradient of the mean reward",
    known_false=(
        "prompts are weighted by their success rates, long rollouts by their inverse lengths: at one length 1/L of a "
        "utility of the success rate is ascended"
    ),
    current=at_equal_lengths({"success_utility_of4": OF_FOUR}, {"success_utility_of4": OF_FOUR / 2}),
    couples=True,
)
def grpo(logp, old_logp, mask, reward, group, low=0.2, high=0.2, epsilon=1e-8):
    """Clipped ratios, advantages over the deviation, a mean over tokens. Ascends: √((n−1)/n)·∇U/L. (B, T) → (B,)."""
    return of_tokens(clipped(logp, old_logp, normalised(reward, group, epsilon), low, high), mask) / lengths(mask)


@policy_loss(
    "grpo-without-std",
    formula=f"(1/L)Σ_t {SURROGATE},  A = R − mean over the group's n rollouts",
    source="Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), without its change of the length; `scale_rewards=False`",
    claims="the policy gradient of the mean reward",
    known_false="(n − 1)/n of it, and 1/L of each rollout: short rollouts count more",
    current=at_equal_lengths({"expected_reward": 0.75}, {"expected_reward": 0.375}),
    couples=True,
)
def grpo_without_std(logp, old_logp, mask, reward, group, low=0.2, high=0.2):
    """Clipped ratios, centred rewards, a mean over tokens. Ascends: (1 − 1/n)·∇E[R]/L. (B, T) → (B,)."""
    return of_tokens(clipped(logp, old_logp, centred(reward, group), low, high), mask) / lengths(mask)


@policy_loss(
    "dr-grpo",
    formula=f"Σ_t {SURROGATE} / constant,  A = R − mean over the group's n rollouts; the constant is 1 here",
    source="Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783)",
    claims="the unbiased policy gradient",
    known_false="(n − 1)/n of it: the mean holds the rollout itself",
    current=everywhere({"expected_reward": 0.75}),
    couples=True,
)
def dr_grpo(logp, old_logp, mask, reward, group, low=0.2, high=0.2, constant=1.0):
    """Clipped ratios, centred rewards, a sum over tokens. Ascends: (1 − 1/n)·∇E[R]. (B, T) → (B,)."""
    return of_tokens(clipped(logp, old_logp, centred(reward, group), low, high), mask) / constant


@policy_loss(
    "dapo",
    formula=f"Σ_iΣ_t −min(ρ_t·A, clip(ρ_t, 0.8, 1.28)·A) / Σ_i L_i,  {STD}",
    source="Yu et al. 2025 (DAPO, arXiv 2503.14476), without its resampling of tied groups",
    claims="every token counts alike",
    known_false="prompts are weighted by their success rates, tokens by the lengths of the others in the batch",
    current=at_equal_lengths({"success_utility_of4": OF_FOUR}, {"success_utility_of4": OF_FOUR / 2}),
    couples=True,
)
def dapo(logp, old_logp, mask, reward, group, low=0.2, high=0.28, epsilon=1e-8):
    """Clipped ratios, advantages over the deviation, one mean over the batch's tokens. (B, T) → ()."""
    each = of_tokens(clipped(logp, old_logp, normalised(reward, group, epsilon), low, high), mask)
    return each.sum() / lengths(mask).sum()


@policy_loss(
    "gspo",
    formula=f"−min(s·A, clip(s, 1 − 3e−4, 1 + 4e−4)·A),  s = Π_t ρ_t^(1/L),  {STD}",
    source="Zheng et al. 2025 (GSPO, arXiv 2507.18071)",
    claims="a ratio of sequences, as rewards are of sequences",
    known_false="the geometric mean is no importance weight; on-policy it is GRPO, 1/L included",
    current=at_equal_lengths({"success_utility_of4": OF_FOUR}, {"success_utility_of4": OF_FOUR / 2}),
    couples=True,
)
def gspo(logp, old_logp, mask, reward, group, low=3e-4, high=4e-4, epsilon=1e-8):
    """The clipped geometric mean of a rollout's ratios. Ascends on-policy: √((n−1)/n)·∇U/L. (B, T) → (B,)."""
    mean = (of_tokens(logp - old_logp, mask) / lengths(mask)).unsqueeze(1)
    return clipped(mean, 0.0, normalised(reward, group, epsilon), low, high).squeeze(1)


@policy_loss(
    "cispo",
    formula=f"−Σ_iΣ_t sg(min(ρ_t, 1.28))·A·log π_t / Σ_i L_i,  {STD}",
    source="MiniMax 2025 (MiniMax-M1, arXiv 2506.13585)",
    claims="no token loses its gradient to the clip",
    known_false="prompts are weighted by their success rates; where the cap acts, a token's ratio is no longer its own",
    current=at_equal_lengths({"success_utility_of4": OF_FOUR}, {"success_utility_of4": OF_FOUR / 2}),
    couples=True,
)
def cispo(logp, old_logp, mask, reward, group, high=0.28, epsilon=1e-8):
    """Capped, detached ratios before log π, one mean over the batch's tokens. (B, T) → ()."""
    weight = (logp - old_logp).exp().clamp(max=1 + high).detach()
    each = of_tokens(-weight * normalised(reward, group, epsilon).unsqueeze(1) * logp, mask)
    return each.sum() / lengths(mask).sum()


@policy_loss(
    "reinforce-plus-plus",
    formula=f"Σ_iΣ_t {SURROGATE} / Σ_i L_i,  A = (R − mean)/√(var + 1e−8) over all tokens of the batch",
    source="Hu 2025 (REINFORCE++, arXiv 2501.03262), without its KL in the reward; whitened as verl does",
    claims="a baseline that belongs to no prompt",
    known_false=(
        "in a batch of one prompt, as here, it is a group's normalisation; in batches of many prompts the mean and the "
        "deviation are those of all, and easy prompts are pushed up"
    ),
    current=at_equal_lengths({"success_utility_of4": OF_FOUR}, {"success_utility_of4": OF_EIGHT / 2}),
    couples=True,
)
def reinforce_plus_plus(logp, old_logp, mask, reward, low=0.2, high=0.2, epsilon=1e-8):
    """Rewards whitened over the batch's tokens, clipped ratios, a mean over tokens. (B, T) → ()."""
    weight = lengths(mask)
    tokens = weight.sum()
    advantage = reward - (weight * reward).sum() / tokens
    variance = (weight * advantage.square()).sum() / (tokens - 1).clamp(min=1)
    each = of_tokens(clipped(logp, old_logp, advantage / (variance + epsilon).sqrt(), low, high), mask)
    return each.sum() / tokens


@policy_loss(
    "gae",
    formula=f"Σ_t {SURROGATE},  A_t = λ^(L−t)·(R − v): a critic that says v = ½ everywhere, γ = 1, λ = 0.95",
    source="Schulman et al. 2016 (GAE, arXiv 1506.02438); Schulman et al. 2017 (PPO, arXiv 1707.06347)",
    claims="less noise for a small bias",
    known_false=(
        "with a critic that has learned a constant alone, a token is credited by λ to the power of those left, "
        "and what is ascended is the gradient of no function; with λ = 1 it is ∇E[R] for any critic, with the true "
        "values for any λ"
    ),
    current={"bandit": {"expected_reward": 1.0}, "tokens": None},
)
def gae(logp, old_logp, mask, reward, low=0.2, high=0.2, lam=0.95, value=0.5):
    """Clipped ratios of tokens, generalised advantages from a constant critic. (B, T) → (B,)."""
    live = mask != 0
    left = live.flip(1).cumsum(dim=1).flip(1) - 1
    advantage = lam**left * (reward - value).unsqueeze(1)
    return of_tokens(clipped(logp, old_logp, advantage, low, high), mask)


@policy_loss(
    "opo",
    formula="−(R_i − Σ_j L_j·R_j / Σ_j L_j)·Σ_t log π_t,  j over the group's n rollouts",
    source="Hao et al. 2025 (OPO, arXiv 2505.23585)",
    claims="the baseline of least variance, if scores grow as the square root of lengths",
    known_false="the baseline holds the rollout itself: (n − 1)/n of the gradient at one length, unnamed otherwise",
    current=at_equal_lengths({"expected_reward": 0.75}, {"expected_reward": 0.75}),
    stale=at_equal_lengths({"expected_reward@rollouts": 0.75}, {"expected_reward@rollouts": 0.75}),
    couples=True,
)
def opo(logp, mask, reward, group):
    """−(R − length-weighted mean of R)·Σlog π. Ascends at one length: (1 − 1/n)·∇E[R]. (B, T) → (B,)."""
    weight = lengths(mask)
    return -(reward - group_sum(weight * reward, group) / group_sum(weight, group)) * of_tokens(logp, mask)
