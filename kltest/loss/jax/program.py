"""The steps of a JAX function: in which precision they compute, and how far gradients reach.

JAX writes a function down as a jaxpr, a list of primitive steps. The arrays that a function returns do not tell that
an intermediate one was float32 or that a gradient was stopped; its jaxpr does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_WHOLE_STAYS_WHOLE = frozenset(
    {"add", "sub", "mul", "neg", "max", "min", "sign", "abs", "reduce_sum", "reduce_max", "reduce_min", "cumsum"}
    | {"convert_element_type", "select_n", "copy", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pad"}
    | {"transpose", "concatenate", "slice", "dynamic_slice", "gather", "rev", "iota"}
)
# Calls that only stand for the steps inside them; functions with derivatives of their own do more than that.
_INLINED = frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "checkpoint"})


@dataclass(frozen=True)
class Steps:
    """`bits`: digits of the narrowest mantissa on the way to the outputs; `reached`: for each output, if a gradient
    gets from there to an input.
    """

    bits: int = 52
    reached: tuple[bool, ...] = ()


def followed(written: Any) -> Steps:
    """Return the precision and the reach of the outputs of a closed jaxpr."""
    constants = [_constant(value) for value in written.consts]
    found = _followed(written.jaxpr, constants, [_Known(reached=True) for _ in written.jaxpr.invars])
    return Steps(min((known.bits for known in found), default=52), tuple(known.reached for known in found))


@dataclass(frozen=True)
class _Known:
    """One intermediate: its digits, if it depends on what is differentiated, if it holds whole numbers."""

    bits: int = 52
    reached: bool = False
    whole: bool = False


def _followed(jaxpr: Any, constants: Sequence[_Known], inputs: Sequence[_Known]) -> list[_Known]:
    known: dict[Any, _Known] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def of(atom: Any) -> _Known:
        return _constant(atom.val) if hasattr(atom, "val") else known[atom]

    for step in jaxpr.eqns:
        known.update(zip(step.outvars, _after(step, [of(atom) for atom in step.invars]), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _after(step: Any, inputs: list[_Known]) -> list[_Known]:
    for part in _parts(step):
        inner = getattr(part, "jaxpr", part)
        if step.primitive.name in _INLINED or "custom_jvp" in step.primitive.name:
            return _followed(inner, [_constant(value) for value in getattr(part, "consts", ())], inputs)
    loops = [str(output.aval.dtype) for inner in _inside(step) for output in inner.outvars]
    return [_one(step, str(output.aval.dtype), inputs, loops) for output in step.outvars]


def _one(step: Any, kind: str, inputs: list[_Known], loops: list[str]) -> _Known:
    name = step.primitive.name
    floating = kind in _BITS
    # A mask or a count in float32 has lost nothing, nor has a sum of such.
    whole = not floating or (name in _WHOLE_STAYS_WHOLE and all(known.whole for known in inputs))
    bits = min((known.bits for known in inputs), default=52)
    if floating and not whole:
        bits = min(bits, _BITS[kind], *(_BITS.get(inner, 52) for inner in loops))
    reached = floating and name != "stop_gradient" and any(known.reached for known in inputs)
    return _Known(bits, reached, whole)


def _constant(value: Any) -> _Known:
    kind = str(getattr(value, "dtype", "float64"))
    if kind not in _BITS:
        return _Known(whole=True)
    numbers = np.asarray(value, dtype=np.float64)
    whole = bool(np.all(numbers == np.round(numbers)))
    return _Known(52 if whole else _BITS[kind], whole=whole)


def _parts(step: Any) -> Iterator[Any]:
    """The functions that a step holds: of a call, a loop, a branch."""
    for value in step.params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(part, "jaxpr", part), "eqns"):
                yield part


def _inside(step: Any) -> Iterator[Any]:
    """All steps of the functions that a step holds, at any depth."""
    for part in _parts(step):
        for inner in getattr(part, "jaxpr", part).eqns:
            yield inner
            yield from _inside(inner)
