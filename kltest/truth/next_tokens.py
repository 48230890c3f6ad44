"""Gradients of divergences of next-token distributions that are no means of a function of π/ref.

A *support* S is the k likeliest tokens of one side, held fixed: one that moves with the policy has no gradient of its
selection, but where two tokens are equally likely. Over a support there are the *truncated* sum, which is no divergence
and may be negative; the divergence of the *renormalised* distributions; and that with all other tokens as one, the
*tail*.
"""

import numpy as np

from kltest.names import support_size
from kltest.truth.atlas import MixtureName, SupportName, mixture_named, support_named
from kltest.truth.recursions import from_signal


def is_of_next_tokens(base: str) -> bool:
    """Return True for a name, without a sampler, that this module computes."""
    return base.startswith("local_") and (mixture_named(base) is not None or support_named(base) is not None)


def gradient_of_next_token(base: str, policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the gradient (C, V) with respect to the logits of each row, from tables of log-probs."""
    if (mixture := mixture_named(base)) is not None:
        return from_signal(of_mixture(mixture, policy, reference), policy)
    if (name := support_named(base)) is None:
        raise KeyError(base)
    p, q, inside = np.exp(policy), np.exp(reference), _support(name, policy, reference)
    mass, ref_mass = _mass(p, inside), _mass(q, inside)
    # Not 1 − mass: what is left of a token that is all but certain is lost in rounding.
    rest, ref_rest = _mass(p, ~inside), _mass(q, ~inside)
    if name.direction == "reverse":
        u = policy - reference
        if name.kind == "renormalised":
            within = inside * p / mass
            return within * (u - (within * u).sum(axis=1, keepdims=True))
        if name.kind == "tail":
            return from_signal(np.where(inside, u, np.log(rest) - np.log(ref_rest)), policy)
        return from_signal(inside * (u + 1), policy)
    if name.kind == "renormalised":
        return inside * (p / mass - q / ref_mass)
    truncated = ref_mass * p - inside * q
    if name.kind == "tail":
        truncated += ref_rest / rest * (inside * p - mass * p)
    return truncated


def of_mixture(name: MixtureName, policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the derivative with respect to each probability, up to a constant that all have, from log-probs."""
    weight = name.weight
    if name.kind == "skewed_reverse_kl":
        mixed = _mixture(policy, reference, weight)
        return policy - mixed - weight * np.exp(policy - mixed)
    mixed = _mixture(reference, policy, weight)
    if name.kind == "skewed_forward_kl":
        return -(1 - weight) * np.exp(reference - mixed)
    return (1 - weight) * (policy - mixed)


def _mixture(one: np.ndarray, other: np.ndarray, weight: float) -> np.ndarray:
    """Return the log-probs of the mixture with this weight of the first."""
    return np.logaddexp(one + np.log(weight), other + np.log1p(-weight))


def _support(name: SupportName, policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return (C, V) True on the support."""
    deciding = reference if name.whose == "top" else policy
    order = np.argsort(-deciding, axis=1, kind="stable")[:, : support_size(name.k, deciding.shape[1])]
    inside = np.zeros(deciding.shape, dtype=bool)
    np.put_along_axis(inside, order, True, axis=1)
    return inside


def _mass(chances: np.ndarray, inside: np.ndarray) -> np.ndarray:
    return (chances * inside).sum(axis=1, keepdims=True)
