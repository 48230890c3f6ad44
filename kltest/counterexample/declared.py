"""Declared gradients as expressions in plain torch, which autograd differentiates into them."""

from collections.abc import Mapping

from kltest.truth import MixtureName, mixture_named, support_named, together
from kltest.truth.atlas import group_of, towards_sampler

WHOLE = {
    "reverse_kl": "(p * u.sum(-1)).sum()",
    "forward_kl": "({ref_logp}.exp() * -u.sum(-1)).sum()",
    "squared_log_ratio": "(p * u.sum(-1) ** 2).sum() / 2",
    "squared_log_ratio_sum": "(p * (u ** 2).sum(-1)).sum() / 2",
    "chi_square": "(p**2 / {ref_logp}.exp()).sum() / 2",
    "total_variation": "(p - {ref_logp}.exp()).abs().sum() / 2",
    "from_sampler_kl": "({old_logp}.exp() * ({old_logp} - {logp})).sum()",
    "to_sampler_kl": "(p * ({logp} - {old_logp})).sum()",
    "expected_reward": "(p * reward).sum()",
    "entropy": "(-p * {logp}).sum()",
    "inverse_length": "(p / mask.sum(-1)).sum()",
    "zero": "0 * logits.sum()",
}
"""Gradients of an expression over all rollouts; `{logp}` is the sum over a rollout's tokens, likewise the others."""
TABLES = "(logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - ref)).sum(-1)[at] * mask"
WEIGHTS = {
    "reverse_kl": "u.sum(-1, keepdim=True)",
    "local_reverse_kl": "u",
    "future_reverse_kl": "(u.flip(1).cumsum(1).flip(1) - u)",
    "last_token_reverse_kl": "(u * (mask.cumsum(-1) == mask.sum(-1, keepdim=True)))",
    "forward_kl": "(1 - (-u.sum(-1, keepdim=True)).exp())",
    "local_forward_kl": "(1 - (-u).exp())",
    "squared_log_ratio": "(u.sum(-1, keepdim=True) + u.sum(-1, keepdim=True) ** 2 / 2)",
    "squared_log_ratio_sum": "(u + (u ** 2 / 2).sum(-1, keepdim=True))",
    "local_squared_log_ratio": "(u + u ** 2 / 2)",
    "chi_square": "(u.sum(-1, keepdim=True).exp() - 1)",
    "local_chi_square": "(u.exp() - 1)",
    "total_variation": "(u.sum(-1, keepdim=True).sign() / 2)",
    "local_total_variation": "(u.sign() / 2)",
    "centred_reverse_kl": "(u.sum(-1, keepdim=True) - {old_logp}.exp() @ u.sum(-1, keepdim=True))",
    "exact_future_reverse_kl": f"(({TABLES}).flip(1).cumsum(1).flip(1) - {TABLES})",
    "other_tokens_forward_kl": "((1 - (-u).exp()).sum(-1, keepdim=True) - (1 - (-u).exp()))",
    "to_sampler_kl": "((logp - old_logp) * mask).sum(-1, keepdim=True)",
    "entropy": "(-logp * mask).sum(-1, keepdim=True)",
    "local_entropy": "-logp",
    "inverse_length": "(1 / mask.sum(-1, keepdim=True))",
}
"""Gradients that weigh each token's score by a factor; what it is at padding does not matter."""


def as_torch(combination: Mapping[str, float], *, masked: bool) -> str:
    """Return Σ c·gradient as an expression over all rollouts, which autograd differentiates into it.

    It reads `logp`, `ref_logp`, `old_logp`, `u`, the log-ratio (N, T), with 0 at padding, `p` (N,), the probability of
    each rollout under the policy, `reward` (N,), `logits`, and `mask`, always if lengths vary (`masked`).
    """
    sums = {name: summed(name, "mask" if masked else "") for name in ("logp", "ref_logp", "old_logp")}
    sums["live"] = " * mask" if masked else ""
    terms = ((coefficient, _term(name).format(**sums)) for name, coefficient in combination.items())
    return " + ".join(term if coefficient == 1 else f"{coefficient!r} * {term}" for coefficient, term in terms)


def written(name: str) -> bool:
    """Return True for a gradient that these programs have an expression for; those of policy parts alone have none."""
    base = name.partition("@")[0]
    if base == "expected_reward" or towards_sampler(base):
        return name in WHOLE or base in WEIGHTS
    return group_of(base) is None


def summed(of: str, mask: str) -> str:
    """Return the sum of a tensor over live tokens as an expression; `mask` is "" if all tokens are live."""
    return f"({of} * {mask}).sum(-1)" if mask else f"{of}.sum(-1)"


def _term(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    base, _, at = name.partition("@")
    if base not in WEIGHTS and (many := together(base)):
        return _inverse_total(many, at)
    ratio = {
        "sampler": "(logp - old_logp).exp() * ",
        "mean_ratio": "(({logp} - {old_logp}) / mask.sum(-1))[:, None].exp() * ",
    }.get(at, "")
    chance = "{old_logp}.exp()" if at else "p.detach()"
    if (mixture := mixture_named(base)) is not None and mixture.whole:
        return f"(lambda p, q: {_mixed(mixture)})(p, (p * (-u.sum(-1)).exp()).detach())"
    if base not in WEIGHTS:
        return f"({chance} * ({_next_token(base)}[at]{{live}}).sum(-1)).sum()"
    return f"({chance} * (logp * ({ratio}{WEIGHTS[base]}).detach()).sum(-1)).sum()"


def _inverse_total(many: int, at: str) -> str:
    """Return E[1/(L_1 + … + L_n)], or E_μ[Σ log π/(L_1 + … + L_n)], as a sum over all n-tuples of rollouts."""
    shapes = ["".join("-1, " if place == other else "1, " for other in range(many)) for place in range(many)]
    total = " + ".join(f"mask.sum(-1).reshape({shape.rstrip(', ')})" for shape in shapes)
    first = f"{many} * {{old_logp}}.exp() * {{logp}}" if at else "p"
    others = [first, *["{old_logp}.exp()" if at else "p"] * (many - 1)]
    chances = ", ".join(f"{chance}, [{place}]" for place, chance in enumerate(others))
    return f"torch.einsum({chances}, 1 / ({total}), {list(range(many))}, [])"


def _next_token(base: str) -> str:
    """Return a divergence of next-token distributions (C,), or a sum over a support, from `logits` and `ref`."""
    policy = "logits.log_softmax(-1)"
    if (mixture := mixture_named(base)) is not None:
        return f"(lambda p, q: {_mixed(mixture)})({policy}.exp(), ref.exp())"
    stated = support_named(base)
    assert stated is not None
    deciding = "ref" if stated.whose == "top" else "logits"
    ids = f"{deciding}.topk({support_tokens(stated.k)}, -1).indices"
    one, other = (
        f"{side}.gather(-1, {ids})" for side in ((policy, "ref") if stated.direction == "reverse" else ("ref", policy))
    )
    if stated.kind == "renormalised":
        one, other = f"{one}.log_softmax(-1)", f"{other}.log_softmax(-1)"
    total = "(a.exp() * (a - b)).sum(-1)"
    if stated.kind == "tail":
        outside = "1 - {}.exp().sum(-1)"
        a, b = (f"({outside.format(side)})" for side in "ab")
        total = f"{total} + {a} * ({a} / {b}).log()"
    return f"(lambda a, b: {total})({one}, {other})"


def _mixed(mixture: MixtureName) -> str:
    """Return a divergence from a mixture as an expression of probabilities `p` of the policy and `q`."""
    own, rest = mixture.weight, round(1 - mixture.weight, 2)
    if mixture.kind == "skewed_reverse_kl":
        return f"(p * (p / ({own} * p + {rest} * q)).log()).sum(-1)"
    total = f"(q * (q / ({own} * q + {rest} * p)).log()).sum(-1)"
    if mixture.kind == "jensen_shannon":
        total = f"{own} * {total} + {rest} * (p * (p / ({own} * q + {rest} * p)).log()).sum(-1)"
    return total


def support_tokens(k: int) -> str:
    """Return how many tokens a support of k has, as `kltest.names.support_size` says."""
    return f"max(1, min({k}, logits.shape[-1] - 2))"
