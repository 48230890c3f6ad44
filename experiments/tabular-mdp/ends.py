"""Rest points of going on or stopping, in closed form: under a token-level loss, and under ∇KL(π‖ref).

With x the logit of the chance p of going on, a that of the reference and γ the chance of coming back, training with a
token-level loss rests where (1 − γp)(x − a) = 1/β. The left side grows with p but for a stretch between two *folds*,
at which its derivative vanishes:

    a = x − (1 − γp)/(γp(1 − p)),    with    β = γp(1 − p)/(1 − γp)².

The first has its largest value at p = 1/(2 − γ): a smaller a has one fold on either side of it, and two stable ends
with a tipping point between them for the β between those of its folds; a larger a has one end for every β.

∇KL(π‖ref) rests at x = a + (1 + γV)/β, where V = β·log(1 − ref + ref·e^((1 + γV)/β)) is the value of being there. The
right side has the slope γp < 1 in V, so that there is one such V.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from .settings import CONTINUES

# Beyond this logit a policy is further from any of the references than any of the coefficients allows.
SIDE = 60.0
CUSP = logit(1 / (2 - CONTINUES))


def folds(reference: float) -> list[float]:
    """The logits of the two folds, the smaller first; none if the reference goes on too often."""

    def excess(x: float) -> float:
        chance = expit(x)
        return float(x - (1 - CONTINUES * chance) / (CONTINUES * chance * expit(-x)) - logit(reference))

    return [_root(excess, -SIDE, CUSP), _root(excess, CUSP, SIDE)] if excess(CUSP) > 0 else []


def band(reference: float) -> list[float]:
    """The smallest and the largest β with two stable ends, those of the folds; none if there is no such β."""
    chances = [(expit(x), expit(-x)) for x in folds(reference)]
    return sorted(float(CONTINUES * p * stop / (1 - CONTINUES * p) ** 2) for p, stop in chances)


def token_level(beta: float, reference: float) -> list[float]:
    """The logits at rest under a token-level loss: one at most below, between and above the folds."""

    def pull(x: float) -> float:
        return float(logit(reference) + 1 / (beta * (1 - CONTINUES * expit(x))) - x)

    parts = pairwise([-SIDE, *folds(reference), SIDE])
    return [_root(pull, low, high) for low, high in parts if pull(low) > 0 > pull(high) or pull(low) < 0 < pull(high)]


def true(beta: float, reference: float) -> list[float]:
    """The one logit at rest under ∇KL(π‖ref)."""

    def excess(value: float) -> float:
        paid = np.logaddexp(np.log1p(-reference), np.log(reference) + (1 + CONTINUES * value) / beta)
        return float(value - beta * paid)

    return [float(logit(reference) + (1 + CONTINUES * _root(excess, 0.0, 1 / (1 - CONTINUES))) / beta)]


def _root(of: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(of, low, high, xtol=1e-14, rtol=1e-15))
