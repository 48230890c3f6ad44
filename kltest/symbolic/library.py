"""Functions and classes of other packages that are more than one operation: source that the evaluator follows.

A name is the package and the name there, or the last two names of the path: `torch_Categorical` stands for
`torch.distributions.Categorical`, `lax_scan` for `jax.lax.scan`. Nothing here is called.
"""

from collections.abc import Callable
from typing import Any

import torch


def leaf_by_leaf(function: Callable[..., Any], values: Any) -> Any:
    """Return the values of a function at all tensors in a value; the evaluator has its own."""
    raise NotImplementedError


def passes(values: Any, length: Any) -> Any:
    """Return how long the tensors in a value are; the evaluator has its own."""
    raise NotImplementedError


class _Categorical:
    """A distribution over the last dimension."""

    logits: Any
    probs: Any

    def log_prob(self, value: Any) -> Any:
        """Log-probs of tokens."""
        return torch.gather(self.logits, -1, value.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Any:
        """Entropy."""
        return -(self.probs * self.logits).sum(-1)

    def kl_divergence(self, other: Any) -> Any:
        """KL of this one to another."""
        return (self.probs * (self.logits - other.logits)).sum(-1)


class torch_Categorical(_Categorical):
    """Takes probabilities first."""

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: Any = None) -> None:
        self.logits = torch.log_softmax(logits if probs is None else torch.log(probs), -1)
        self.probs = torch.exp(self.logits)


class distrax_Categorical(_Categorical):
    """Takes logits first."""

    def __init__(self, logits: Any = None, probs: Any = None) -> None:
        self.logits = torch.log_softmax(logits if probs is None else torch.log(probs), -1)
        self.probs = torch.exp(self.logits)


def torch_kl_divergence(p: Any, q: Any) -> Any:
    """KL of two distributions."""
    return p.kl_divergence(q)


def optax_kl_divergence(log_predictions: Any, targets: Any, axis: int = -1) -> Any:
    """KL of targets to predictions."""
    return (targets * (torch.log(targets) - log_predictions)).sum(axis)


def optax_kl_divergence_with_log_targets(log_predictions: Any, log_targets: Any, axis: int = -1) -> Any:
    """KL of targets to predictions."""
    return (torch.exp(log_targets) * (log_targets - log_predictions)).sum(axis)


def optax_softmax_cross_entropy(logits: Any, labels: Any, axis: int = -1) -> Any:
    """Cross-entropy to distributions."""
    return -(labels * torch.log_softmax(logits, axis)).sum(axis)


def optax_softmax_cross_entropy_with_integer_labels(logits: Any, labels: Any) -> Any:
    """Negative log-probs of tokens."""
    return -torch.gather(torch.log_softmax(logits, -1), -1, labels.unsqueeze(-1)).squeeze(-1)


def special_rel_entr(one: Any, other: Any) -> Any:
    """Summands of the KL of two distributions."""
    return one * (torch.log(one) - torch.log(other))


def jax_vmap(function: Callable[..., Any]) -> Any:
    """Apply a function along the first dimension of all that it is given."""
    return lambda *given: torch.stack([function(*one) for one in zip(*given, strict=True)])


def tree_map(function: Callable[..., Any], tree: Any) -> Any:
    """Apply a function to each leaf."""
    return leaf_by_leaf(function, tree)


tree_util_tree_map = tree_map


def lax_scan(step: Callable[..., Any], carry: Any, given: Any = None, length: Any = None) -> Any:
    """Carry a value along the first dimension."""
    kept = []
    for at in range(passes(given, length)):
        carry, made = step(carry, leaf_by_leaf(lambda leaf, at=at: leaf[at], given))
        kept.append(made)
    return carry, kept


def lax_map(function: Callable[..., Any], given: Any) -> Any:
    """Apply a function along the first dimension."""
    return torch.stack(lax_scan(lambda _, one: (None, function(one)), None, given)[1])


def lax_fori_loop(first: Any, end: Any, step: Callable[..., Any], carry: Any) -> Any:
    """Carry a value along numbers."""
    for at in range(first, end):
        carry = step(at, carry)
    return carry


def lax_cond(condition: Any, then: Callable[..., Any], otherwise: Callable[..., Any], *given: Any) -> Any:
    """Take one of two branches."""
    return then(*given) if condition else otherwise(*given)


def lax_dynamic_slice_in_dim(values: Any, start: Any, size: Any, axis: int = 0) -> Any:
    """Take entries along one dimension."""
    return torch.narrow(values, axis, start, size)


def typing_cast(kind: Any, value: Any) -> Any:
    """Return a value as it is, of whatever type a checker takes it to be."""
    return value
