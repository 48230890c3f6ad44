"""Named gradients by a second route: sums over all enumerated rollouts, differentiated by autograd."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.names import support_size
from kltest.truth.atlas import group_of, mixture_named, named, support_named, together, towards_sampler


def gradient_again(name: str, instance: Instance) -> np.ndarray:
    """Return the named gradient (C, V) at the policy's logits by autograd; shares no code with `gradient`.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: There are too many rollouts to enumerate.
    """
    base, _, at = named(name).name.partition("@")
    if base != "to_sampler_kl" and (other := towards_sampler(base)):
        base, instance = other, replace(instance, reference=instance.sampler)
    logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
    rollouts = Enumerated(instance, logits - torch.logsumexp(logits, dim=1, keepdim=True))
    if not at and base in FUNCTIONS:
        objective = FUNCTIONS[base](rollouts)
    elif (mixture := mixture_named(base)) is not None and mixture.whole:
        of_policy, of_reference = map(rollouts.probability, (rollouts.logp, rollouts.ref))
        objective = _from_mixture(mixture.kind, mixture.weight, of_policy[None], of_reference[None])[0]
    elif many := together(base):
        objective = _inverse_total(rollouts, many, at)
    else:
        objective = _of_given_rollouts(rollouts, base, at)
    return torch.autograd.grad(objective, logits)[0].numpy()


class Enumerated:
    """All rollouts of an instance as tensors: `logp`, `ref`, `old` (N, T), 0 at padding; `reward`, `length` (N,)."""

    def __init__(self, instance: Instance, policy: Tensor) -> None:
        paths = instance.paths
        self._contexts, self._tokens, self._mask = map(torch.from_numpy, (paths.contexts, paths.tokens, paths.mask))
        self._log_weight, self.prompt = torch.from_numpy(paths.log_weight), torch.from_numpy(paths.prompt)
        self.policy, self.reference = policy, torch.from_numpy(instance.reference)
        tables = policy, self.reference, torch.from_numpy(instance.sampler)
        self.logp, self.ref, self.old = (self._live(table[self._contexts, self._tokens]) for table in tables)
        self.log_ratio = self.logp - self.ref
        self.reward = torch.from_numpy(instance.environment.returns(paths))
        self.length = self._mask.sum(dim=1)

    def _live(self, each: Tensor) -> Tensor:
        return torch.where(self._mask, each, 0.0)

    def visited(self, per_context: Tensor) -> Tensor:
        """Return a quantity (C,) of the contexts along every rollout (N, T), 0 at padding."""
        return self._live(per_context[self._contexts])

    def probability(self, logp: Tensor) -> Tensor:
        """Probability (N,) of each rollout."""
        return (self._log_weight + logp.sum(dim=1)).exp()

    def mean(self, of: Tensor) -> Tensor:
        """E_π of a number (N,) of each rollout."""
        return (self.probability(self.logp) * of).sum()


def _kl(rollouts: Enumerated, p: Tensor, q: Tensor) -> Tensor:
    return (rollouts.probability(p) * (p - q).sum(dim=1)).sum()


FUNCTIONS: dict[str, Callable[[Enumerated], Tensor]] = {
    "reverse_kl": lambda r: _kl(r, r.logp, r.ref),
    "forward_kl": lambda r: _kl(r, r.ref, r.logp),
    "squared_log_ratio": lambda r: r.mean(0.5 * (r.logp - r.ref).sum(dim=1) ** 2),
    "squared_log_ratio_sum": lambda r: r.mean(0.5 * ((r.logp - r.ref) ** 2).sum(dim=1)),
    "chi_square": lambda r: 0.5 * ((r.probability(r.logp) ** 2) / r.probability(r.ref)).sum() - 0.5,
    "total_variation": lambda r: 0.5 * (r.probability(r.logp) - r.probability(r.ref)).abs().sum(),
    "from_sampler_kl": lambda r: _kl(r, r.old, r.logp),
    "to_sampler_kl": lambda r: _kl(r, r.logp, r.old),
    "expected_reward": lambda r: r.mean(r.reward),
    "entropy": lambda r: r.mean(-r.logp.sum(dim=1)),
    "inverse_length": lambda r: r.mean(1 / r.length.double()),
    "zero": lambda r: 0.0 * r.logp.sum(),
}
"""Functions of the policy whose gradients are named."""

# Functions of which given rollouts follow the gradient: of the log-ratio, a token's own or the rollout's.
_OF_LOG_RATIO: dict[str, Callable[[Tensor], Tensor]] = {
    "forward_kl": lambda u: (-u).exp() - 1 + u,
    "squared_log_ratio": lambda u: u**2 / 2 + u**3 / 6,
    "chi_square": lambda u: u.exp() - 1 - u,
    "total_variation": lambda u: 0.5 * u.abs(),
}
# Others, as terms for each token (N, T), which may have a ratio in front of them, or for each rollout (N,). A token's
# own ratio cancels what came before it, here as in a loss.
_TERMS: dict[str, Callable[[Enumerated], Tensor]] = {
    "reverse_kl": lambda r: r.logp * _whole(r.log_ratio),
    "local_reverse_kl": lambda r: 0.5 * r.log_ratio**2,
    "future_reverse_kl": lambda r: r.logp * _after(r.log_ratio),
    "last_token_reverse_kl": lambda r: 0.5 * r.log_ratio**2 * (torch.arange(r.logp.shape[1]) == r.length[:, None] - 1),
    "squared_log_ratio_sum": lambda r: 0.5 * r.log_ratio**2 + r.logp * _whole(0.5 * r.log_ratio**2),
    "centred_reverse_kl": lambda r: 0.5 * (r.log_ratio.sum(dim=1) - _mean_of_prompt(r)) ** 2,
    "exact_future_reverse_kl": lambda r: (
        r.logp * _after(r.visited((r.policy.exp() * (r.policy - r.reference)).sum(dim=1)))
    ),
    "other_tokens_forward_kl": lambda r: (
        r.logp * (_whole(1 - (-r.log_ratio).exp()) - 1 + (-r.log_ratio).exp().detach())
    ),
    "to_sampler_kl": lambda r: r.logp * _whole(r.logp - r.old),
    "entropy": lambda r: r.logp * _whole(-r.logp),
    "local_entropy": lambda r: -0.5 * r.logp**2,
}


def _inverse_total(rollouts: Enumerated, many: int, at: str) -> Tensor:
    """E[1/(L_1 + … + L_n)] of n rollouts, over every length that each may have; `at` the sampler, times Σ log π."""
    known = sorted(set(rollouts.length.tolist()))
    chance = rollouts.probability(rollouts.old if at else rollouts.logp)
    of_length = torch.stack([chance[rollouts.length == each].sum() for each in known])
    scores = torch.stack([(chance * rollouts.logp.sum(dim=1))[rollouts.length == each].sum() for each in known])
    objective = torch.zeros((), dtype=chance.dtype)
    for places in product(range(len(known)), repeat=many):
        total = sum(known[place] for place in places)
        if at:
            objective = objective + many * scores[places[0]] * of_length[list(places[1:])].prod() / total
        else:
            objective = objective + of_length[list(places)].prod() / total
    return objective


def _of_given_rollouts(rollouts: Enumerated, name: str, at: str) -> Tensor:
    """The expected term of rollouts that are drawn and not moved, with the ratio that `at` names in front of it."""
    if support_named(name) or mixture_named(name):
        # At each prefix the whole distribution stands in place of a token: no ratio is left.
        chance = rollouts.probability(rollouts.old if at else rollouts.logp).detach()
        return (chance * rollouts.visited(next_token(name, rollouts.policy, rollouts.reference)).sum(dim=1)).sum()
    if of := _OF_LOG_RATIO.get(name.removeprefix("local_")):
        term = of(rollouts.log_ratio if name.startswith("local_") else rollouts.log_ratio.sum(dim=1))
    elif name == "expected_reward" or group_of(name):
        term = rollouts.logp * _of_success(rollouts, group_of(name), rollouts.old if at else rollouts.logp)
    else:
        term = _TERMS[name](rollouts)
    ratio = (rollouts.logp - rollouts.old).detach()
    if at == "mean_ratio":
        ratio = ratio.sum(dim=1, keepdim=True) / rollouts.length[:, None]
    if at in {"sampler", "mean_ratio"}:
        term = ratio.exp() * term
    chance = rollouts.probability(rollouts.old if at else rollouts.logp).detach()
    return (chance * (term if term.dim() == 1 else term.sum(dim=1))).sum()


def _from_mixture(kind: str, weight: float, p: Tensor, q: Tensor) -> Tensor:
    if kind == "skewed_reverse_kl":
        return (p * (p / (weight * p + (1 - weight) * q)).log()).sum(dim=1)
    mixed = weight * q + (1 - weight) * p
    of_reference, of_policy = ((one * (one / mixed).log()).sum(dim=1) for one in (q, p))
    return of_reference if kind == "skewed_forward_kl" else weight * of_reference + (1 - weight) * of_policy


def next_token(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """A divergence (C,) of next-token distributions, or a sum over a support, from tables of log-probs."""
    if (mixture := mixture_named(name)) is not None:
        return _from_mixture(mixture.kind, mixture.weight, policy.exp(), reference.exp())
    stated = support_named(name)
    if stated is None:
        raise KeyError(name)
    deciding = (reference if stated.whose == "top" else policy).detach()
    ids = deciding.topk(support_size(stated.k, deciding.shape[1]), dim=1).indices
    one, other = (policy, reference) if stated.direction == "reverse" else (reference, policy)
    one, other = one.exp().gather(1, ids), other.exp().gather(1, ids)
    if stated.kind == "renormalised":
        one, other = (each / each.sum(dim=1, keepdim=True) for each in (one, other))
    if stated.kind == "tail":
        one, other = (torch.cat([each, 1 - each.sum(dim=1, keepdim=True)], dim=1) for each in (one, other))
    return (one * (one / other).log()).sum(dim=1)


def _of_success(rollouts: Enumerated, size: int | None, drawn: Tensor) -> Tensor:
    """Weights (N, 1), held fixed: the reward less its prompt's mean; of groups, times E[√(K(n − K))]/(n·p(1 − p))."""
    same = (rollouts.prompt[:, None] == rollouts.prompt) * rollouts.probability(drawn)
    rate = same @ rollouts.reward / same.sum(dim=1)
    slope = torch.ones_like(rate)
    if size:
        terms = (math.comb(size, k) * rate**k * (1 - rate) ** (size - k) * (k * (size - k)) ** 0.5 for k in range(size))
        slope = sum(terms) / (size * rate * (1 - rate))
    return (slope * (rollouts.reward - rate))[:, None].detach()


def _whole(cost: Tensor) -> Tensor:
    """The cost (N, 1) of each rollout, of costs (N, T), held fixed."""
    return cost.sum(dim=1, keepdim=True).detach()


def _after(cost: Tensor) -> Tensor:
    """Sum what follows after each token of a cost (N, T), held fixed."""
    return (cost.flip(1).cumsum(dim=1).flip(1) - cost).detach()


def _mean_of_prompt(rollouts: Enumerated) -> Tensor:
    """The sampler's mean log-ratio (N,) for the prompt of each rollout, held fixed."""
    same = (rollouts.prompt[:, None] == rollouts.prompt) * rollouts.probability(rollouts.old)
    return (same @ rollouts.log_ratio.sum(dim=1) / same.sum(dim=1)).detach()
