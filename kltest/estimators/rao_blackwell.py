"""The Rao–Blackwellised gradient: exact next-token KL as loss, and in the reward of what led to it."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
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


@register(SPEC)
def rao_blackwell(logits, ref_logits, mask):
    """Gradient of this prefix's KL, value of the next one's, per token; the KL itself is logged. (B, T, V) → (B, T).

    Gradient as placed: Σ_t [∇KL_t + g_t Σ_(s>t) KL_s], the reverse KL's. Live tokens stand together.
    """
    live = (mask != 0).unsqueeze(-1)
    log_pi = logits.where(live, 0.0)
    kl = (log_pi.exp() * (log_pi - ref_logits.where(live, 0.0))).sum(dim=-1)
    following = kl.detach().roll(-1, dims=1)
    following[:, -1] = 0.0
    return kl - kl.detach() + following, {"kl": kl.detach()}
