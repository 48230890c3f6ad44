"""Processes that share a run, as `accelerate launch` starts them; a single one needs no accelerate."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from kltest.errors import UsageError
from kltest.finetune.settings import AUTO


@dataclass(frozen=True)
class Processes:
    """This process among `count`, with its device; rows of a joint batch are shared evenly, in order of rank."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def here(cls, device: str) -> Self:
        """Return this process.

        Raises:
            UsageError: The device cannot be used, or several processes were started without accelerate installed.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls(0, 1, _device(device))
        try:
            from accelerate import PartialState
        except ImportError:
            raise UsageError(
                "several processes need accelerate; in a checkout of kltest: python -m pip install -e '.[finetune]'"
            ) from None
        state = PartialState(cpu=device == "cpu")
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def main(self) -> bool:
        """True in the process that prints and writes."""
        return self.rank == 0

    def share(self, total: int, what: str) -> slice:
        """Return this process's part of `total` rows; UsageError if they cannot be shared evenly."""
        if total % self.count:
            raise UsageError(f"{what}: {total} cannot be shared evenly by {self.count} processes")
        each = total // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def joint(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes in order; every process has as many, of the same shape."""
        if self.count == 1:
            return rows
        kind = torch.uint8 if rows.dtype == torch.bool else rows.dtype
        gathered = [torch.empty_like(rows, dtype=kind) for _ in range(self.count)]
        torch.distributed.all_gather(gathered, rows.to(kind).contiguous())
        return torch.cat(gathered).to(rows.dtype)

    def own(self, rows: Tensor) -> Tensor:
        """Return this process's rows of a joint batch."""
        return rows[self.share(len(rows), "rows")]

    def largest(self, number: int) -> int:
        """Return the largest number of any process."""
        return int(self.joint(torch.tensor([number], device=self.device)).max())

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum every `.grad` over processes; FSDP has done so with those of split weights."""
        if self.count > 1:
            for gradient in [one.grad for one in parameters if one.grad is not None]:
                if not hasattr(gradient, "full_tensor"):
                    torch.distributed.all_reduce(gradient)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            torch.distributed.barrier()


def _device(name: str) -> torch.device:
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
