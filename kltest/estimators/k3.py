"""k3, w − 1 + u with w = ref/π = e^(−u): in a loss, a reward or both, clamped, turned round, with importance ratios."""

from kltest.estimators.spec import Spec, everywhere, local, register


@register(
    Spec(
        name="k3-loss",
        aliases=("k3", "grpo-kl"),
        formula="Σ_t (w_t − 1 + u_t),  w = e^(−u)",
        source="Shao et al. 2024 (DeepSeekMath, GRPO), Eq. 4; Schulman 2020 for the value",
        placement="loss",
        claims="an unbiased, non-negative, low-variance estimate of KL(π‖ref)",
        known_false="the value is unbiased; its gradient is the forward KL's, token by token",
        identified={"current": local("forward_kl"), "stale": local("forward_kl@rollouts")},
        per_token=True,
    )
)
def k3_loss(logp, ref_logp):
    """w − 1 + u per token. Value: KL(π‖ref). Gradient: (1 − w)·g, the forward KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (-u).exp() - 1 + u


@register(
    Spec(
        name="k3-loss-sequence",
        formula="e^(−Σu) − 1 + Σu",
        source="Schulman 2020 for the value; Tang & Munos 2025 (arXiv 2506.09477)",
        placement="loss",
        claims="an unbiased, non-negative estimate of the sequence-level KL(π‖ref)",
        known_false=(
            "the value is unbiased; its gradient is that of KL(ref‖π), and the weight e^(−Σu) grows with the length"
        ),
        identified={"current": everywhere({"forward_kl": 1.0}), "stale": everywhere({"forward_kl@rollouts": 1.0})},
    )
)
def k3_loss_sequence(logp, ref_logp, mask):
    """e^(−Σu) − 1 + Σu per sequence. Value: KL(π‖ref). Gradient: (1 − e^(−Σu))·Σg, the forward KL's. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    return (-u).exp() - 1 + u


@register(
    Spec(
        name="k3-clamped",
        aliases=("low_var_kl",),
        formula="Σ_t clamp(w_t − 1 + u_t, −10, 10)",
        source="verl, trainer/ppo/core_algos.py, kl_penalty 'low_var_kl'",
        placement="loss",
        claims="k3, made safe against overflow",
        known_false=(
            "if the clamp is silent it is k3 as a loss, the forward KL's gradient; at u below −2.6 or above 11 it has "
            "no gradient at all, just where the policy is furthest from the reference"
        ),
        identified={"current": local("forward_kl"), "stale": local("forward_kl@rollouts")},
        per_token=True,
    )
)
def k3_clamped(logp, ref_logp, log_bound=20.0, bound=10.0):
    """clamp(w − 1 + u, ±bound), u clamped to ±log_bound. Gradient: (1 − w)·g, 0 beyond the bounds. (B, T) → (B, T)."""
    u = (logp - ref_logp).clamp(-log_bound, log_bound)
    return ((-u).exp() - 1 + u).clamp(-bound, bound)


@register(
    Spec(
        name="k3-inverted",
        formula="Σ_t (e^(u_t) − 1 − u_t)",
        source="Schulman 2020, with the two policies of k3 exchanged",
        placement="loss",
        claims="k3: non-negative and of low variance",
        known_false=(
            "it would be k3 for samples from the reference; for samples from the policy its value is χ²(π‖ref) − "
            "KL(π‖ref) and it follows ½χ²(π‖ref), token by token"
        ),
        identified={"current": local("chi_square"), "stale": local("chi_square@rollouts")},
        per_token=True,
    )
)
def k3_inverted(logp, ref_logp):
    """e^u − 1 − u per token. Value: not KL(π‖ref). Gradient: (e^u − 1)·g, half a chi-square's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u.exp() - 1 - u


@register(
    Spec(
        name="k3-straight-through",
        aliases=("k3+", "low_var_kl+", "straight-through"),
        formula="Σ_t [sg(w_t − 1 + u_t) + u_t²/2 − sg(u_t²/2)]",
        source=(
            "verl, trainer/ppo/core_algos.py, kl_penalty 'k3+' and 'low_var_kl+'; Liu et al. 2025 (arXiv 2510.01555) "
            "for the gradient"
        ),
        placement="loss",
        claims="an unbiased value together with an unbiased gradient of KL(π‖ref)",
        known_false=(
            "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy no ratio "
            "corrects it"
        ),
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl@rollouts")},
        per_token=True,
    )
)
def k3_straight_through(logp, ref_logp):
    """k3 in value, k2 in gradient. Value: KL(π‖ref). Gradient: u·g, as k2-loss's. (B, T) → (B, T)."""
    u = logp - ref_logp
    k2 = u.square() / 2
    k3 = (-u).exp() - 1 + u
    return k3.detach() + k2 - k2.detach()


@register(
    Spec(
        name="k3-reward",
        formula="Σ_t log π_t · sg(Σ_s (w_s − 1 + u_s))",
        source="Shah et al. 2025 (arXiv 2512.21852), K3 in reward",
        placement="reward",
        claims="an unbiased, non-negative, low-variance KL penalty in the reward",
        known_false=(
            "the value is unbiased; w depends on the policy, so the gradient lacks the forward KL's, token by token, "
            "and vanishes to first order near the reference at T = 1"
        ),
        identified={
            "current": {
                "bandit": {"reverse_kl": 1.0, "forward_kl": -1.0},
                "tokens": {"reverse_kl": 1.0, "local_forward_kl": -1.0},
            },
            "stale": {
                "bandit": {"reverse_kl@rollouts": 1.0, "forward_kl@rollouts": -1.0},
                "tokens": {
                    "reverse_kl@rollouts": 1.0,
                    "local_forward_kl@rollouts": -1.0,
                    "other_tokens_forward_kl@rollouts": -1.0,
                },
            },
        },
        per_token=True,
    )
)
def k3_reward(logp, ref_logp):
    """w − 1 + u per token, as a cost. Value: KL(π‖ref). Gradient as placed: Σg·Σ(w − 1 + u). (B, T) → (B, T)."""
    u = logp - ref_logp
    return (-u).exp() - 1 + u


@register(
    Spec(
        name="k3-reward-sequence",
        formula="Σ_t log π_t · sg(e^(−Σu) − 1 + Σu)",
        source="Schulman 2020 for the value; Shah et al. 2025 (arXiv 2512.21852), K3 in reward",
        placement="reward",
        claims="an unbiased, non-negative estimate of the sequence-level KL(π‖ref) in the reward",
        known_false=(
            "the value is unbiased; the gradient lacks the forward KL's and vanishes to first order near the reference"
        ),
        identified={
            "current": everywhere({"reverse_kl": 1.0, "forward_kl": -1.0}),
            "stale": everywhere({"reverse_kl@rollouts": 1.0, "forward_kl@rollouts": -1.0}),
        },
    )
)
def k3_reward_sequence(logp, ref_logp, mask):
    """e^(−Σu) − 1 + Σu per sequence, as a cost. Value: KL(π‖ref). Gradient as placed: that times Σg. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    return (-u).exp() - 1 + u


@register(
    Spec(
        name="k3-both",
        formula="Σ_t (w_t − 1 + u_t) + Σ_t log π_t · sg(Σ_s (w_s − 1 + u_s))",
        source="Tang & Munos 2025 (arXiv 2506.09477): the product rule for E_π[k]",
        placement="both",
        claims="the gradient of the sequence-level KL(π‖ref), each half cancelling the other's bias",
        known_false=(
            "only with the full coefficient in both places; off-policy it is biased without the full-sequence ratio"
        ),
        identified={
            "current": everywhere({"reverse_kl": 1.0}),
            "stale": {
                "bandit": {"reverse_kl@rollouts": 1.0},
                "tokens": {"reverse_kl@rollouts": 1.0, "other_tokens_forward_kl@rollouts": -1.0},
            },
        },
        per_token=True,
    )
)
def k3_both(logp, ref_logp):
    """w − 1 + u per token, in both places. Value: KL(π‖ref). Gradient as placed: the reverse KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (-u).exp() - 1 + u


@register(
    Spec(
        name="k3-ratio",
        aliases=("use_bias_correction_kl",),
        formula="Σ_t ρ_t (w_t − 1 + u_t),  ρ = π/μ",
        source="DeepSeek-V3.2 (arXiv 2512.02556), Eq. 7; TRL, GRPOConfig.use_bias_correction_kl",
        placement="loss",
        claims="an unbiased estimate of KL(π‖ref) in value and gradient",
        known_false=(
            "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy the "
            "prefixes stay the sampler's"
        ),
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl", at="@sampler")},
        per_token=True,
    )
)
def k3_ratio(logp, ref_logp, old_logp):
    """ρ·(w − 1 + u) per token. Value: KL(π‖ref), prefixes from μ. Gradient: ρ·u·g. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp() * ((-u).exp() - 1 + u)


@register(
    Spec(
        name="k3-ratio-detached",
        formula="Σ_t sg(ρ_t) (w_t − 1 + u_t)",
        source=(
            "Zhang et al. 2025 (RPG, arXiv 2505.17508) on what the ratio must weight; DeepSeek-V3.2 (arXiv "
            "2512.02556), Eq. 7, with the ratio detached"
        ),
        placement="loss",
        claims="k3 with its importance correction",
        known_false="without the ratio's own gradient it is k3 as a loss: the forward KL's, token by token",
        identified={"current": local("forward_kl"), "stale": local("forward_kl", at="@sampler")},
        per_token=True,
    )
)
def k3_ratio_detached(logp, ref_logp, old_logp):
    """sg(ρ)·(w − 1 + u) per token. Value: as k3-ratio. Gradient: ρ·(1 − w)·g, the forward KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp().detach() * ((-u).exp() - 1 + u)


_MIXED = {
    "reverse_kl@mean_ratio": 1 / 3,
    "local_forward_kl@mean_ratio": 2 / 3,
    "other_tokens_forward_kl@mean_ratio": -1 / 3,
}


@register(
    Spec(
        name="k3-broadcast-ratio",
        formula="Σ_t ρ̄ (w_t − 1 + u_t),  ρ̄ = (Π_s ρ_s)^(1/L)",
        source="TRL, GRPOTrainer with importance_sampling_level='sequence' and use_bias_correction_kl",
        placement="loss",
        claims="k3 with its importance correction, at the level of the sequence",
        known_false=(
            "on-policy at a fixed length T it follows the forward KL's token-by-token gradient, 1/T of the way towards"
            " the reverse KL's; off-policy, for T > 1, it is biased further, about as much as without a ratio"
        ),
        identified={
            "current": {
                "bandit": {"reverse_kl": 1.0},
                "sequence": {"local_forward_kl": 2 / 3, "reverse_kl": 1 / 3},
                "ragged": None,
                "mdp": {"local_forward_kl": 2 / 3, "reverse_kl": 1 / 3},
            },
            "stale": {"bandit": {"reverse_kl": 1.0}, "ragged": None, "sequence": _MIXED, "mdp": _MIXED},
        },
    )
)
def k3_broadcast_ratio(logp, ref_logp, old_logp, mask):
    """exp(mean log ρ)·(w − 1 + u) per token. Gradient: ρ̄[Σ(1 − w)g + Σk3·Σg/L]; above at T = 3. (B, T) → (B, T)."""
    live = mask != 0
    log_ratio = (logp - old_logp).where(live, 0.0).sum(dim=1, keepdim=True)
    u = (logp - ref_logp).where(live, 0.0)
    return (log_ratio / live.sum(dim=1, keepdim=True).clamp(min=1)).exp() * ((-u).exp() - 1 + u)
