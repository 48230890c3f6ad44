"""Sketches of gradients at all weights: short vectors whose inner products are those of the gradients.

Row r of a weight matrix with C columns goes to the places (s_r + c) mod m, c = 0 … C − 1, with the signs a_r·b_c. The
a_r and b_c are fair coins, and the shifts s_r of one matrix are distinct as long as it has at most m rows. The sketch S
is linear, and E⟨Sx, Sy⟩ = ⟨x, y⟩. If m is odd, no matrix has more columns than m and none more rows,

    Var⟨Sx, Sy⟩ ≤ 2·‖x‖²‖y‖²/(m − 1):

entries of one row never meet, two rows meet at a shift other than 0 with probability 1/(m − 1) each, and then the signs
of pairs of entries are independent. With more rows some shifts repeat, and the bound is at most twice as large. A model
of at most m weights is not compressed: its sketch has the weights' gradients themselves, up to signs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SIZE = 2**17 - 1
# Entries that are folded at a time: few enough for a processor's cache, and on a device, where each block costs
# launches, for its memory.
BLOCK, LARGE = 2**18, 2**25


class Sketch:
    """Folds what a backward pass leaves at the weights into vectors of `size` numbers, weight by weight.

    Each weight's gradient is freed as soon as it is folded: there are never two gradients in memory.
    """

    def __init__(self, model: nn.Module, size: int = SIZE, seed: int = 0) -> None:
        weights = [one for one in model.parameters() if one.requires_grad]
        self.weights = weights
        self.parameters = sum(one.numel() for one in weights)
        self.exact = self.parameters <= size
        self.size = self.parameters if self.exact else size | 1
        self.dtype = torch.float64 if any(one.dtype == torch.float64 for one in weights) else torch.float32
        self._into: Tensor | None = None
        self._hashes: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}
        generator = torch.Generator().manual_seed(seed)
        before = 0
        for one in weights:
            rows, columns = _shape(one)
            if self.exact:
                shift = before + columns * torch.arange(rows)
            else:
                turns = -(-rows // self.size)
                shift = torch.cat([torch.randperm(self.size, generator=generator) for _ in range(turns)])[:rows]
            signs = [2 * torch.randint(2, (length,), generator=generator) - 1 for length in (rows, columns)]
            of_rows, of_columns = (sign.to(one.device, self.dtype) for sign in signs)
            self._hashes[one] = shift.to(one.device), of_rows, of_columns
            before += one.numel()

    @property
    def error(self) -> float:
        """Bound on the standard error of an inner product, as a share of the product of the norms."""
        return 0.0 if self.exact else (4 / (self.size - 1)) ** 0.5

    def fold(self, weight: Tensor, gradient: Tensor, into: Tensor) -> None:
        """Add the sketch of one weight's gradient to a vector (size,)."""
        shift, row_signs, column_signs = self._hashes[weight]
        rows, columns = _shape(weight)
        gradient, place = gradient.detach().reshape(rows, columns), torch.arange(columns, device=gradient.device)
        # Sums beyond the last place are brought round at the end: remainders of indices cost more than the sum.
        turns = 1 + -(-columns // self.size)
        spread = into.new_zeros(turns * self.size)
        step = max(1, (BLOCK if gradient.is_cpu else LARGE) // columns)
        for part in map(slice, range(0, rows, step), range(step, rows + step, step)):
            signed = (gradient[part].to(self.dtype) * row_signs[part, None]).mul_(column_signs)
            spread.index_add_(0, (shift[part, None] + place).flatten(), signed.flatten())
        into += spread.view(turns, self.size).sum(0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Fold what backward passes accumulate; gradients that were there before are put back at the end."""
        before = [one.grad for one in self.weights]
        hooks = [one.register_post_accumulate_grad_hook(self._accumulated) for one in self.weights]
        try:
            for one in self.weights:
                one.grad = None
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for one, gradient in zip(self.weights, before, strict=True):
                one.grad = gradient

    @contextmanager
    def into(self, vector: Tensor) -> Iterator[None]:
        """Add what backward passes accumulate to this vector (size,)."""
        self._into = vector
        try:
            yield
        finally:
            self._into = None

    def _accumulated(self, weight: Tensor) -> None:
        assert weight.grad is not None
        if self._into is not None:
            self.fold(weight, weight.grad, self._into)
        weight.grad = None


def _shape(weight: Tensor) -> tuple[int, int]:
    """Rows and columns of a weight; a vector is one column."""
    return len(weight) if weight.dim() else 1, weight.numel() // len(weight) if weight.dim() > 1 else 1
