"""Modules of losses that are functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from kltest.symbolic.values import External, Partial

# Modules that compute what a function of torch.nn.functional does, and the name of their first argument, if it has one.
MODULES = {
    "CrossEntropyLoss": ("cross_entropy", ""),
    "KLDivLoss": ("kl_div", ""),
    "LogSigmoid": ("logsigmoid", ""),
    "LogSoftmax": ("log_softmax", "dim"),
    "MSELoss": ("mse_loss", ""),
    "NLLLoss": ("nll_loss", ""),
    "SmoothL1Loss": ("smooth_l1_loss", ""),
    "Softmax": ("softmax", "dim"),
}


def module_of(path: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the function that a module of torch.nn computes; None if it is another one."""
    owner, _, name = path.rpartition(".")
    if owner not in ("torch.nn", "torch.nn.modules.loss") or name not in MODULES:
        return None
    function, first = MODULES[name]
    given = dict(zip([first], arguments, strict=False)) if first else {}
    return Partial(External(f"torch.nn.functional.{function}"), (), {**given, **named})
