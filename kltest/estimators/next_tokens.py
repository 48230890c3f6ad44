"""The KL of the next-token distribution, over all tokens or the likeliest ones."""

from kltest.estimators.spec import UNNAMED, Spec, everywhere, local, register


@register(
    Spec(
        name="full-loss",
        aliases=("full",),
        formula="Σ_t KL(π(·|s_t)‖ref(·|s_t))",
        source=(
            "verl, trainer/ppo/core_algos.py, kl_penalty 'full'; Tang & Munos 2025 (arXiv 2506.09477) on the partial "
            "gradient"
        ),
        placement="loss",
        claims="the exact KL(π‖ref) of the next token, without sampling noise in the action",
        known_false="exact in every prefix that was visited; how the policy chooses its prefixes gets no gradient",
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl", at="@sampler")},
        per_token=True,
    )
)
def full_loss(logits, ref_logits):
    """Σ_v π_v (log π_v − log ref_v) per token. Value: KL(π‖ref). Gradient: exact in each prefix. (B, T, V) → (B, T)."""
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logits.exp() * (logits - ref_logits)).sum(dim=-1)


@register(
    Spec(
        name="full-loss-prefix-ratio",
        formula="Σ_t sg(ρ_(1:t−1)) KL(π(·|s_t)‖ref(·|s_t)),  ρ_(1:t−1) = Π_(s<t) ρ_s",
        source=(
            "per-decision importance weights after Precup, Sutton & Singh 2000 (Eligibility Traces for Off-Policy "
            "Policy Evaluation), before the exact KL of a token"
        ),
        placement="loss",
        claims="the exact KL(π‖ref) of the next token as if on-policy, whatever the sampler",
        known_false=(
            "the sampler is corrected for in full, yet how the policy chooses its prefixes gets no gradient; the "
            "weights' variance grows with the length"
        ),
        identified={"current": local("reverse_kl"), "stale": local("reverse_kl")},
    )
)
def full_loss_prefix_ratio(logits, ref_logits, logp, old_logp, mask):
    """sg(ρ_(1:t−1))·KL(π‖ref) per token. Gradient: the reverse KL's, with π's prefixes fixed. (B, T, V) → (B, T).

    The token itself needs no ratio, since its whole distribution stands in its place.
    """
    log_ratio = (logp - old_logp).where(mask != 0, 0.0).detach()
    return (log_ratio.cumsum(dim=1) - log_ratio).exp() * _where_live(logits, ref_logits, mask)


@register(
    Spec(
        name="full-reward",
        formula="Σ_t log π_t · sg(Σ_(s>t) KL(π(·|s_s)‖ref(·|s_s)))",
        source="Amini, Vieira & Cotterell 2025 (arXiv 2504.10637), the score-function part of their gradient",
        placement="reward",
        credit="to-go",
        claims="the exact KL(π‖ref) as a cost, without sampling noise in the action",
        known_false=(
            "a token is charged for where it leads, not for its own KL: zero on a bandit; it needs the exact KL in the"
            " loss beside it"
        ),
        identified={
            "current": {"bandit": {"zero": 1.0}, "tokens": {"future_reverse_kl": 1.0}},
            "stale": {"bandit": {"zero": 1.0}, "tokens": {"exact_future_reverse_kl@rollouts": 1.0}},
        },
    )
)
def full_reward(logits, ref_logits, mask):
    """KL of the *next* prefix per token, as a cost to go. Gradient as placed: Σ_t g_t Σ_(s>t) KL_s. (B, T, V) → (B, T).

    The KL itself is logged: the cost leaves out the first prefix's, to which no token led.
    """
    kl = _where_live(logits, ref_logits, mask)
    following = _to_the_token_before(kl, mask)
    return following, {"kl": kl.detach()}


def _where_live(logits, ref_logits, mask):
    """Return the KL of each next token, 0 at padding whatever stands there. (B, T, V) → (B, T)."""
    live = (mask != 0).unsqueeze(-1)
    return full_loss(logits.where(live, 0.0), ref_logits.where(live, 0.0))


def _to_the_token_before(kl, mask):
    """Move each live token's number to the live token before it, whatever stands between them. (B, T) → (B, T)."""
    place = (mask != 0).long().cumsum(dim=1)  # 1, 2, … at live tokens
    in_order = kl.new_zeros(kl.shape[0], kl.shape[1] + 2).scatter_add(1, place, kl)
    return in_order.gather(1, place + 1)


@register(
    Spec(
        name="rao-blackwell",
        aliases=("kl-rb",),
        formula="Σ_t KL_t + Σ_t log π_t · sg(Σ_(s>t) KL_s),  KL_t = KL(π(·|s_t)‖ref(·|s_t))",
        source="Amini, Vieira & Cotterell 2025 (arXiv 2504.10637)",
        placement="both",
        credit="to-go",
        claims="the gradient of the sequence-level KL(π‖ref), with the sampling noise of each action taken out",
        known_false=(
            "not always less noisy than sampling: for two tokens and more the variance can grow; off-policy it needs "
            "prefix ratios"
        ),
        identified={
            "current": everywhere({"reverse_kl": 1.0}),
            "stale": {
                "bandit": {"reverse_kl": 1.0},
                "tokens": {"local_reverse_kl@sampler": 1.0, "exact_future_reverse_kl@rollouts": 1.0},
            },
        },
    )
)
def rao_blackwell(logits, ref_logits, mask):
    """Gradient of this prefix's KL, value of the next one's, per token; the KL itself is logged. (B, T, V) → (B, T).

    Gradient as placed: Σ_t [∇KL_t + g_t Σ_(s>t) KL_s], the reverse KL's.
    """
    kl = _where_live(logits, ref_logits, mask)
    following = _to_the_token_before(kl.detach(), mask)
    return kl - kl.detach() + following, {"kl": kl.detach()}


@register(
    Spec(
        name="top-k",
        aliases=("ema-pg",),
        formula="Σ_t [Σ_(v∈S) π_v u_v + 1{y_t ∉ S}·sg(u_t)·π_t/sg(π_t)],  S the k likeliest tokens of π",
        source=(
            "Zhang & Ba 2026 (EMA-PG, arXiv 2602.04417), Top-k KL; their compute_memory_efficient_kl, 'full_reverse' "
            "with tail sampling"
        ),
        placement="loss",
        claims="unbiased value and unbiased gradient of the next-token KL(π‖ref) at any k",
        known_false=(
            "head and tail are differentiated differently, so that ∇π(S) is left over: a push away from the head even "
            "at π = ref; it vanishes only when the head is the whole vocabulary"
        ),
        identified={"current": UNNAMED, "stale": UNNAMED},
        per_token=True,
    )
)
def top_k(logits, ref_logits, logp, ref_logp, tokens, k=2):
    """Σ_head π·u + 1{token in the tail}·u, per token. Value: KL(π‖ref). Gradient: u·g + ∇π(head). (B, T, V) → (B, T).

    The head is the k likeliest tokens under the policy (all of them if k ≥ V), held fixed.
    """
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_head, top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    head = (log_head.exp() * (log_head - ref_logits.gather(-1, top))).sum(dim=-1)
    in_head = (top == tokens.unsqueeze(-1)).any(dim=-1)
    tail = (logp - ref_logp).detach() * (logp - logp.detach()).exp()
    return head + tail.where(~in_head, 0.0)


@register(
    Spec(
        name="top-k-detached",
        aliases=("tt-opd",),
        formula="Σ_t [Σ_(v∈S) π_v sg(u_v) + 1{y_t ∉ S}·sg(u_t)·π_t/sg(π_t)],  S the k likeliest tokens of π",
        source="TT-OPD 2026 (arXiv 2609.34447)",
        placement="loss",
        claims="unbiased value and unbiased gradient of the next-token KL(π‖ref) at any k",
        known_false=(
            "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy the tail "
            "needs the token's ratio"
        ),
        identified={"current": local("reverse_kl"), "stale": UNNAMED},
        per_token=True,
    )
)
def top_k_detached(logits, ref_logits, logp, ref_logp, tokens, k=2):
    """Σ_head π·sg(u) + 1{token in the tail}·u, per token. Value: KL(π‖ref). Gradient: u·g. (B, T, V) → (B, T).

    The head is the k likeliest tokens under the policy (all of them if k ≥ V), held fixed.
    """
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_head, top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    head = (log_head.exp() * (log_head - ref_logits.gather(-1, top)).detach()).sum(dim=-1)
    in_head = (top == tokens.unsqueeze(-1)).any(dim=-1)
    tail = (logp - ref_logp).detach() * (logp - logp.detach()).exp()
    return head + tail.where(~in_head, 0.0)
