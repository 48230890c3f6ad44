"""What a function does step by step, as JAX writes it down: compiled once, and followed for precision and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_WHOLE_STAYS_WHOLE = frozenset(
    {"add", "sub", "mul", "neg", "max", "min", "sign", "abs", "reduce_sum", "reduce_max", "reduce_min", "cumsum"}
    | {"convert_element_type", "select_n", "copy", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pad"}
    | {"transpose", "concatenate", "slice", "dynamic_slice", "gather", "rev", "iota"}
)
# What only stands for the steps inside of it; functions with derivatives of their own do more than that.
_INLINED = frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "checkpoint"})


class Lift(NamedTuple):
    """Steps that do nothing: stop-gradients; clamps, and minima and maxima with a constant."""

    stops: bool = False
    limits: bool = False


@dataclass(frozen=True)
class Steps:
    """`bits`: the fewest digits (of a mantissa) that what it returns was computed with; `reached`: for each array
    that it returns, whether a gradient gets from there to what is differentiated.
    """

    bits: int = 52
    reached: tuple[bool, ...] = ()


class Compiled:
    """The steps of one function as two programs: what it returns, and its vjp with respect to `values`.

    The first `floats` arrays that it returns are floating-point ones; constants are arguments of the programs.
    """

    def __init__(self, written: Any, lift: Lift, floats: int) -> None:
        import jax
        import jax.extend.core

        def outputs(constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            if not any(lift):
                again = jax.extend.core.ClosedJaxpr(written.jaxpr, list(constants))
                return jax.extend.core.jaxpr_as_fun(again)(*values)
            return _evaluated(written.jaxpr, constants, [_Value(value, True) for value in values], lift)

        def pulled(constants: Sequence[Any], values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            _, pull = jax.vjp(lambda *leaves: outputs(constants, leaves)[:floats], *values)
            return pull(list(cotangents))

        self.steps = followed(written)
        self.forward: Callable[..., Any] = jax.jit(outputs)
        self.backward: Callable[..., Any] = jax.jit(pulled)


def outline(written: Any) -> Any:
    """The steps of a function, those that stand for others by the object that JAX has for them.

    It is the same for two functions only if they do the same but for their constants, as long as the objects live.
    """
    numbers: dict[Any, int] = {}

    def told(atom: Any) -> Any:
        kind = str(atom.aval)
        if hasattr(atom, "val"):
            return kind, np.asarray(atom.val).tobytes()
        return kind, numbers.setdefault(atom, len(numbers))

    def whole(step: Any) -> Any:
        parts = tuple(id(part) for part in _parts(step))
        how = parts if step.primitive.name in _INLINED and parts else str(step.params)
        return step.primitive.name, how, *map(told, (*step.invars, *step.outvars))

    jaxpr = written.jaxpr
    ends = tuple(map(told, (*jaxpr.constvars, *jaxpr.invars)))
    return ends, tuple(map(whole, jaxpr.eqns)), tuple(map(told, jaxpr.outvars))


def identity(written: Any) -> Any:
    """What two functions share only if they do the same but for their constants; None where that cannot be told."""
    inner = list(_inside(written.jaxpr))
    if getattr(written.jaxpr, "effects", ()) or any("custom_v" in step.primitive.name for step in inner):
        return None
    hidden = tuple(
        np.asarray(value).tobytes()
        for step in inner
        for value in (
            *(atom.val for atom in step.invars if hasattr(atom, "val")),
            *(constant for part in _parts(step) for constant in getattr(part, "consts", ())),
        )
    )
    return str(written.jaxpr), hidden


def followed(written: Any) -> Steps:
    """In which precision the arrays that a function returns are computed, and which of them a gradient gets through."""
    constants = [_constant(value) for value in written.consts]
    found = _followed(written.jaxpr, constants, [_Known(reached=True) for _ in written.jaxpr.invars])
    return Steps(min((known.bits for known in found), default=52), tuple(known.reached for known in found))


@dataclass(frozen=True)
class _Known:
    """Of one intermediate: digits, whether it depends on what is differentiated, whether it holds whole numbers."""

    bits: int = 52
    reached: bool = False
    whole: bool = False


def _followed(jaxpr: Any, constants: Sequence[_Known], given: Sequence[_Known]) -> list[_Known]:
    known: dict[Any, _Known] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *given), strict=True))

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
    loops = [str(output.aval.dtype) for inner in _all_inside(step) for output in inner.outvars]
    return [_one(step, str(output.aval.dtype), inputs, loops) for output in step.outvars]


def _one(step: Any, kind: str, inputs: list[_Known], loops: list[str]) -> _Known:
    name = step.primitive.name
    floating = kind in _BITS
    whole = not floating or (name in _WHOLE_STAYS_WHOLE and all(known.whole for known in inputs))
    bits = min((known.bits for known in inputs), default=52)
    if floating and not whole:
        bits = min(bits, _BITS[kind], *(_BITS.get(inner, 52) for inner in loops))
    reached = floating and name != "stop_gradient" and any(known.reached for known in inputs)
    return _Known(bits, reached, whole)


def _constant(value: Any) -> _Known:
    """A constant in a narrow type has lost digits, unless it holds whole numbers, as a mask and a count do."""
    kind = str(getattr(value, "dtype", "float64"))
    if kind not in _BITS:
        return _Known(whole=True)
    numbers = np.asarray(value, dtype=np.float64)
    whole = bool(np.all(numbers == np.round(numbers)))
    return _Known(52 if whole else _BITS[kind], whole=whole)


class _Value(NamedTuple):
    """An intermediate array, and whether it depends on anything but numbers that stand in the function."""

    array: Any
    depends: bool


def _evaluated(jaxpr: Any, constants: Sequence[Any], given: Sequence[_Value], lift: Lift) -> list[Any]:
    return [value.array for value in _values(jaxpr, [_Value(one, True) for one in constants], given, lift)]


def _values(jaxpr: Any, constants: Sequence[_Value], given: Sequence[_Value], lift: Lift) -> list[_Value]:
    known: dict[Any, _Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *given), strict=True))

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


def _all_inside(step: Any) -> Iterator[Any]:
    for part in _parts(step):
        yield from _inside(getattr(part, "jaxpr", part))


def _inside(jaxpr: Any) -> Iterator[Any]:
    """All steps, those within steps too."""
    for step in jaxpr.eqns:
        yield step
        yield from _all_inside(step)
