"""Values and named gradients by a second route: plain sums over all enumerated rollouts, and autograd of them.

Experiments and tests compare `kltest.truth`, which does neither, with it.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.truth.atlas import named
from kltest.truth.values import finite, known


def gradient_again(name: str, instance: Instance) -> np.ndarray:
    """Return the named gradient by autograd over enumerated rollouts; shares no code with `gradient`.

    Args:
        name: A name of the atlas.
        instance: Environment and policies.

    Returns:
        Gradient (C, V) with respect to the policy's logits.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: There are too many rollouts to enumerate.
    """
    named(name)
    logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
    objective = _objective(name, instance, logits)
    if not objective.requires_grad:
        return np.zeros_like(instance.policy)
    (found,) = torch.autograd.grad(objective, logits)
    return found.numpy()


def value_again(name: str, instance: Instance) -> float:
    """Return a value as a sum over all rollouts; shares no recursion with `value`.

    Args:
        name: A name of `VALUES`.
        instance: Environment and policies.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: The result exceeds float64, or there are too many rollouts to enumerate.
    """
    known(name)
    return finite(float(_objective(name, instance, torch.from_numpy(instance.policy))), name, instance)


def _objective(name: str, instance: Instance, logits: Tensor) -> Tensor:
    """A value, or a function whose gradient at the policy's logits (C, V) is the named one."""
    rollouts = _Enumerated(instance, logits - torch.logsumexp(logits, dim=1, keepdim=True))
    base, _, at = name.partition("@")
    if at in ("", "sampler") and base in _NEXT_TOKEN:
        prefixes = rollouts.sampler if at else rollouts.policy
        return rollouts.local(_NEXT_TOKEN[base](rollouts.policy, rollouts.reference), prefixes.detach())
    if not at:
        return _WHOLE[base](rollouts)
    term, chance = _OFF_POLICY[base](rollouts), rollouts.probability(rollouts.old)
    if term.dim() == 1:
        return (chance * term).sum()
    ratio = (rollouts.logp - rollouts.old).detach()
    mean = ratio.sum(dim=1, keepdim=True) / rollouts.length[:, None]
    factor = {"sampler": ratio, "rollouts": torch.zeros_like(ratio), "mean_ratio": mean}[at].exp()
    return (chance * (factor * term).sum(dim=1)).sum()


class _Enumerated:
    """All rollouts of an instance as tensors: `logp`, `ref`, `old` (N, T), 0 at padding; `reward`, `length` (N,)."""

    def __init__(self, instance: Instance, policy: Tensor) -> None:
        paths = instance.paths
        self._contexts, self._tokens = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
        self._mask = torch.from_numpy(paths.mask)
        self._log_weight = torch.from_numpy(paths.log_weight)
        self.policy = policy
        self.reference, self.sampler = torch.from_numpy(instance.reference), torch.from_numpy(instance.sampler)
        self.logp, self.ref, self.old = self.along(policy), self.along(self.reference), self.along(self.sampler)
        self.reward = torch.from_numpy(instance.environment.returns(paths))
        self.length = self._mask.sum(dim=1)
        self.prompt = torch.from_numpy(paths.prompt)

    def along(self, log_probs: Tensor) -> Tensor:
        """Log-probs (N, T) of the tokens, 0 at padding."""
        return torch.where(self._mask, log_probs[self._contexts, self._tokens], 0.0)

    def probability(self, logp: Tensor) -> Tensor:
        """Probability (N,) of each rollout."""
        return (self._log_weight + logp.sum(dim=1)).exp()

    def local(self, per_context: Tensor, prefixes: Tensor) -> Tensor:
        """Return Σ_t E[x(c_t)] of a quantity x (C,), contexts distributed as under fixed log-probs `prefixes`."""
        return (self.probability(self.along(prefixes)) * self.visited(per_context).sum(dim=1)).sum()

    def visited(self, per_context: Tensor) -> Tensor:
        """Return a quantity (C,) of the contexts along every rollout (N, T), 0 at padding."""
        return torch.where(self._mask, per_context[self._contexts], 0.0)


def _score(rollouts: _Enumerated, weights: Tensor) -> Tensor:
    """Return a function whose gradient is E_π[Σ_t g_t·weights_t], weights (N, T) held fixed."""
    return (rollouts.probability(rollouts.logp).detach() * (rollouts.logp * weights.detach()).sum(dim=1)).sum()


def _kl(rollouts: _Enumerated, p: Tensor, q: Tensor) -> Tensor:
    return (rollouts.probability(p) * (p - q).sum(dim=1)).sum()


def _after(cost: Tensor) -> Tensor:
    """Return what follows after each token of a cost (N, T)."""
    return cost.flip(1).cumsum(dim=1).flip(1) - cost


def _last(rollouts: _Enumerated) -> Tensor:
    at_last = torch.arange(rollouts.logp.shape[1]) == rollouts.length[:, None] - 1
    return (rollouts.logp - rollouts.ref) * at_last


def _charged(rollouts: _Enumerated, cost: Tensor) -> Tensor:
    """Return terms (N, T) whose gradient is every token's score times the cost of its whole rollout."""
    return rollouts.logp * cost.sum(dim=1, keepdim=True).detach()


def _squared_deviation(rollouts: _Enumerated) -> Tensor:
    """Return half the squared distance (N,) of a rollout's log-ratio from the sampler's mean for its prompt."""
    total, chance = (rollouts.logp - rollouts.ref).sum(dim=1), rollouts.probability(rollouts.old)
    same = (rollouts.prompt[:, None] == rollouts.prompt) * chance
    return 0.5 * (total - (same @ total / same.sum(dim=1)).detach()) ** 2


def _mean(rollouts: _Enumerated, of: Tensor) -> Tensor:
    return (rollouts.probability(rollouts.logp) * of).sum()


_WHOLE: dict[str, Callable[[_Enumerated], Tensor]] = {
    "kl": lambda r: _kl(r, r.logp, r.ref),
    "kl_per_token": lambda r: _kl(r, r.logp, r.ref) / _mean(r, r.length),
    "mean_of_token_means": lambda r: _mean(r, (r.logp - r.ref).sum(dim=1) / r.length),
    "expected_length": lambda r: _mean(r, r.length),
    "reverse_kl": lambda r: _kl(r, r.logp, r.ref),
    "future_reverse_kl": lambda r: _score(r, _after(r.logp - r.ref)),
    "last_token_reverse_kl": lambda r: _score(r, _last(r)),
    "forward_kl": lambda r: _kl(r, r.ref, r.logp),
    "squared_log_ratio": lambda r: _mean(r, 0.5 * (r.logp - r.ref).sum(dim=1) ** 2),
    "squared_log_ratio_sum": lambda r: _mean(r, 0.5 * ((r.logp - r.ref) ** 2).sum(dim=1)),
    "chi_square": lambda r: 0.5 * ((r.probability(r.logp) ** 2) / r.probability(r.ref)).sum() - 0.5,
    "total_variation": lambda r: 0.5 * (r.probability(r.logp) - r.probability(r.ref)).abs().sum(),
    "from_sampler_kl": lambda r: _kl(r, r.old, r.logp),
    "to_sampler_kl": lambda r: _kl(r, r.logp, r.old),
    "expected_reward": lambda r: _mean(r, r.reward),
    "entropy": lambda r: _mean(r, -r.logp.sum(dim=1)),
    "zero": lambda r: torch.zeros(()),
}

# Each next-token quantity itself, (C,), from tables of log-probs.
_NEXT_TOKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "local_reverse_kl": lambda p, q: (p.exp() * (p - q)).sum(dim=1),
    "local_forward_kl": lambda p, q: (q.exp() * (q - p)).sum(dim=1),
    "local_squared_log_ratio": lambda p, q: (p.exp() * 0.5 * (p - q) ** 2).sum(dim=1),
    "local_chi_square": lambda p, q: 0.5 * ((2 * p - q).exp().sum(dim=1) - 1),
    "local_total_variation": lambda p, q: 0.5 * (p.exp() - q.exp()).abs().sum(dim=1),
}

# Functions of which rollouts of the sampler follow the gradient: a term for each token (N, T), which may have a ratio
# in front of it, or for each rollout (N,). A token's own ratio cancels what came before it, here as in a loss.
_OFF_POLICY: dict[str, Callable[[_Enumerated], Tensor]] = {
    "reverse_kl": lambda r: _charged(r, r.logp - r.ref),
    "local_reverse_kl": lambda r: 0.5 * (r.logp - r.ref) ** 2,
    "future_reverse_kl": lambda r: r.logp * _after(r.logp - r.ref).detach(),
    "last_token_reverse_kl": lambda r: 0.5 * _last(r) ** 2,
    "forward_kl": lambda r: _k3((r.ref - r.logp).sum(dim=1)),
    "local_forward_kl": lambda r: _k3(r.ref - r.logp),
    "squared_log_ratio": lambda r: _square_and_cube((r.logp - r.ref).sum(dim=1)),
    "squared_log_ratio_sum": lambda r: 0.5 * (r.logp - r.ref) ** 2 + _charged(r, 0.5 * (r.logp - r.ref) ** 2),
    "local_squared_log_ratio": lambda r: _square_and_cube(r.logp - r.ref),
    "chi_square": lambda r: _k3((r.logp - r.ref).sum(dim=1)),
    "local_chi_square": lambda r: _k3(r.logp - r.ref),
    "total_variation": lambda r: 0.5 * (r.logp - r.ref).sum(dim=1).abs(),
    "local_total_variation": lambda r: 0.5 * (r.logp - r.ref).abs(),
    "centred_reverse_kl": _squared_deviation,
    "exact_future_reverse_kl": lambda r: (
        r.logp * _after(r.visited(_NEXT_TOKEN["local_reverse_kl"](r.policy, r.reference))).detach()
    ),
    "other_tokens_forward_kl": lambda r: _charged(r, 1 - (r.ref - r.logp).exp()) - _k3(r.ref - r.logp),
    "to_sampler_kl": lambda r: _charged(r, r.logp - r.old),
}


def _k3(x: Tensor) -> Tensor:
    return x.exp() - 1 - x


def _square_and_cube(x: Tensor) -> Tensor:
    return x**2 / 2 + x**3 / 6
