"""Sizes: a loss that is given K columns is to follow the same gradient of a support for every K.

One that was written for a certain number of tokens, or that divides a sum over them by their number, follows what its
name says at one K and something else at another. Where no K was asked for, all from 1 to V − 2 are tried in the bandit
and in the sequence, with rollouts of the policy.
"""

from dataclasses import replace
from math import isclose

import numpy as np

from kltest.checks.check import Found
from kltest.errors import TargetError
from kltest.identify.case import relative_bias, size
from kltest.identify.findings import Combination, Findings, shared
from kltest.names import SUPPORT_FIELDS, SUPPORT_SIZE, listed
from kltest.truth import combine, render, resized

# Relative bias from which on a gradient is another one; a constant in a denominator stays below it.
BIASED = 1e-3
ENVIRONMENTS = ("bandit", "sequence")


def examine(findings: Findings) -> Found | None:
    """Report the numbers of tokens over which the loss does not follow what it follows over its own."""
    words = remark(findings)
    return Found(words) if words else None


@shared
def remark(findings: Findings) -> str:
    """Return in words what a loss follows over supports of other sizes; "" if that is the same."""
    support = findings.loss.support
    if support is None or support.asked or findings.loss.takes.isdisjoint(SUPPORT_FIELDS):
        return ""
    for environment in ENVIRONMENTS:
        row = findings.measure.alone(environment, "current")
        if row is None or row.method != "exact" or row.identified in (None, {"zero": 1.0}):
            continue
        followed = findings.expect if row.agrees else row.identified
        shares = _shares(findings, environment, followed or {})
        if any(not isclose(share, 1.0, rel_tol=BIASED) for share in shares.values()):
            return _words(followed or {}, support.k, shares)
    return ""


def _shares(findings: Findings, environment: str, followed: Combination) -> dict[int, float]:
    """Return by k the multiple of what is followed, over k tokens, that the gradient is; NaN if it is none."""
    measure, found = findings.measure, {}
    case = replace(measure.case(environment, "current"), least=SUPPORT_SIZE + 2)
    for k in range(1, SUPPORT_SIZE + 1):
        wanted = {resized(name, k): coefficient for name, coefficient in followed.items()}
        try:
            gradients = [measure.gradient_of(measure.loss.with_support(k), one, "current") for one in case.instances]
        except TargetError:  # it takes its own number of tokens alone
            continue
        shares = [
            _share(gradient, combine(wanted, one), size(one))
            for gradient, one in zip(gradients, case.instances, strict=True)
        ]
        found[k] = _common(shares)
    return found


def _share(gradient: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    square = float((wanted**2).sum())
    share = float((gradient * wanted).sum()) / square if square else 1.0
    return share if relative_bias(gradient, share * wanted, floor) <= BIASED else np.nan


def _common(shares: list[float]) -> float:
    return shares[0] if all(isclose(one, shares[0], rel_tol=BIASED) for one in shares) else np.nan


def _words(followed: Combination, own: int, shares: dict[int, float]) -> str:
    known = {k: share for k, share in shares.items() if np.isfinite(share)}
    over = f"Over the {own} tokens that it is given by default it follows {render(followed)}"
    if len(known) < len(shares):
        others = listed([str(k) for k in shares if k not in known])
        return f"{over}; over {others} it is no multiple of the same with that number of tokens."
    times = listed([f"{share:.4g} times as much over {k}" for k, share in known.items() if not isclose(share, 1.0)])
    divided = all(isclose(share * k, min(own, SUPPORT_SIZE), rel_tol=BIASED) for k, share in known.items())
    why = " The sum over the tokens is divided by their number." if divided else ""
    return f"{over}; with another number of tokens it is {times}.{why}"
