"""Precision in which a JAX function computes, read from its jaxpr: the list of its primitive steps.

The arrays that a function returns do not tell that an intermediate one was float32.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kltest.loss.precision import DIGITS, least_precise

_TYPES = {str(kind).removeprefix("torch."): kind for kind in DIGITS}
# A mask or a count in float32 has lost nothing, nor has what these make of it.
_WHOLE_STAYS_WHOLE = frozenset(
    {"add", "sub", "mul", "neg", "max", "min", "sign", "abs", "reduce_sum", "reduce_max", "reduce_min", "cumsum"}
    | {"convert_element_type", "select_n", "copy", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pad"}
    | {"transpose", "concatenate", "slice", "dynamic_slice", "gather", "rev", "iota"}
)


def narrowest(written: Any) -> torch.dtype:
    """Return the narrowest type to which a step of a closed jaxpr rounds."""
    constants = zip(written.jaxpr.constvars, written.consts, strict=True)
    return least_precise(_rounded(written.jaxpr, {name for name, value in constants if _is_whole(value)}))


def _rounded(jaxpr: Any, whole: set[Any]) -> Iterator[torch.dtype]:
    """Yield the type of each step's results; `whole` are the variables that are known to hold whole numbers.

    It is added to: the caller asks it about the outputs.
    """
    for step in jaxpr.eqns:
        exact = [_holds_whole(atom, whole) for atom in step.invars]
        inside = list(_functions(step))
        for function in inside:
            inputs = zip(function.invars, exact, strict=False) if len(function.invars) == len(exact) else ()
            known = {variable for variable, is_exact in inputs if is_exact}
            yield from _rounded(function, known)
            outputs = zip(step.outvars, function.outvars, strict=False)
            whole |= {mine for mine, own in outputs if _holds_whole(own, known)}
        if all(exact) and step.primitive.name in _WHOLE_STAYS_WHOLE:
            whole |= {*step.outvars}
        elif not inside:
            yield from (_TYPES.get(str(output.aval.dtype), torch.float64) for output in step.outvars)


def _holds_whole(atom: Any, whole: set[Any]) -> bool:
    """Return True for a literal or a variable of whole numbers; literals cannot be looked up in a set."""
    return _is_whole(atom.val) if hasattr(atom, "val") else atom in whole


def _is_whole(value: Any) -> bool:
    if str(getattr(value, "dtype", "float64")) not in _TYPES:
        return True
    numbers = np.asarray(value, dtype=np.float64)
    return bool(np.all(numbers == np.round(numbers)))


def _functions(step: Any) -> Iterator[Any]:
    """Yield the functions that a step holds: of a call, a loop, a branch."""
    for value in step.params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            function = getattr(part, "jaxpr", part)
            if hasattr(function, "eqns"):
                yield function
