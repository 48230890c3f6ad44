"""k2 of the whole sequence's log-ratio, as a loss."""

from kltest.estimators.spec import Spec, everywhere, register

SPEC = Spec(
    name="k2-loss-sequence",
    formula="(Σ_t u_t)²/2",
    source="Tang & Munos 2025 (arXiv 2506.09477); Liu et al. 2025 (arXiv 2510.01555)",
    placement="loss",
    claims="the gradient of the sequence-level KL(π‖ref) from a plain loss",
    known_false="the value is biased; off-policy the gradient is exact only with the detached full-sequence ratio",
    identified={"current": everywhere({"reverse_kl": 1.0}), "stale": everywhere({"reverse_kl@rollouts": 1.0})},
)


@register(SPEC)
def k2_loss_sequence(logp, ref_logp, mask):
    """(Σu)²/2 per sequence. Value: E[(Σu)²]/2, not the KL. Gradient: Σu·Σg, the reverse KL's. (B, T) → (B,)."""
    u = (logp - ref_logp).where(mask != 0, 0.0)
    return u.sum(dim=1).square() / 2
