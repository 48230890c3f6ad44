"""k2 as a per-token loss times the detached ratio of the whole prefix."""

from kltest.estimators.spec import Spec, register

SPEC = Spec(
    name="k2-prefix-ratio",
    formula="Σ_t sg(ρ_(1:t)) u_t²/2,  ρ_(1:t) = Π_(s≤t) ρ_s",
    source=(
        "per-decision importance weights after Precup, Sutton & Singh 2000 (Eligibility Traces for Off-Policy Policy "
        "Evaluation)"
    ),
    placement="loss",
    claims="k2 as if on-policy, whatever the sampler",
    known_false=(
        "the sampler is corrected for in full, yet on sequences no token answers for the KL of those after it; the "
        "weights' variance grows with the length"
    ),
    identified={
        "current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
        "stale": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}},
    },
)


@register(SPEC)
def k2_prefix_ratio(logp, ref_logp, old_logp, mask):
    """sg(ρ_(1:t))·u²/2 per token. Gradient: ρ_(1:t)·u·g, the reverse KL's with prefixes fixed. (B, T) → (B, T)."""
    live = mask != 0
    prefix = (logp - old_logp).where(live, 0.0).cumsum(dim=1).exp()
    return prefix.detach() * (logp - ref_logp).where(live, 0.0).square() / 2
