"""Distillation towards a teacher, who stands where the reference stands: sums over the k likeliest tokens of one side.

`k` and `support` say how the fields are filled: how many tokens, and whose.
"""

import math

from kltest.estimators.spec import UNNAMED, Combination, Spec, everywhere, register

_FIXED = "the tokens of the support are held fixed, and prefixes get no gradient"


LEAST = 1e-12
"""Least probability of all other tokens together."""


def _of(name: str) -> dict[str, dict[str, Combination]]:
    """Return the rows of a next-token gradient: its prefixes come from whoever drew the rollouts."""
    return {
        "current": {"bandit": {name: 1.0}, "tokens": {name: 1.0}},
        "stale": {"bandit": {name: 1.0}, "tokens": {f"{name}@sampler": 1.0}},
    }


@register(
    Spec(
        name="forward-kl-topk",
        formula="Σ_t Σ_(v∈S) ref_v (log ref_v − log π_v),  S the k likeliest tokens of ref",
        source="verl, trainer/distillation/fsdp/losses.py, compute_forward_kl_topk, before its caller's clamp",
        placement="loss",
        claims="the KL(ref‖π) of the next token, from k log-probs of the teacher",
        known_false=f"the sum is no divergence: at π = ref it draws probability into the support; {_FIXED}",
        identified=_of("local_forward_kl_top2"),
    )
)
def forward_kl_topk(topk_logp, ref_topk_logp, k=2, support="teacher"):
    """Σ_S ref·(log ref − log π) per token. Gradient: −Σ_S ref·∇log π. (B, T, k) → (B, T).

    What the teacher puts outside the support counts nothing, and all of π outside is pushed into it.
    """
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(dim=-1)


@register(
    Spec(
        name="forward-kl-topk-renormalised",
        formula="Σ_t KL(ref_S‖π_S),  both renormalised over S, the k likeliest tokens of ref",
        source="MaxText forks for distillation, kl_divergence_between_logits with truncation_strategy 'renormalize'",
        placement="loss",
        claims="the KL(ref‖π) of the next token, from k log-probs of the teacher",
        known_false=f"a divergence within the support: what π puts outside is neither charged nor moved; {_FIXED}",
        identified=_of("local_forward_kl_top2_renormalised"),
    )
)
def forward_kl_topk_renormalised(topk_logp, ref_topk_logp, k=2, support="teacher"):
    """KL of the distributions within the support, per token. Gradient: zero at π ∝ ref on S. (B, T, k) → (B, T)."""
    log_pi, log_ref = topk_logp.log_softmax(-1), ref_topk_logp.log_softmax(-1)
    return (log_ref.exp() * (log_ref - log_pi)).sum(dim=-1)


@register(
    Spec(
        name="forward-kl-topk-tail",
        formula="Σ_t KL(ref‖π) of the tokens of S and of all others as one,  S the k likeliest tokens of ref",
        source="verl-project/verl, RFC 7856 and pull request 7855, forward_kl_topk_tail",
        placement="loss",
        claims="a lower bound of the KL(ref‖π) of the next token, from k log-probs of the teacher",
        known_false=f"a divergence that does not tell the tokens outside the support apart; {_FIXED}",
        identified=_of("local_forward_kl_top2_tail"),
    )
)
def forward_kl_topk_tail(topk_logp, ref_topk_logp, k=2, support="teacher"):
    """Σ over the support and one bucket for the rest, ref·(log ref − log π), per token. (B, T, k) → (B, T).

    Gradient: the coarse-grained KL's, zero where π = ref on S.
    """
    return _coarse(ref_topk_logp, topk_logp)


@register(
    Spec(
        name="reverse-kl-topk",
        formula="Σ_t Σ_(v∈S) π_v (log π_v − log ref_v),  S the k likeliest tokens of π",
        source="verl-project/verl, pull requests 5041 and 7425, reverse_kl_student_topk",
        placement="loss",
        claims="the KL(π‖ref) of the next token, from the teacher's log-probs of the student's k likeliest tokens",
        known_false=f"no divergence: it is made small, and negative, by moving mass out of the support; {_FIXED}",
        identified=_of("local_reverse_kl_own2"),
    )
)
def reverse_kl_topk(topk_logp, ref_topk_logp, k=2, support="student"):
    """Σ_S π·(log π − log ref) per token. Gradient: Σ_S π (u + 1) ∇log π. (B, T, k) → (B, T)."""
    return (topk_logp.exp() * (topk_logp - ref_topk_logp)).sum(dim=-1)


@register(
    Spec(
        name="reverse-kl-topk-clamped",
        formula="Σ_t max(0, Σ_(v∈S) π_v (log π_v − log ref_v)),  S the k likeliest tokens of π",
        source="verl-project/verl, pull request 7806, reverse_kl_topk below the wrapper's clamp_min(0)",
        placement="loss",
        claims="the KL(π‖ref) of the next token, which is never negative",
        known_false=f"a truncated sum below zero is common, and there the clamp removes its gradient; {_FIXED}",
        identified={"current": UNNAMED, "stale": UNNAMED},
    )
)
def reverse_kl_topk_clamped(topk_logp, ref_topk_logp, k=1, support="student"):
    """max(0, Σ_S π·(log π − log ref)) per token. Gradient: the truncated sum's where that is positive, else zero.

    (B, T, k) → (B, T).
    """
    return (topk_logp.exp() * (topk_logp - ref_topk_logp)).sum(dim=-1).clamp_min(0)


@register(
    Spec(
        name="reverse-kl-topk-tail",
        formula="Σ_t KL(π‖ref) of the tokens of S and of all others as one,  S the k likeliest tokens of π",
        source="the reverse of verl-project/verl, RFC 7856: a bucket for the mass outside the top k",
        placement="loss",
        claims="a lower bound of the KL(π‖ref) of the next token, from the student's k likeliest tokens",
        known_false=f"a divergence that does not tell the tokens outside the support apart; {_FIXED}",
        identified=_of("local_reverse_kl_own2_tail"),
    )
)
def reverse_kl_topk_tail(topk_logp, ref_topk_logp, k=2, support="student"):
    """Σ over the support and one bucket for the rest, π·(log π − log ref), per token. (B, T, k) → (B, T).

    Gradient: the coarse-grained KL's, zero where π = ref on S.
    """
    return _coarse(topk_logp, ref_topk_logp)


@register(
    Spec(
        name="exact-kl-advantage",
        formula="Σ_t log π_t · sg(KL(π(·|s_t)‖ref(·|s_t)))",
        source="radixark/miles, issue 2362 (a next-token KL that is subtracted from the advantage)",
        placement="reward",
        credit="immediate",
        claims="the exact KL(π‖ref) of the next token as a cost of that token",
        known_false=(
            "it does not depend on the sampled token, as a baseline does not: its expected gradient is zero on-policy"
        ),
        identified={"current": everywhere({"zero": 1.0}), "stale": UNNAMED},
    )
)
def exact_kl_advantage(logits, ref_logits):
    """Σ_v π_v (log π_v − log ref_v) per token, as a cost of that token. (B, T, V) → (B, T).

    Gradient as placed: Σ_t g_t KL_t, zero on average.
    """
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_pi.exp() * (log_pi - log_ref)).sum(dim=-1)


@register(
    Spec(
        name="jensen-shannon",
        aliases=("jsd",),
        formula="Σ_t ½KL(π‖m) + ½KL(ref‖m),  m = ½(π + ref), of next tokens",
        source="Agarwal et al. 2024 (GKD, arXiv 2306.13649); TRL, GKDTrainer with β = 0.5",
        placement="loss",
        claims="a bounded divergence between forward and reverse KL",
        known_false="exact in every prefix that was visited; how the policy chooses its prefixes gets no gradient",
        identified=_of("local_jensen_shannon"),
        per_token=True,
    )
)
def jensen_shannon(logits, ref_logits):
    """½KL(π‖m) + ½KL(ref‖m) per token, m the mean of both. Gradient: ½ log π/m on each token. (B, T, V) → (B, T)."""
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_mean = log_pi.logaddexp(log_ref) - math.log(2)
    return 0.5 * (log_pi.exp() * (log_pi - log_mean) + log_ref.exp() * (log_ref - log_mean)).sum(dim=-1)


@register(
    Spec(
        name="generalised-jensen-shannon",
        aliases=("gkd",),
        formula="Σ_t w·KL(ref‖m) + (1 − w)·KL(π‖m),  m = w·ref + (1 − w)·π, of next tokens; w = 0.1",
        source="Agarwal et al. 2024 (GKD, arXiv 2306.13649), §2; TRL, GKDTrainer, generalized_jsd_loss with β",
        placement="loss",
        claims="a divergence between forward KL (w → 0) and reverse KL (w → 1), each over w or 1 − w",
        known_false="exact in every prefix that was visited; how the policy chooses its prefixes gets no gradient",
        identified=_of("local_jensen_shannon10"),
        per_token=True,
    )
)
def generalised_jensen_shannon(logits, ref_logits, weight=0.1):
    """w·KL(ref‖m) + (1 − w)·KL(π‖m) per token, m = w·ref + (1 − w)·π. (B, T, V) → (B, T).

    Gradient: (1 − w) log π/m on each token.
    """
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_mixed = _mixed(log_ref, log_pi, weight)
    of_reference, of_policy = (one.exp() * (one - log_mixed) for one in (log_ref, log_pi))
    return (weight * of_reference + (1 - weight) * of_policy).sum(dim=-1)


@register(
    Spec(
        name="skewed-forward-kl",
        aliases=("skl",),
        formula="Σ_t KL(ref‖α·ref + (1 − α)·π) of next tokens; α = 0.1",
        source="Ko et al. 2024 (DistiLLM, arXiv 2402.03898), §3.1, skew KL divergence",
        placement="loss",
        claims="a forward KL whose weight ref/m is at most 1/α",
        known_false="exact in every prefix that was visited; how the policy chooses its prefixes gets no gradient",
        identified=_of("local_skewed_forward_kl10"),
        per_token=True,
    )
)
def skewed_forward_kl(logits, ref_logits, skew=0.1):
    """KL(ref‖m) per token, m = α·ref + (1 − α)·π. Gradient: −(1 − α) ref/m on each token. (B, T, V) → (B, T)."""
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_ref.exp() * (log_ref - _mixed(log_ref, log_pi, skew))).sum(dim=-1)


@register(
    Spec(
        name="skewed-reverse-kl",
        aliases=("srkl",),
        formula="Σ_t KL(π‖α·π + (1 − α)·ref) of next tokens; α = 0.1",
        source="Ko et al. 2024 (DistiLLM, arXiv 2402.03898), §3.1, skew reverse KL divergence",
        placement="loss",
        claims="a reverse KL that is at most −log α",
        known_false="exact in every prefix that was visited; how the policy chooses its prefixes gets no gradient",
        identified=_of("local_skewed_reverse_kl10"),
        per_token=True,
    )
)
def skewed_reverse_kl(logits, ref_logits, skew=0.1):
    """KL(π‖m) per token, m = α·π + (1 − α)·ref. Gradient: log π/m − α π/m on each token. (B, T, V) → (B, T)."""
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_pi.exp() * (log_pi - _mixed(log_pi, log_ref, skew))).sum(dim=-1)


@register(
    Spec(
        name="minillm",
        formula="Σ_t sg(ρ_t)·[KL(π(·|s_t)‖ref(·|s_t)) + log π_t · sg(Σ_{s>t} u_s)]",
        source="Gu et al. 2024 (MiniLLM, arXiv 2306.08543), eqs. 4 to 7, without length normalisation",
        placement="loss",
        claims="∇KL(π‖ref) of whole rollouts: the exact next-token part, and sampled log-ratios to go for the rest",
        known_false="a token's ratio corrects for neither the prefix before it nor the tokens after it",
        identified={
            "current": everywhere({"reverse_kl": 1.0}),
            "stale": {"bandit": {"reverse_kl": 1.0}, "tokens": {"reverse_kl@sampler": 1.0}},
        },
    )
)
def minillm(logp, ref_logp, old_logp, logits, ref_logits, mask):
    """A token's exact KL, and its log-prob times the log-ratios after it, times its ratio. (B, T, V) → (B, T).

    Gradient: ∇KL(π‖ref) on-policy; with a stale sampler that of prefixes and later tokens of the sampler.
    """
    live = mask != 0
    logp, ref_logp, old_logp = (one.where(live, 0.0) for one in (logp, ref_logp, old_logp))
    log_pi, log_ref = (one.where(live.unsqueeze(-1), 0.0).log_softmax(-1) for one in (logits, ref_logits))
    own = (log_pi.exp() * (log_pi - log_ref)).sum(dim=-1)
    log_ratio = (logp - ref_logp).detach()
    later = log_ratio.flip(-1).cumsum(-1).flip(-1) - log_ratio
    return ((logp - old_logp).detach().exp() * (own + logp * later)).where(live, 0.0)


def _mixed(one, other, weight):
    """Log-probs of weight·one + (1 − weight)·other, from log-probs. (B, T, V) → (B, T, V)."""
    return (one + math.log(weight)).logaddexp(other + math.log1p(-weight))


def _coarse(one, other):
    """KL of the tokens of a support and of all others as one, from their log-probs. (B, T, k) → (B, T)."""
    # Rounding leaves nothing of it where a token of the support is certain.
    outside, other_outside = ((1 - side.exp().sum(dim=-1)).clamp_min(LEAST) for side in (one, other))
    return (one.exp() * (one - other)).sum(dim=-1) + outside * (outside.log() - other_outside.log())
