"""k2, half the squared log-ratio u²/2: token by token, summed first, averaged over lengths, with importance ratios."""

from kltest.estimators.spec import Spec, everywhere, local, register


@register(
    Spec(
        name="k2-loss",
        aliases=("k2", "mse"),
        formula="Σ_t u_t²/2",
        source="Schulman 2020 for the value; Liu et al. 2025 (arXiv 2510.01555) for the gradient",
        placement="loss",
        claims="the gradient of KL(π‖ref): as a loss, what k1 is in the reward",
        known_false=(
            "the value is biased; on sequences no token answers for the KL of those after it; off-policy no ratio "
            "corrects it"
        ),
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl@rollouts")},
        per_token=True,
    )
)
def k2_loss(logp, ref_logp):
    """u²/2 per token. Value: E[u²]/2, not the KL. Gradient: u·g, the local reverse KL's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u.square() / 2


@register(
    Spec(
        name="k2-loss-sequence",
        formula="(Σ_t u_t)²/2",
        source="Tang & Munos 2025 (arXiv 2506.09477); Liu et al. 2025 (arXiv 2510.01555)",
        placement="loss",
        claims="the gradient of the sequence-level KL(π‖ref) from a plain loss",
        known_false="the value is biased; off-policy the gradient is exact only with the detached full-sequence ratio",
        identified={"current": everywhere({"reverse_kl": 1.0}), "stale": everywhere({"reverse_kl@rollouts": 1.0})},
    )
)
def k2_loss_sequence(logp, ref_logp, mask):
    """(Σu)²/2 per sequence. Value: E[(Σu)²]/2, not the KL. Gradient: Σu·Σg, the reverse KL's. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0)
    return u.sum(dim=1).square() / 2


@register(
    Spec(
        name="last-token",
        formula="u_L²/2,  L the last live position",
        source="no publication: the KL read off where the reward is paid, at the final token",
        placement="loss",
        claims="a KL penalty on the finished answer",
        known_false="all tokens but the last are unregularised",
        identified={
            "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"last_token_reverse_kl": 1.0}},
            "stale": {"bandit": {"reverse_kl@rollouts": 1.0}, "tokens": {"last_token_reverse_kl@rollouts": 1.0}},
        },
    )
)
def last_token(logp, ref_logp, mask):
    """u²/2 at the last live token, 0 elsewhere. Gradient: u_L·g_L, the reverse KL's there. (B, T) → (B, T)."""
    live = mask != 0
    live_from_here = live.flip(1).cumsum(dim=1).flip(1)
    return (logp - ref_logp).where(live & (live_from_here == 1), 0.0).square() / 2


@register(
    Spec(
        name="length-normalised",
        aliases=("length-normalized",),
        formula="(Σ_t u_t)²/(2L)",
        source=(
            "Shao et al. 2024 (DeepSeekMath, GRPO) divides each response's loss by its length; Liu et al. 2025 (Dr. "
            "GRPO, arXiv 2503.20783) on the bias"
        ),
        placement="loss",
        claims="the KL(π‖ref) per token",
        known_false=(
            "1/T of the reverse KL's gradient at a fixed length T; when lengths vary, ∇E[(Σu − 1)/L]: long answers are"
            " regularised less"
        ),
        identified={
            "current": {
                "bandit": {"reverse_kl": 1.0},
                "sequence": {"reverse_kl": 1 / 3},
                "ragged": None,
                "mdp": {"reverse_kl": 1 / 3},
            },
            "stale": {
                "bandit": {"reverse_kl@rollouts": 1.0},
                "sequence": {"reverse_kl@rollouts": 1 / 3},
                "ragged": None,
                "mdp": {"reverse_kl@rollouts": 1 / 3},
            },
        },
    )
)
def length_normalised(logp, ref_logp, mask):
    """(Σu)²/(2L) per sequence of L tokens. Gradient: Σu·Σg/L; above at T = 3. (B, T) → (B,)."""
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0)
    return u.sum(dim=1).square() / 2 / live.sum(dim=1).clamp(min=1)


@register(
    Spec(
        name="token-mean",
        formula="Σ_b Σ_t u_bt²/2 / Σ_b L_b",
        source="Yu et al. 2025 (DAPO, arXiv 2503.14476), token-level loss; verl, agg_loss 'token-mean'",
        placement="loss",
        claims="every token counts the same",
        known_false=(
            "one rollout's weight depends on the lengths of the others in its batch, so that the gradient depends on "
            "the batch's size"
        ),
        identified={
            "current": {
                "bandit": {"reverse_kl": 1.0},
                "sequence": {"local_reverse_kl": 1 / 3},
                "ragged": None,
                "mdp": {"local_reverse_kl": 1 / 3},
            },
            "stale": {
                "bandit": {"reverse_kl@rollouts": 1.0},
                "sequence": {"local_reverse_kl@rollouts": 1 / 3},
                "ragged": None,
                "mdp": {"local_reverse_kl@rollouts": 1 / 3},
            },
        },
        couples=True,
    )
)
def token_mean(logp, ref_logp, mask):
    """Mean of u²/2 over the batch's live tokens. Gradient: Σ u·g / number of tokens; above at T = 3. (B, T) → ()."""
    live = mask != 0
    k2 = (logp - ref_logp).where(live, 0.0).square() / 2
    return k2.sum() / live.sum().clamp(min=1)


@register(
    Spec(
        name="k2-reward",
        formula="Σ_t log π_t · sg(Σ_s u_s²/2)",
        source="Schulman 2020 for the value; Liu et al. 2025 (arXiv 2510.01555) on k1, k2 and k3 in either place",
        placement="reward",
        claims="a non-negative KL penalty in the reward",
        known_false=(
            "of ∇E[Σu²/2] it has the score-function half only: the reverse KL's gradient, token by token, is missing"
        ),
        identified={
            "current": {
                "bandit": {"squared_log_ratio": 1.0, "reverse_kl": -1.0},
                "tokens": {"squared_log_ratio_sum": 1.0, "local_reverse_kl": -1.0},
            },
            "stale": {
                "bandit": {"squared_log_ratio@rollouts": 1.0, "reverse_kl@rollouts": -1.0},
                "tokens": {"squared_log_ratio_sum@rollouts": 1.0, "local_reverse_kl@rollouts": -1.0},
            },
        },
        per_token=True,
    )
)
def k2_reward(logp, ref_logp):
    """u²/2 per token, as a cost. Value: E[u²]/2, not the KL. Gradient as placed: Σg·Σu²/2. (B, T) → (B, T)."""
    u = logp - ref_logp
    return u.square() / 2


@register(
    Spec(
        name="k2-ratio",
        formula="Σ_t ρ_t u_t²/2",
        source="Schulman 2020 for the value; DeepSeek-V3.2 (arXiv 2512.02556), Eq. 7, with k2 in place of k3",
        placement="loss",
        claims="k2 with its importance correction",
        known_false=(
            "k2's value is biased, and differentiating the ratio brings that bias into the gradient: it follows E[u²]/2"
        ),
        identified={"current": local("squared_log_ratio"), "stale": local("squared_log_ratio", at="@sampler")},
        per_token=True,
    )
)
def k2_ratio(logp, ref_logp, old_logp):
    """ρ·u²/2 per token. Value: E_π[u²]/2, not the KL. Gradient: ρ·(u + u²/2)·g. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp() * u.square() / 2


@register(
    Spec(
        name="k2-ratio-detached",
        aliases=("unbiased_gradient",),
        formula="Σ_t sg(ρ_t) u_t²/2",
        source="Liu et al. 2025 (arXiv 2510.01555); OpenRLHF, compute_approx_kl with unbiased_gradient",
        placement="loss",
        claims="the gradient of KL(π‖ref), corrected for the sampler",
        known_false=(
            "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy the "
            "prefixes stay the sampler's"
        ),
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl", at="@sampler")},
        per_token=True,
    )
)
def k2_ratio_detached(logp, ref_logp, old_logp):
    """sg(ρ)·u²/2 per token. Value: E_π[u²]/2, not the KL. Gradient: ρ·u·g, as k3-ratio's. (B, T) → (B, T)."""
    u = logp - ref_logp
    return (logp - old_logp).exp().detach() * u.square() / 2


@register(
    Spec(
        name="k2-prefix-ratio",
        formula="Σ_t sg(ρ_(1:t)) u_t²/2,  ρ_(1:t) = Π_(s≤t) ρ_s",
        source=(
            "per-decision importance weights after Precup, Sutton & Singh 2000 (Eligibility Traces for Off-Policy "
            "Policy Evaluation)"
        ),
        placement="loss",
        claims="k2 as if on-policy, whatever the sampler",
        known_false=(
            "the sampler is corrected for in full, yet on sequences no token answers for the KL of those after it; the"
            " weights' variance grows with the length"
        ),
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl")},
    )
)
def k2_prefix_ratio(logp, ref_logp, old_logp, mask):
    """sg(ρ_(1:t))·u²/2 per token. Gradient: ρ_(1:t)·u·g, the reverse KL's with prefixes fixed. (B, T) → (B, T)."""
    live = mask != 0
    prefix = (logp - old_logp).where(live, 0.0).cumsum(dim=1).exp()
    return prefix.detach() * (logp - ref_logp).where(live, 0.0).square() / 2
