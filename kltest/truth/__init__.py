"""Exact results of an environment: named gradients, KL values and the regularised optimum. Never sees an estimator.

Names are listed, parsed and rendered without numpy or torch; functions that compute are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kltest.truth.atlas import ATLAS, NamedGradient
from kltest.truth.combination import combine, parse, plain, render

if TYPE_CHECKING:
    from kltest.truth.autograd import gradient_again, value_again
    from kltest.truth.fixed_points import sequence_k3_fixed_point, token_k2_fixed_point, token_k3_fixed_point
    from kltest.truth.gradients import gradient
    from kltest.truth.jacobians import asymmetry, jacobian
    from kltest.truth.regularised import Optimum, optimum
    from kltest.truth.values import VALUES, value

_HOMES = {
    "gradient": "gradients",
    "gradient_again": "autograd",
    "VALUES": "values",
    "value": "values",
    "value_again": "autograd",
    "Optimum": "regularised",
    "optimum": "regularised",
    "token_k2_fixed_point": "fixed_points",
    "token_k3_fixed_point": "fixed_points",
    "sequence_k3_fixed_point": "fixed_points",
    "asymmetry": "jacobians",
    "jacobian": "jacobians",
}

__all__ = [
    "ATLAS",
    "VALUES",
    "NamedGradient",
    "Optimum",
    "asymmetry",
    "combine",
    "gradient",
    "gradient_again",
    "jacobian",
    "optimum",
    "parse",
    "plain",
    "render",
    "sequence_k3_fixed_point",
    "token_k2_fixed_point",
    "token_k3_fixed_point",
    "value",
    "value_again",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
