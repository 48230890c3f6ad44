"""Losses written for JAX, called with torch tensors: the gradient goes through `jax.vjp`.

JAX is imported when the first one is called, never before, since a process that is forked must not have threads of it.
JAX's float64 is switched on for each call, so that a loss computes in float32 only if it says so itself.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from kltest.errors import UsageError
from kltest.loss.building import StandIn
from kltest.loss.jax.program import narrowest
from kltest.rollout import LEAVES, Rollout

CALLED = (
    "It was called with JAX arrays and differentiated by jax.vjp, with JAX's float64 switched on: in float32 it "
    "computes only if it asks for that itself"
)
Run = Callable[..., tuple[list[Any], list[Any]]]
# Flags with which XLA compiles in a fifth of the time; a release that does not know one ends the process.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
KNOWN = (0, 8), (0, 12)
_NARROW = {23: torch.float32, 10: torch.float16, 7: torch.bfloat16}


def jax_loss(function: Callable[..., Any]) -> "JaxLoss":
    """Make a function of JAX arrays into a loss of torch tensors: the same parameters, values and gradients.

    kltest recognises most losses that are written for JAX; this is for those that it does not recognise.

    Args:
        function: a function of JAX arrays, jitted or not.

    Returns:
        A callable. Arrays that the function returns, alone or in tuples, lists and dictionaries, become tensors of
        their shape and type; the gradient at every tensor that requires grad is that of `jax.vjp`.

    Raises:
        UsageError: when it is called and JAX is not installed.
    """
    return function if isinstance(function, JaxLoss) else JaxLoss(function)


class JaxLoss:
    """A function of JAX arrays that is called with tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._bits: int | None = None

    def __repr__(self) -> str:
        return f"jax_loss({self.function!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = {id(leaf): leaf for leaf in _tensors((args, kwargs)) if leaf.requires_grad}
        items: list[Any] = []
        form: Any = None

        def run(*values: Any) -> tuple[list[Any], list[Any]]:
            """Return the arrays that the loss returns for these values of its leaves: floating-point ones, others."""
            nonlocal items, form
            arrays = _Arrays(dict(zip(leaves, values, strict=True)))
            given, named = tree_map(arrays.of, (args, kwargs))
            items, form = tree_flatten(self.function(*given, **named))
            floats = [item for item in items if _is_array(item, floating=True)]
            return floats, [item for item in items if _is_array(item, floating=False)]

        with _ready():
            called: Run = run
            if self._bits is None:
                self._bits, called = _written(run, leaves.values())
            outputs = iter(_Bridge.apply(called, *leaves.values()))
            floats = [self._as_precise(next(outputs)) for item in items if _is_array(item, floating=True)]
            tensors = {True: iter(floats), False: outputs}
            answer = [next(tensors[_is_array(item, floating=True)]) if _is_array(item) else item for item in items]
            return tree_unflatten(answer, form)

    def _as_precise(self, output: Tensor) -> Tensor:
        """Convert to the narrowest type on the way and back: the same numbers, and kltest sees the type."""
        narrow = _NARROW.get(self._bits or 52)
        return output.to(narrow).to(output.dtype) if narrow and output.dtype == torch.float64 else output


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, and the leaves of rollouts and stand-in objects there."""
    for item in tree_leaves(given):
        if isinstance(item, StandIn):
            yield from _tensors(list(vars(item).values()))
        elif isinstance(item, Rollout):
            yield from (item.peek(name) for name in LEAVES if name in item)
        elif isinstance(item, Tensor):
            yield item


def _written(run: Run, leaves: Iterable[Tensor]) -> tuple[int, Run]:
    """Return the digits in which a function computes, and the function as it was written down by calling it once."""
    import jax
    import jax.extend.core

    try:
        written, (floats, _) = jax.make_jaxpr(run, return_shape=True)(*map(as_array, leaves))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return 52, run  # it does what only known numbers allow, as indexing by its mask does

    def again(*values: Any) -> tuple[list[Any], list[Any]]:
        outputs = jax.extend.core.jaxpr_as_fun(written)(*values)
        return outputs[: len(floats)], outputs[len(floats) :]

    return narrowest(written), again


class _Bridge(torch.autograd.Function):
    """Forward is the loss, backward its vjp. JAX does not tell a gradient of zero from none: both are none here."""

    @staticmethod
    def forward(ctx: Any, run: Run, *leaves: Tensor) -> tuple[Tensor, ...]:
        import jax

        floats, ctx.pull, others = jax.vjp(run, *map(as_array, leaves), has_aux=True)
        outputs = [as_tensor(array) for array in (*floats, *others)]
        ctx.mark_non_differentiable(*outputs[len(floats) :])
        ctx.floats, ctx.types = len(floats), [leaf.dtype for leaf in leaves]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        with _ready():
            found = map(as_tensor, ctx.pull([as_array(part) for part in cotangents[: ctx.floats]]))
        return None, *(part.to(kind) if part.any() else None for part, kind in zip(found, ctx.types, strict=True))


def _is_array(item: Any, *, floating: bool | None = None) -> bool:
    """Return True for an array of JAX's; with `floating`, of floating-point numbers or of others."""
    import jax
    import jax.numpy as jnp

    return isinstance(item, jax.Array) and floating in (None, bool(jnp.issubdtype(item.dtype, jnp.floating)))


class _Arrays:
    """Conversion of a loss's arguments into arrays, traced ones for tensors that are differentiated."""

    def __init__(self, traced: Mapping[int, Any]) -> None:
        self._traced = traced

    def of(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return self._traced[id(thing)] if id(thing) in self._traced else as_array(thing)
        return _View(thing, self) if isinstance(thing, Rollout | StandIn) else thing


class _View:
    """A rollout or a stand-in object whose tensors are read as JAX arrays."""

    def __init__(self, thing: Any, arrays: _Arrays) -> None:
        vars(self).update(_thing=thing, _arrays=arrays)

    def __getattr__(self, name: str) -> Any:
        return self._arrays.of(getattr(self._thing, name))

    def __getitem__(self, key: Any) -> Any:
        return self._arrays.of(self._thing[key])

    def get(self, key: Any, default: Any = None) -> Any:
        return self._arrays.of(self._thing.get(key, default))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._thing, name, value)

    def __contains__(self, key: Any) -> bool:
        return key in self._thing

    def __iter__(self) -> Iterator[Any]:
        return iter(self._thing)


def as_array(tensor: Tensor) -> Any:
    """Return a tensor's numbers as a JAX array of the same type."""
    import jax
    import jax.numpy as jnp

    plain = tensor.detach()
    narrow = jnp.bfloat16 if plain.dtype == torch.bfloat16 else None
    numbers = (plain if narrow is None else plain.float()).numpy()
    with jax.ensure_compile_time_eval():
        # A copy, since JAX may keep reading memory that torch writes into.
        return jax.device_put(numbers.copy() if narrow is None else numbers.astype(narrow))


def as_tensor(array: Any) -> Tensor:
    """Return a JAX array's numbers as a tensor of the same type."""
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


@contextmanager
def _ready() -> Iterator[None]:
    """Run JAX on the CPU, with float64, optimising little; UsageError if JAX is not installed."""
    try:
        import jax
    except ImportError as error:
        raise UsageError(f"a loss written for JAX needs JAX (pip install jax): {error}") from None
    wide: Any = getattr(jax, "enable_x64", None)
    if wide is None:
        from jax import experimental

        wide = experimental.enable_x64
    # Compiling for every shape of batch takes longer than all that is computed.
    if KNOWN[0] <= jax.version.__version_info__ < KNOWN[1]:
        os.environ.setdefault("XLA_FLAGS", QUICK)
    name = "jax_disable_most_optimizations"
    before = jax.config.values.get(name)
    if before is False:
        jax.config.update(name, True)
    try:
        with wide(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            yield
    finally:
        if before is False:
            jax.config.update(name, before)
