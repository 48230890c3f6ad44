"""Values by a second route: plain sums over all enumerated rollouts, of which `kltest.truth.value` needs none."""

from collections.abc import Callable

import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.truth.autograd import FUNCTIONS, Enumerated
from kltest.truth.gradients import finite
from kltest.truth.values import known


def value_again(name: str, instance: Instance) -> float:
    """Return a value as a sum over all rollouts; shares no recursion with `kltest.truth.value`.

    Args:
        name: A name of `VALUES`.
        instance: Environment and policies.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: The result exceeds float64, or there are too many rollouts to enumerate.
    """
    base, _, at = known(name).partition("@")
    rollouts = Enumerated(instance, torch.from_numpy(instance.policy))
    if base in _NEXT_TOKEN:
        visited = rollouts.visited(_NEXT_TOKEN[base](rollouts.policy, rollouts.reference))
        found = (rollouts.probability(rollouts.old if at else rollouts.logp) * visited.sum(dim=1)).sum()
    else:
        found = (_LOGGED | FUNCTIONS)[base](rollouts)
    return finite(float(found), name, instance)


_LOGGED: dict[str, Callable[[Enumerated], Tensor]] = {
    "kl": FUNCTIONS["reverse_kl"],
    "kl_per_token": lambda r: FUNCTIONS["reverse_kl"](r) / r.mean(r.length),
    "mean_of_token_means": lambda r: r.mean((r.logp - r.ref).sum(dim=1) / r.length),
    "expected_length": lambda r: r.mean(r.length),
}

# Each next-token quantity itself, (C,), from tables of log-probs.
_NEXT_TOKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "local_reverse_kl": lambda p, q: (p.exp() * (p - q)).sum(dim=1),
    "local_forward_kl": lambda p, q: (q.exp() * (q - p)).sum(dim=1),
    "local_squared_log_ratio": lambda p, q: (p.exp() * 0.5 * (p - q) ** 2).sum(dim=1),
    "local_chi_square": lambda p, q: 0.5 * ((2 * p - q).exp().sum(dim=1) - 1),
    "local_total_variation": lambda p, q: 0.5 * (p.exp() - q.exp()).abs().sum(dim=1),
    "local_entropy": lambda p, q: -(p.exp() * p).sum(dim=1),
}
