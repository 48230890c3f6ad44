"""Calls of a loss under watch: each step shows if the function works token by token, whatever stands in its fields.

torch announces every step on a tensor to a mode, and whatever Python reads of one: a number, a shape, an array. If all
steps of a call are entrywise, on tensors that come from the fields of tokens, and Python read nothing of them, then the
call is a formula of each token's own fields, for any content and any number of rows and tokens. The formula is that of
the call itself, with its closures, defaults and decorators, and with writes into memory that two names share, which the
source does not show. A tensor of other origin (compiled code, a backward pass of the function's own) ends the proof.
Calls that follow other formulas end it too, but what a function does by its own count, or by a clock, remains unseen:
numbers are compared for that (kltest.moments.dynamic_programming).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from kltest.errors import UsageError
from kltest.loss.arguments import FieldOf, SizeOf
from kltest.loss.building import ObjectOf
from kltest.loss.calling import Loss
from kltest.loss.derived import Derived
from kltest.loss.jax.bridge import JaxLoss

# Fields whose entries are those of a token in a context, for every sampler.
TOKEN_FIELDS = frozenset({"logp", "ref_logp", "old_logp", "rollout_logp", "prox_logp", "mask", "tokens"})
HOMES = torch, Tensor, torch._C.TensorBase, torch.nn.functional, torch._C._nn


def _steps(names: str) -> frozenset[Any]:
    """Return the functions and methods of torch that have these names."""
    return frozenset(getattr(home, name) for home in HOMES for name in names.split() if hasattr(home, name))


CASTS = _steps("to double float half bfloat16 bool int long type_as clone contiguous detach")
PRODUCTS, QUOTIENTS = _steps("mul multiply"), _steps("div divide true_divide neg negative")
# Steps of one tensor, and of several, that leave zeros zero.
KEEPING, TOTALS = _steps("abs absolute square expm1 sign tanh sin relu"), _steps("add sub subtract")
POWERS = _steps("pow __pow__")
CONJUNCTIONS, NEGATIONS = _steps("__and__ logical_and"), _steps("__invert__ logical_not")
EQUAL, UNEQUAL = _steps("__eq__ eq"), _steps("ne gt")
WHERE, FILL, ZEROS = _steps("where"), _steps("masked_fill"), _steps("zeros_like")
ENTRYWISE = CASTS.union(
    *(PRODUCTS, QUOTIENTS, KEEPING, TOTALS, POWERS, CONJUNCTIONS, NEGATIONS, EQUAL, UNEQUAL, WHERE, FILL, ZEROS),
    _steps("exp exp2 log log2 log10 log1p sqrt rsqrt float_power reciprocal sigmoid cos erf rsub softplus"),
    _steps("log_sigmoid elu leaky_relu silu gelu clamp clip clamp_min clamp_max"),
    _steps("minimum maximum max min fmax fmin remainder floor_divide lerp nan_to_num isnan isfinite isinf logaddexp"),
    _steps("xlogy lt le ge logical_or logical_xor __or__ __xor__ __rsub__ __rdiv__ __rpow__ __floordiv__"),
    _steps("ones_like full_like kl_div mse_loss l1_loss smooth_l1_loss huber_loss"),
)
SUMS, MEANS, NUMBERS = _steps("sum"), _steps("mean"), _steps("tensor as_tensor scalar_tensor")
LAST: tuple[Any, ...] = (((-1,), {}), ((1,), {}), ((), {"dim": -1}), ((), {"dim": 1}))
# What is read of a tensor that is the same in every call.
CONSTANT = _steps("dim is_floating_point").union(
    getattr(torch._C.TensorBase, name).__get__ for name in ("dtype", "device", "ndim")
)


class NotShownError(UsageError):
    """A watched call that does not show that the function works token by token."""


def watched(loss: Loss) -> Loss | None:
    """Return the same loss, each call of which raises NotShownError unless it shows to work token by token.

    It may return (B, T), or what is the same of one rollout alone: sums over live tokens (B,), and the mean of these.
    All its calls follow one formula. None if it takes other arguments than tensors and constants.
    """
    fillings = loss.arguments.fillings
    if any(isinstance(one, ObjectOf | Derived | SizeOf) for one in (loss.arguments.receiver, *fillings.values())):
        return None
    if "rollout" in loss.takes or loss.instead or isinstance(loss.function, JaxLoss):
        return None
    fields = {key: one.name for key, one in fillings.items() if type(one) is FieldOf and one.name in TOKEN_FIELDS}
    return loss.changed(function=_Watched(loss.function, fields))


def is_watched(loss: Loss) -> bool:
    """Return True for a loss that `watched` returned."""
    return isinstance(loss.function, _Watched)


class _Watched:
    """A function, the fields that fill its parameters, and the formula that its calls follow for given constants."""

    def __init__(self, function: Callable[..., Any], fields: Mapping[str, str]) -> None:
        self._function, self._fields = function, fields
        self._formulas: dict[str, list[Any]] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        steps = _Steps([(self._fields[key], one) for key, one in named.items() if key in self._fields])
        with steps:
            answer = self._function(*args, **named)
        constants = repr([(key, one) for key, one in named.items() if not isinstance(one, Tensor)])
        if not steps.show(answer) or self._formulas.setdefault(constants, steps.formula) != steps.formula:
            raise NotShownError("the function was not seen to work token by token")
        return answer


class _Steps(TorchFunctionMode):
    """The steps of one call: its formula, and the kind of each tensor.

    A "token" tensor has an entry for each token, made of that token's own fields; a "silent" one has zeros at padding,
    one of "padding" is True there. "rows" are sums over the live tokens of each rollout times a number, "mean" is a
    mean of these, and a "number" is made of no field.
    """

    def __init__(self, fields: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.formula: list[Any] = []
        self._kinds: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        # Tensors are kept, so that none gets the identity of another, with the number of writes into each.
        self._kept: list[tuple[Tensor, int]] = []
        self._shape = fields[0][1].shape if fields else torch.Size()
        self._shown = len(self._shape) == 2
        for field, tensor in fields:
            self._keep(tensor, "silent" if field == "mask" else "token")

    def _keep(self, tensor: Tensor, kind: str) -> None:
        self._kept.append((tensor, tensor._version))
        self._kinds[id(tensor)], self._numbers[id(tensor)] = kind, len(self._kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self._shown or func in CONSTANT:
            return output
        kind = "switch" if func is torch._C._set_grad_enabled else self._kind(func, args, kwargs, output)
        self._shown = bool(kind)
        if kind:
            given = [self._numbers.get(id(one)) or repr(one) for one in (*args, *kwargs.values())]
            self.formula.append((func, given, list(kwargs)))
        if kind and isinstance(output, Tensor):
            self._keep(output, kind)
        return output

    def _kind(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> str:
        """Return what a step makes of its arguments; empty if that is not known to be one of the kinds."""
        given = (*args, *kwargs.values())
        kinds = [self._kinds.get(id(one), "") for one in given if isinstance(one, Tensor)]
        if not isinstance(output, Tensor) or output.is_inference() or "" in kinds or "out" in kwargs:
            return ""
        if any(isinstance(one, list | tuple | dict) for one in given):
            return ""
        own = [self._kinds[id(one)] if isinstance(one, Tensor) else "" for one in args]
        if {*kinds} <= {"number"}:
            return "number" if func in NUMBERS | ENTRYWISE and not output.dim() else ""
        if func in SUMS:
            return "rows" if own[:1] == ["silent"] and (args[1:], kwargs) in LAST else ""
        if "rows" in kinds or "mean" in kinds:
            if func in MEANS:
                return "mean" if own == ["rows"] and not kwargs else ""
            linear = func in PRODUCTS | QUOTIENTS and not kwargs and {*own[1:]} <= {"", "number"}
            return own[0] if linear else ""
        if func not in ENTRYWISE or output.shape != self._shape:
            return ""
        return self._at_padding(func, args, own)

    def _at_padding(self, func: Any, args: Any, own: Sequence[str]) -> str:
        """Return the kind of an entrywise step by what it gives at padding."""
        first, zero = own[:1], [kind == "silent" or _is_zero(one) for kind, one in zip(own, args, strict=True)]
        if func in CASTS and args:
            return own[0]
        if func in EQUAL | NEGATIONS:
            return "padding" if first == ["silent"] and all(zero) else "token"
        if func in WHERE:
            silent = "silent" in own[:2] and zero[2:] == [True]
        elif func in FILL:
            silent = own[1:2] == ["padding"] and zero[2:] == [True]
        elif func in PRODUCTS | CONJUNCTIONS:
            silent = "silent" in own
        elif func in POWERS:
            silent = first == ["silent"] and isinstance(args[-1], int | float) and args[-1] > 0
        else:
            silent = func in ZEROS or (first == ["silent"] and func in QUOTIENTS | KEEPING)
            silent |= first == ["silent"] and func in UNEQUAL | TOTALS and zero == [True, True]
        return "silent" if silent else "token"

    def show(self, answer: Any) -> bool:
        """Return True if the steps show that an answer is made token by token, whatever stands in the fields."""
        if not self._shown or type(answer) is not Tensor:
            return False
        self.formula.append(self._numbers.get(id(answer)))
        unwritten = all(tensor._version == version for tensor, version in self._kept)
        return self._kinds.get(id(answer), "number") != "number" and unwritten and not _own_backward(answer.grad_fn)


def _is_zero(argument: Any) -> bool:
    return isinstance(argument, int | float) and argument == 0


def _own_backward(node: Any) -> bool:
    """Return True if a graph has a backward pass that is written in Python."""
    seen, waiting = set[Any](), [node]
    while waiting:
        if (one := waiting.pop()) is None or one in seen:
            continue
        if isinstance(one, BackwardCFunction):
            return True
        seen.add(one)
        waiting += [following for following, _ in one.next_functions]
    return False
