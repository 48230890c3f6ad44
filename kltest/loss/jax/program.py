"""Precision in which a JAX function computes.

JAX writes a function down as a jaxpr, a list of primitive steps. The arrays that a function returns do not tell that
an intermediate one was float32; its jaxpr does.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_WHOLE_STAYS_WHOLE = frozenset(
    {"add", "sub", "mul", "neg", "max", "min", "sign", "abs", "reduce_sum", "reduce_max", "reduce_min", "cumsum"}
    | {"convert_element_type", "select_n", "copy", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pad"}
    | {"transpose", "concatenate", "slice", "dynamic_slice", "gather", "rev", "iota"}
)
# Calls that only stand for the steps inside them; functions with derivatives of their own do more than that.
_INLINED = frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "checkpoint"})


class _Known(NamedTuple):
    """Digits of the narrowest mantissa on the way to a value; `whole`: it holds whole numbers only."""

    bits: int = 52
    whole: bool = False


def narrowest(written: Any) -> int:
    """Return the digits of the narrowest mantissa on the way to the outputs of a closed jaxpr."""
    known = _followed(written.jaxpr, written.consts, [_Known()] * len(written.jaxpr.invars))
    return min((each.bits for each in known), default=52)


def _followed(jaxpr: Any, constants: Sequence[Any], inputs: Sequence[_Known]) -> list[_Known]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(_constant, constants), *inputs), strict=True))

    def of(atom: Any) -> _Known:
        return _constant(atom.val) if hasattr(atom, "val") else known[atom]

    for step in jaxpr.eqns:
        known.update(zip(step.outvars, _after(step, [of(atom) for atom in step.invars]), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _after(step: Any, inputs: list[_Known]) -> list[_Known]:
    name = step.primitive.name
    parts = list(_parts(step))
    if parts and (name in _INLINED or "custom_jvp" in name):
        return _followed(getattr(parts[0], "jaxpr", parts[0]), getattr(parts[0], "consts", ()), inputs)
    inside = min((_BITS.get(str(output.aval.dtype), 52) for output in _outputs(parts)), default=52)
    before = min((known.bits for known in inputs), default=52)
    # A mask or a count in float32 has lost nothing, nor has a sum of such.
    whole = name in _WHOLE_STAYS_WHOLE and all(known.whole for known in inputs)
    kinds = [_BITS.get(str(output.aval.dtype)) for output in step.outvars]
    return [_Known(before, True) if whole or bits is None else _Known(min(before, bits, inside)) for bits in kinds]


def _constant(value: Any) -> _Known:
    kind = str(getattr(value, "dtype", "float64"))
    if kind not in _BITS:
        return _Known(whole=True)
    numbers = np.asarray(value, dtype=np.float64)
    whole = bool(np.all(numbers == np.round(numbers)))
    return _Known(52 if whole else _BITS[kind], whole)


def _parts(step: Any) -> Iterator[Any]:
    """Yield the functions that a step holds: of a call, a loop, a branch."""
    for value in step.params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(part, "jaxpr", part), "eqns"):
                yield part


def _outputs(parts: Sequence[Any]) -> Iterator[Any]:
    """Yield what the steps of some functions give, at any depth."""
    for part in parts:
        for inner in getattr(part, "jaxpr", part).eqns:
            yield from inner.outvars
            yield from _outputs(list(_parts(inner)))
