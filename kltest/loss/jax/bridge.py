"""Losses written for JAX, called with torch tensors: the gradient goes through `jax.vjp`.

JAX is imported when the first one is called, never before, since a process that is forked must not have threads of it.
JAX's float64 is switched on for each call, so that a loss computes in float32 only if it says so itself.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from kltest.errors import UsageError
from kltest.loss.arguments import Stub
from kltest.loss.jax.program import narrowest
from kltest.rollout import Rollout

CALLED = (
    "It was called with JAX arrays and differentiated by jax.vjp, with JAX's float64 switched on: in float32 it "
    "computes only if it asks for that itself"
)
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

    def __repr__(self) -> str:
        return f"jax_loss({self.function!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _ready():
            items = tree_leaves((args, kwargs))
            leaves = [item for item in items if isinstance(item, Tensor) and item.requires_grad]
            if any(isinstance(item, Rollout | Stub) for item in items):
                first = _Arrays()
                self.called(first, args, kwargs)
                leaves += first.trained
            leaves = list({id(leaf): leaf for leaf in leaves}.values())
            call = _Call(self, args, kwargs, leaves)
            return call.answer(_Bridge.apply(call, *leaves))

    def called(self, arrays: "_Arrays", args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(arrays.of, (args, kwargs))
        return self.function(*args, **kwargs)


class _Call:
    """One call: what the loss does with the values of its leaves, and how to put its answer together of tensors."""

    def __init__(self, loss: JaxLoss, args: Any, kwargs: Any, leaves: list[Tensor]) -> None:
        self.loss, self.args, self.kwargs, self.leaves = loss, args, kwargs, leaves
        self._bits, self._floats = 52, 0
        self._items: list[Any] = []
        self._form: Any = None

    def _run(self, *values: Any) -> tuple[list[Any], list[Any]]:
        """Return the arrays that the loss returns for these values of its leaves: floating-point ones, and others."""
        by_leaf = {id(leaf): value for leaf, value in zip(self.leaves, values, strict=True)}
        self._items, self._form = tree_flatten(self.loss.called(_Arrays(by_leaf), self.args, self.kwargs))
        floats = [item for item in self._items if _is_array(item, floating=True)]
        self._floats = len(floats)
        return floats, [item for item in self._items if _is_array(item, floating=False)]

    def forward(self, values: list[Any]) -> tuple[list[Tensor], Callable[..., Any]]:
        """Return what the loss returns, and its vjp. It is traced for every call, since each may do something else."""
        import jax
        import jax.extend.core

        run = self._run
        try:
            written = jax.make_jaxpr(run)(*values)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            pass  # it does what only known numbers allow, as indexing by its mask does
        else:
            self._bits = narrowest(written)

            def run(*leaves: Any) -> tuple[list[Any], list[Any]]:
                outputs = jax.extend.core.jaxpr_as_fun(written)(*leaves)
                return outputs[: self._floats], outputs[self._floats :]

        floats, pull, others = jax.vjp(run, *values, has_aux=True)
        outputs = [as_tensor(array) for array in (*floats, *others)]
        return outputs, lambda cotangents: pull(list(cotangents[: len(floats)]))

    def answer(self, outputs: Any) -> Any:
        """Return what the loss returned, with tensors in the places of its arrays."""
        floats, others = map(self._as_precise, outputs[: self._floats]), iter(outputs[self._floats :])
        items = [
            next(floats)
            if _is_array(item, floating=True)
            else next(others)
            if _is_array(item, floating=False)
            else item
            for item in self._items
        ]
        return tree_unflatten(items, self._form)

    def _as_precise(self, output: Tensor) -> Tensor:
        """Convert to the narrowest type on the way and back: the same numbers, and kltest sees the type."""
        narrow = _NARROW.get(self._bits)
        return output.to(narrow).to(output.dtype) if narrow and output.dtype == torch.float64 else output


class _Bridge(torch.autograd.Function):
    """Forward is the loss, backward its vjp. JAX does not tell a gradient of zero from none: both are none here."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs, ctx.pull = call.forward([as_array(leaf) for leaf in leaves])
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.types = [leaf.dtype for leaf in leaves]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        with _ready():
            found = map(as_tensor, ctx.pull([as_array(part) for part in cotangents]))
        return None, *(part.to(kind) if part.any() else None for part, kind in zip(found, ctx.types, strict=True))


def _is_array(item: Any, *, floating: bool) -> bool:
    import jax
    import jax.numpy as jnp

    return isinstance(item, jax.Array) and bool(jnp.issubdtype(item.dtype, jnp.floating)) == floating


class _Arrays:
    """Conversion of a loss's arguments into arrays, traced ones for tensors that are differentiated."""

    def __init__(self, traced: Mapping[int, Any] | None = None) -> None:
        self._traced = traced or {}
        self.trained: list[Tensor] = []

    def of(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            if id(thing) in self._traced:
                return self._traced[id(thing)]
            if thing.requires_grad:
                self.trained.append(thing)
            return as_array(thing)
        if isinstance(thing, list):
            return [self.of(item) for item in thing]
        return _View(thing, self) if isinstance(thing, Rollout | Stub) else thing


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
        return jnp.asarray(numbers.copy(), dtype=narrow)


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
