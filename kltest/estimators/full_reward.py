"""The exact next-token KL in the reward of the tokens that led to it."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="full-reward",
    formula="Σ_t log π_t · sg(Σ_(s>t) KL(π(·|s_s)‖ref(·|s_s)))",
    source="Amini, Vieira & Cotterell 2025 (arXiv 2504.10637), the score-function part of their gradient",
    placement="reward",
    credit="to-go",
    claims="the exact KL(π‖ref) as a cost, without sampling noise in the action",
    known_false=(
        "a token is charged for where it leads, not for its own KL: zero on a bandit; it needs the exact KL in the "
        "loss beside it"
    ),
    identified={
        "current": {"bandit": {"zero": 1.0}, "tokens": {"future_reverse_kl": 1.0}},
        "stale": {"bandit": {"zero": 1.0}, "tokens": {"exact_future_reverse_kl@rollouts": 1.0}},
    },
)


@register(SPEC)
def full_reward(logits, ref_logits, mask):
    """KL of the *next* prefix per token, as a cost to go. Gradient as placed: Σ_t g_t Σ_(s>t) KL_s. (B, T, V) → (B, T).

    The KL itself is logged: the cost leaves out the first prefix's, to which no token led. Live tokens stand together.
    """
    live = (mask != 0).unsqueeze(-1)
    log_pi = logits.where(live, 0.0)
    kl = (log_pi.exp() * (log_pi - ref_logits.where(live, 0.0))).sum(dim=-1)
    following = kl.roll(-1, dims=1)
    following[:, -1] = 0.0
    return following, {"kl": kl.detach()}
