"""Declared gradients as expressions in plain torch, which autograd differentiates into them."""

from collections.abc import Mapping


def as_torch(combination: Mapping[str, float], *, masked: bool) -> str:
    """Return Σ c·gradient as an expression over all rollouts, which autograd differentiates into it.

    It reads `logp`, `ref_logp`, `old_logp` (N, T), `p` (N,), the probability of each rollout under the policy, `reward`
    (N,) and `logits`. If lengths vary (`masked`) it also reads `mask` and `u`, the log-ratio with 0 at padding.
    """
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
    base, _, at = name.partition("@")
    length = "mask.sum(-1)" if masked else "at.shape[1]"
    ratio = {
        "sampler": "(logp - old_logp).exp() * ",
        "mean_ratio": f"(({total} - {total_old}) / {length})[:, None].exp() * ",
    }.get(at, "")
    chance = f"{total_old}.exp()" if at else "p.detach()"
    return f"({chance} * (logp * ({ratio}{_weight(base, u, masked)}).detach()).sum(-1)).sum()"


def _weight(name: str, u: str, masked: bool) -> str:
    """Factor of each token's score; at padding scores are 0."""
    whole, k3 = f"{u}.sum(-1, keepdim=True)", f"(1 - (-{u}).exp())"
    to_sampler = "((logp - old_logp) * mask)" if masked else "(logp - old_logp)"
    tables = "(logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - ref)).sum(-1)[at]" + " * mask" * masked
    last = "at.new_ones(at.shape).cumsum(-1) == at.shape[1]"
    if masked:
        last = "mask.cumsum(-1) == mask.sum(-1, keepdim=True)"
    return {
        "reverse_kl": whole,
        "local_reverse_kl": u,
        "future_reverse_kl": f"({u}.flip(1).cumsum(1).flip(1) - {u})",
        "last_token_reverse_kl": f"({u} * ({last}))",
        "forward_kl": f"(1 - (-{whole}).exp())",
        "local_forward_kl": k3,
        "squared_log_ratio": f"({whole} + {whole} ** 2 / 2)",
        "squared_log_ratio_sum": f"({u} + ({u} ** 2 / 2).sum(-1, keepdim=True))",
        "local_squared_log_ratio": f"({u} + {u} ** 2 / 2)",
        "chi_square": f"({whole}.exp() - 1)",
        "local_chi_square": f"({u}.exp() - 1)",
        "total_variation": f"({whole}.sign() / 2)",
        "local_total_variation": f"({u}.sign() / 2)",
        "centred_reverse_kl": f"({whole} - {summed('old_logp', 'mask' if masked else '')}.exp() @ {whole})",
        "exact_future_reverse_kl": f"(({tables}).flip(1).cumsum(1).flip(1) - {tables})",
        "other_tokens_forward_kl": f"({k3}.sum(-1, keepdim=True) - {k3})",
        "to_sampler_kl": f"{to_sampler}.sum(-1, keepdim=True)",
    }[name]
