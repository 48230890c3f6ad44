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
    """A function of JAX arrays that is called with tensors.

    `precision` is the narrowest type to which a step of its first call rounds.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.precision: torch.dtype | None = None

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
            traced = dict(zip(leaves, values, strict=True))
            given, named = tree_map(lambda thing: _for_jax(thing, traced), (args, kwargs))
            items, form = tree_flatten(self.function(*given, **named))
            return [item for item in items if _floating(item)], [item for item in items if _floating(item) is False]

        with _ready():
            called: Run = run
            if self.precision is None:
                self.precision, called = _written(run, leaves.values())
            outputs = _Bridge.apply(called, *leaves.values())
            # A function that was written down is not run again: `items` are those of the call that wrote it.
            places = [place for kind in (True, False) for place, item in enumerate(items) if _floating(item) is kind]
            for place, output in zip(places, outputs, strict=True):
                items[place] = output
            return tree_unflatten(items, form)


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, and the leaves of rollouts and stand-in objects there."""
    for item in tree_leaves(given):
        if isinstance(item, StandIn):
            yield from _tensors(list(vars(item).values()))
        elif isinstance(item, Rollout):
            yield from (item.peek(name) for name in LEAVES if name in item)
        elif isinstance(item, Tensor):
            yield item


def _written(run: Run, leaves: Iterable[Tensor]) -> tuple[torch.dtype, Run]:
    """Return the type in which a function computes, and the function as it was written down by calling it once."""
    import jax
    import jax.extend.core

    try:
        written, (floats, _) = jax.make_jaxpr(run, return_shape=True)(*map(as_array, leaves))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return torch.float64, run  # it does what only known numbers allow, as indexing by its mask does

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


def _floating(item: Any) -> bool | None:
    """Return True for a JAX array of floating-point numbers, False for one of others, None for anything else."""
    import jax
    import jax.numpy as jnp

    return bool(jnp.issubdtype(item.dtype, jnp.floating)) if isinstance(item, jax.Array) else None


def _for_jax(thing: Any, traced: Mapping[int, Any]) -> Any:
    """Return what a loss is given for one argument: arrays, those `traced` for tensors that are differentiated."""
    if isinstance(thing, Tensor):
        return traced[id(thing)] if id(thing) in traced else as_array(thing)
    return _View(thing, traced) if isinstance(thing, Rollout | StandIn) else thing


class _View:
    """A rollout or a stand-in object whose tensors are read as JAX arrays."""

    def __init__(self, thing: Any, traced: Mapping[int, Any]) -> None:
        vars(self).update(_thing=thing, _traced=traced)

    def __getattr__(self, name: str) -> Any:
        return _for_jax(getattr(self._thing, name), self._traced)

    def __getitem__(self, key: Any) -> Any:
        return _for_jax(self._thing[key], self._traced)

    def get(self, key: Any, default: Any = None) -> Any:
        return _for_jax(self._thing.get(key, default), self._traced)

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
        from jax import experimental
    except ImportError as error:
        raise UsageError(f"a loss written for JAX needs JAX (pip install jax): {error}") from None
    wide: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else experimental.enable_x64
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
