"""Per-token k2 averaged over all live tokens of the batch."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="token-mean",
    formula="Σ_b Σ_t u_bt²/2 / Σ_b L_b",
    source="Yu et al. 2025 (DAPO, arXiv 2503.14476), token-level loss; verl, agg_loss 'token-mean'",
    placement="loss",
    claims="every token counts the same",
    known_false=(
        "one rollout's weight depends on the lengths of the others in its batch, so that the gradient depends on the "
        "batch's size"
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


@register(SPEC)
def token_mean(logp, ref_logp, mask):
    """Mean of u²/2 over the batch's live tokens. Gradient: Σ u·g / number of tokens; above at T = 3. (B, T) → ()."""
    live = mask != 0
    k2 = (logp - ref_logp).where(live, 0.0).square() / 2
    return k2.sum() / live.sum().clamp(min=1)
