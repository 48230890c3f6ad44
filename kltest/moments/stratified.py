"""Random numbers of copies that stand side by side in one call, stratified over the copies.

Each copy meets independent numbers of the distribution that the loss draws from, so that the mean over copies is
unbiased whatever the loss does with them. Over copies each number falls once into each of as many equal shares of its
distribution (Latin hypercube sampling), which takes most of the noise away if what it adds to the gradient depends on
that number alone, as of a token that is kept or dropped. (McKay, Beckman and Conover, 1979.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kltest.loss.global_state import AsArrays

# Entries beyond this many times the copies share orders: what two decide together has a little more noise then.
ORDERS = 4
# What goes backward; what is computed again there, as by a checkpoint, must draw the same.
BACKWARD = frozenset({"backward", "grad"})


def _multinomial(share: Tensor, given: dict[str, Any]) -> Tensor | None:
    if given["num_samples"] > 1 and not given["replacement"]:
        return None
    below = given["self"].cumsum(-1)
    return torch.searchsorted(below / below[..., -1:], share.to(below.dtype), right=True)


# What is at a share of a distribution, from below, by the operation of torch that draws.
AT: dict[str, Callable[[Tensor, dict[str, Any]], Tensor | None]] = {
    "rand": lambda share, given: share,
    "uniform": lambda share, given: given["from"] + (given["to"] - given["from"]) * share,
    "bernoulli": lambda share, given: share < given.get("p", given["self"]),
    "randn": lambda share, given: torch.special.ndtri(share),
    "normal": lambda share, given: given["mean"] + given["std"] * torch.special.ndtri(share),
    "exponential": lambda share, given: -torch.log1p(-share) / given["lambd"],
    "randint": lambda share, given: given.get("low", 0) + ((given["high"] - given.get("low", 0)) * share).floor(),
    "multinomial": _multinomial,
}

# Functions of torch in which these are called; what is not among them keeps its own random numbers.
DRAWING = AT.keys() | {"dropout", "dropout1d", "alpha_dropout", "gumbel_softmax"}


class Stratified(AsArrays):
    """Stratify what torch draws for copies, if it draws something for each copy.

    Args:
        copies: How many stand one after another along the first dimension of what is drawn.
    """

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.drawn = _Drawn(copies)
        self.again = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Each operation of a loss passes here; whatever is inside of one that draws passes `_Drawn` as well.
        name = getattr(func, "__name__", "")
        draws = name.removesuffix("_").removesuffix("_like") in DRAWING
        if draws:
            self.again |= not torch.is_grad_enabled() or _hooked()
        # Functions in a backward pass do not pass here.
        if draws or (self.again and name in BACKWARD):
            with self.drawn:
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _hooked() -> bool:
    """Return True where what is saved for the way back is replaced, as by a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Drawn(TorchDispatchMode):
    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return found
        at = AT.get(func._schema.name.removeprefix("aten::").removesuffix("_").removesuffix("_like"))
        if at is None or not found.dim() or not len(found) or len(found) % self.copies:
            return found
        given = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
        given |= dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        drawn = at(self._shares(found), given)
        # In place as well, as `uniform_` draws.
        return found if drawn is None else found.copy_(drawn.reshape(found.shape))

    def _shares(self, like: Tensor) -> Tensor:
        """Return independent uniform numbers, with one of each entry in each of as many shares as there are copies."""
        many = like.numel() // self.copies
        orders = torch.rand(self.copies, min(many, ORDERS * self.copies), dtype=torch.float64).argsort(dim=0)
        if many > orders.shape[1]:
            orders = orders[:, torch.randint(orders.shape[1], (many,))]
        # Where two entries have one order, the shift makes their shares independent in each copy all the same.
        strata = (orders + torch.randint(self.copies, (many,))) % self.copies
        shares = (strata + torch.rand(self.copies, many, dtype=torch.float64)) / self.copies
        highest = 1 - (torch.finfo(like.dtype).eps if like.is_floating_point() else 0.0)
        return shares.reshape(like.shape).clamp(max=highest)
