"""k3 of the whole sequence's log-ratio, as a loss."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
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


@register(SPEC)
def k3_loss_sequence(logp, ref_logp, mask):
    """e^(−Σu) − 1 + Σu per sequence. Value: KL(π‖ref). Gradient: (1 − e^(−Σu))·Σg, the forward KL's. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    return (-u).exp() - 1 + u
