"""Named gradients as plain torch: for each an expression over all rollouts that autograd differentiates into it.

The expressions read `logp`, `ref_logp`, `old_logp` (N, T), `p` (N,), the probability of each rollout under the policy,
`reward` (N,) and `logits`. If lengths vary they also read `mask` and `u`, the log-ratio with 0 at padding.
"""

from collections.abc import Mapping


def as_torch(combination: Mapping[str, float], *, masked: bool) -> str:
    """Return Σ c·gradient as an expression; `masked` if lengths vary."""
    terms = ((coefficient, _term(name, masked)) for name, coefficient in combination.items())
    return " + ".join(term if coefficient == 1 else f"{coefficient!r} * {term}" for coefficient, term in terms)


def summed(of: str, mask: str) -> str:
    """Return the sum of a tensor over live tokens as an expression; `mask` is "" if all tokens are live."""
    return f"({of} * {mask}).sum(-1)" if mask else f"{of}.sum(-1)"


def _term(name: str, masked: bool) -> str:
    u = "u" if masked else "(logp - ref_logp)"
    total, total_ref, total_old = (summed(part, "mask" if masked else "") for part in ("logp", "ref_logp", "old_logp"))
    whole = {
        "reverse_kl": f"(p * {u}.sum(-1)).sum()",
        "forward_kl": f"({total_ref}.exp() * -{u}.sum(-1)).sum()",
        "squared_log_ratio": f"(p * {u}.sum(-1) ** 2).sum() / 2",
        "squared_log_ratio_sum": f"(p * ({u} ** 2).sum(-1)).sum() / 2",
        "chi_square": f"(p**2 / {total_ref}.exp()).sum() / 2",
        "total_variation": f"(p - {total_ref}.exp()).abs().sum() / 2",
        "from_sampler_kl": f"({total_old}.exp() * ({total_old} - {total})).sum()",
        "to_sampler_kl": f"(p * ({total} - {total_old})).sum()",
        "expected_reward": "(p * reward).sum()",
        "entropy": f"(-p * {total}).sum()",
        "zero": "0 * logits.sum()",
    }
    if name in whole:
        return whole[name]
    base, at_sampler = name.removesuffix("@sampler"), name.endswith("@sampler")
    weight = f"((logp - old_logp).exp() * {_weight(base, u, masked)})" if at_sampler else _weight(base, u, masked)
    chance = f"{total_old}.exp()" if at_sampler else "p.detach()"
    return f"({chance} * (logp * {weight}.detach()).sum(-1)).sum()"


def _weight(name: str, u: str, masked: bool) -> str:
    """Factor of each token's score, 0 at padding."""
    last = "at.new_ones(at.shape).cumsum(-1) == at.shape[1]"
    if masked:
        last = "mask.cumsum(-1) == mask.sum(-1, keepdim=True)"
    return {
        "local_reverse_kl": u,
        "future_reverse_kl": f"({u}.flip(1).cumsum(1).flip(1) - {u})",
        "last_token_reverse_kl": f"({u} * ({last}))",
        "local_forward_kl": f"(1 - (-{u}).exp())",
        "local_squared_log_ratio": f"({u} + {u} ** 2 / 2)",
        "local_chi_square": f"({u}.exp() - 1)",
        "local_total_variation": f"({u}.sign() / 2)",
    }[name]
