"""The steps of a JAX function: in which precision they compute, how far gradients reach, and how to leave some out.

JAX writes a function down as a jaxpr, a list of primitive steps. Neither question can be answered from outside: the
arrays that a function returns do not tell that an intermediate one was float32 or that a gradient was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


class Lift(NamedTuple):
    """Steps to leave out: stop-gradients; clamps, and minima and maxima with a constant."""

    stops: bool = False
    limits: bool = False


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


class _Value(NamedTuple):
    """An intermediate array; `depends` is False if it is made of numbers that stand in the function alone."""

    array: Any
    depends: bool


def lifted(written: Any, values: Sequence[Any], lift: Lift) -> list[Any]:
    """Return the outputs of a closed jaxpr for some inputs, computed without the steps that `lift` leaves out."""
    constants = [_Value(one, True) for one in written.consts]
    return [value.array for value in _values(written.jaxpr, constants, [_Value(one, True) for one in values], lift)]


def _values(jaxpr: Any, constants: Sequence[_Value], inputs: Sequence[_Value], lift: Lift) -> list[_Value]:
    known: dict[Any, _Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def of(atom: Any) -> _Value:
        return _Value(atom.val, False) if hasattr(atom, "val") else known[atom]

    for step in jaxpr.eqns:
        known.update(zip(step.outvars, _done(step, [of(atom) for atom in step.invars], lift), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _done(step: Any, inputs: list[_Value], lift: Lift) -> list[_Value]:
    name = step.primitive.name
    if name in _INLINED:
        (part,) = _parts(step)
        return _values(part.jaxpr, [_Value(one, True) for one in part.consts], inputs, lift)
    if lift.stops and name == "stop_gradient":
        return inputs
    if lift.limits and name == "clamp":
        return [inputs[1]]
    if lift.limits and name in ("min", "max") and inputs[0].depends != inputs[1].depends:
        import jax.numpy as jnp

        kept = next(value for value in inputs if value.depends)
        return [_Value(jnp.broadcast_to(kept.array, step.outvars[0].aval.shape), True)]
    bound = step.primitive.get_bind_params(step.params)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
    found = step.primitive.bind(*functions, *(value.array for value in inputs), **parameters)
    depends = any(value.depends for value in inputs)
    return [_Value(one, depends) for one in (found if step.primitive.multiple_results else [found])]


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
