"""The operations that a graph may have.

An operation is called as torch calls it: `exp(x)`, `sum(x, dim=1)`. Methods, functions of `torch.nn.functional` and
their namesakes in NumPy and JAX are one operation. Whatever is not in the table is opaque: its node keeps the name that
was called, and it has a value only if one is given.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Functions of torch and torch.nn.functional, and methods of tensors, that compute and do nothing else.
FUNCTIONS = words_of(
    """
    abs absolute add addcmul all allclose amax amin any arange argmax argmin bincount bmm bool broadcast_to cat ceil
    chunk clamp clamp_max clamp_min clone concat cos count_nonzero cross_entropy cumprod cumsum detach diff dim div
    einsum eq exp exp2 expand expand_as expm1 eye flatten flip fliplr floor floor_divide fmax fmin full full_like
    gather ge gt huber_loss index_add index_select isclose isfinite isinf isnan kl_div l1_loss le lerp linspace log
    log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid logsumexp
    lt masked_fill masked_scatter masked_select matmul max maximum mean median min minimum movedim mse_loss mul
    nan_to_num nanmean nansum
    narrow ne neg new_full new_ones new_zeros nll_loss nonzero norm numel one_hot ones ones_like outer pad
    permute pow prod reciprocal relu repeat repeat_interleave reshape roll round rsqrt scatter scatter_add select
    sigmoid sign sin size smooth_l1_loss softmax softplus sort split sqrt square squeeze stack std sub sum
    take_along_dim tanh tensor tensor_split tile topk transpose tril triu trunc unbind unflatten unique unsqueeze var
    view view_as where xlogy zeros zeros_like
    """
)
# Other names of the same: of methods, and of NumPy, JAX and optax.
ALIASES = {
    **dict.fromkeys(("stop_gradient", "item", "tolist"), "detach"),
    **{"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"},
    **{"negative": "neg", "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "power": "pow"},
    **{"equal": "eq", "not_equal": "ne", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"},
    **{"concatenate": "cat", "expand_dims": "unsqueeze", "swapaxes": "transpose", "take_along_axis": "take_along_dim"},
    **{"log_sigmoid": "logsigmoid", "top_k": "topk", "clip": "clamp", "reduce_sum": "sum", "reduce_mean": "mean"},
    **dict.fromkeys(("array", "asarray", "as_tensor", "new_tensor"), "tensor"),
}
# Functions of NumPy and JAX that torch has under another name, and another under theirs.
ARRAYS = {
    **{"max": "amax", "min": "amin", "split": "tensor_split", "repeat": "repeat_interleave"},
    **{"transpose": "permute", "select": "where"},
}
# Calls that return what they are given: where a tensor lies and how it is stored is no arithmetic, nor is how a
# function is compiled.
SAME = words_of(
    """
    astype bfloat16 block_until_ready checkpoint compile contiguous cpu cuda device_get device_put double float float32
    float64 full_tensor half jit numpy pmap remat requires_grad_ to to_local type type_as
    with_sharding_constraint
    """
)
# Functions and methods of any package that give their argument in another container.
CONVERSIONS = words_of("from_tensor from_torch to_tensor to_torch")
# Calls that put together what several processes have: there is one.
COLLECTIVE = words_of("all_reduce gather gather_for_metrics pmean psum reduce")
PROCESSES = words_of("world_size num_processes process_count")
"""What a name ends with that is the number of processes."""
# Functions that differentiate the function that they are given.
GRADIENTS = words_of("grad value_and_grad grad_and_value vjp")
CONSTANTS = {"inf": math.inf, "pi": math.pi}
STORED = words_of("dtype device precision out_sharding")
"""Arguments that say where and how a result is stored."""
NAMED = {"axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max", "x": "input"}
# Names under which the first arguments of an operation may be given, in the order of their places.
LEADING = ("condition", "input", "tensors", "target", "other")
ARRAY_MODULES = words_of(
    "numpy jax jax.numpy jax.nn jax.lax jax.scipy.special scipy.special flax.nnx nnx jax.ad_checkpoint"
)
MODULES = words_of("torch torch.nn.functional torch.special torch.func math") | ARRAY_MODULES
# Conditions, whose values say nothing of whose something is.
CONDITIONS = words_of("== != < <= > >= eq ne lt le gt ge isclose isinf isnan isfinite any all")
OPERATORS: Mapping[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "@": operator.matmul,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&": operator.and_,
    "|": operator.or_,
    "is": lambda one, other: one is other,
    "in": lambda one, other: one in other,
    "not": operator.not_,
    "negated": operator.neg,
    "inverted": operator.invert,
}
# Attributes of a tensor that may be read.
ATTRIBUTES = frozenset({"shape", "ndim", "T", "mT", "dtype", "device"})


def operation_of(path: str) -> str | None:
    """Return the operation that a function outside of the tree is, by its dotted name; None if it is none."""
    module, _, name = path.rpartition(".")
    if module in ARRAY_MODULES and not module.endswith("nnx") and name in ARRAYS:
        return ARRAYS[name]
    return canonical(name) if module in MODULES else None


def canonical(name: str) -> str | None:
    """Return the operation that a function or method of this name is; "same" for what returns its argument."""
    name = ALIASES.get(name, name)
    return name if name in FUNCTIONS else "same" if name in SAME else None


def is_count_of_processes(name: str) -> bool:
    """Return True for names of how many processes there are."""
    return name.endswith(tuple(PROCESSES))


def is_constant(value: Any) -> bool:
    """Return True for a number, a truth, a text, None or the ellipsis."""
    return value is None or value is Ellipsis or isinstance(value, bool | int | float | str)


def _is_known(value: Any) -> bool:
    return all(map(_is_known, value)) if isinstance(value, tuple | list) else is_constant(value)


def constant_of(operation: str, arguments: tuple[Any, ...]) -> Any:
    """Return what an operator makes of constants, NotImplemented if it cannot be computed."""
    if operation not in OPERATORS or not all(map(_is_known, arguments)):
        return NotImplemented
    try:
        return OPERATORS[operation](*arguments)
    except (ArithmeticError, TypeError, ValueError):
        return NotImplemented
