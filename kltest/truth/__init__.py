"""Exact results of an environment: named gradients, KL values and the regularised optimum. Never sees an estimator.

Names are listed, parsed and rendered without numpy or torch; functions that compute are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kltest.truth.atlas import ATLAS, NamedGradient, parse, plain, render

if TYPE_CHECKING:
    from kltest.truth.autograd import gradient_again, value_again
    from kltest.truth.gradients import combine, gradient
    from kltest.truth.jacobians import asymmetry, jacobian
    from kltest.truth.regularised import (
        Optimum,
        optimum,
        sequence_k3_fixed_point,
        token_k2_fixed_point,
        token_k3_fixed_point,
    )
    from kltest.truth.values import VALUES, value

_HOMES = {
    "gradients": ("combine", "gradient"),
    "autograd": ("gradient_again", "value_again"),
    "values": ("VALUES", "value"),
    "regularised": ("Optimum", "optimum", "token_k2_fixed_point", "token_k3_fixed_point", "sequence_k3_fixed_point"),
    "jacobians": ("asymmetry", "jacobian"),
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
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
