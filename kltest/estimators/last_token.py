"""k2 of the last token alone, as a loss."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
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


@register(SPEC)
def last_token(logp, ref_logp, mask):
    """u²/2 at the last live token, 0 elsewhere. Gradient: u_L·g_L, the reverse KL's there. (B, T) → (B, T)."""
    live = mask != 0
    live_from_here = live.flip(1).cumsum(dim=1).flip(1)
    return (logp - ref_logp).where(live & (live_from_here == 1), 0.0).square() / 2
