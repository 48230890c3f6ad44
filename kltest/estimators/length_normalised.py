"""Sequence-level k2 divided by each sequence's own length, as a loss."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="length-normalised",
    aliases=("length-normalized",),
    formula="(Σ_t u_t)²/(2L)",
    source=(
        "Shao et al. 2024 (DeepSeekMath, GRPO) divides each response's loss by its length; Liu et al. 2025 (Dr. GRPO, "
        "arXiv 2503.20783) on the bias"
    ),
    placement="loss",
    claims="the KL(π‖ref) per token",
    known_false=(
        "1/T of the reverse KL's gradient at a fixed length T; when lengths vary, ∇E[(Σu − 1)/L]: long answers are "
        "regularised less"
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


@register(SPEC)
def length_normalised(logp, ref_logp, mask):
    """(Σu)²/(2L) per sequence of L tokens. Gradient: Σu·Σg/L; above at T = 3. (B, T) → (B,)."""
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0)
    return u.sum(dim=1).square() / 2 / live.sum(dim=1).clamp(min=1)
