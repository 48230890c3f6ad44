"""Functions and modules of libraries that are several operations: divergences, distributions, and modules of losses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kltest.symbolic.values import External, Node, Partial

Made = Callable[..., Any]
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
LIBRARIES = ("torch.distributions.", "scipy.special.", "jax.scipy.special.", "optax.")


def module_of(path: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the function that a module of torch.nn computes; None if it is another one."""
    owner, _, name = path.rpartition(".")
    if owner not in ("torch.nn", "torch.nn.modules.loss") or name not in MODULES:
        return None
    function, first = MODULES[name]
    given = dict(zip([first], arguments, strict=False)) if first else {}
    return Partial(External(f"torch.nn.functional.{function}"), (), {**given, **named})


def composed(path: str, arguments: Sequence[Any], made: Made) -> Any:
    """Return what a function of a library computes, from operations that are `made`; None if it is another one."""
    if not path.startswith(LIBRARIES) or len(arguments) != 2:
        return None
    one, other = arguments
    match path.rpartition(".")[2]:
        case "rel_entr":
            return made("*", one, made("-", made("log", one), made("log", other)))
        case "kl_divergence" if path.startswith("torch"):
            mine, theirs = _log_probs(one, made), _log_probs(other, made)
            if mine is None or theirs is None:
                return None
            return made("sum", made("*", made("exp", mine), made("-", mine, theirs)), -1)
        case "kl_divergence":
            return made("sum", made("*", other, made("-", made("log", other), one)), -1)
        case "kl_divergence_with_log_targets":
            return made("sum", made("*", made("exp", other), made("-", other, one)), -1)
        case "softmax_cross_entropy":
            return made("negated", made("sum", made("*", other, made("log_softmax", one, -1)), -1))
    return None


def _log_probs(distribution: Any, made: Made) -> Any:
    """Return the log-probs of a categorical distribution."""
    if not isinstance(distribution, Node) or not str(distribution.arguments[0]).endswith("Categorical"):
        return None
    given = {**dict(zip(("probs", "logits"), distribution.arguments[1:], strict=False)), **dict(distribution.named)}
    if given.get("logits") is not None:
        return made("log_softmax", given["logits"], -1)
    return made("log", given["probs"]) if given.get("probs") is not None else None
