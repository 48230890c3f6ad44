"""Exact results of an environment: named gradients, KL values and the regularised optimum. Never sees an estimator.

Names are listed, parsed and rendered without numpy or torch; functions that compute are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kltest.truth.atlas import (
    ATLAS,
    FURTHER,
    OF_POLICY,
    MixtureName,
    NamedGradient,
    counts_alone,
    is_of_groups,
    is_of_lengths,
    mixture_named,
    of_group,
    of_mixtures,
    of_support,
    on_rollouts_of_the_sampler,
    parse,
    plain,
    render,
    resized,
    support_named,
    together,
)

if TYPE_CHECKING:
    from kltest.truth.autograd import gradient_again
    from kltest.truth.gradients import combine, gradient
    from kltest.truth.regularised import Optimum, optimum
    from kltest.truth.token_level import TokenLevelGap, token_level_fixed_point, token_level_gap
    from kltest.truth.values import VALUES, value

_HOMES = {
    "autograd": ("gradient_again",),
    "gradients": ("combine", "gradient"),
    "values": ("VALUES", "value"),
    "regularised": ("Optimum", "optimum"),
    "token_level": ("TokenLevelGap", "token_level_fixed_point", "token_level_gap"),
}

__all__ = [
    "ATLAS",
    "FURTHER",
    "OF_POLICY",
    "VALUES",
    "MixtureName",
    "NamedGradient",
    "Optimum",
    "TokenLevelGap",
    "combine",
    "counts_alone",
    "gradient",
    "gradient_again",
    "is_of_groups",
    "is_of_lengths",
    "mixture_named",
    "of_group",
    "of_mixtures",
    "of_support",
    "on_rollouts_of_the_sampler",
    "optimum",
    "parse",
    "plain",
    "render",
    "resized",
    "support_named",
    "together",
    "token_level_fixed_point",
    "token_level_gap",
    "value",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
