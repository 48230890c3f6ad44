"""Weights split over processes by FSDP, as `accelerate launch --use_fsdp --fsdp_version 2` asks for."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kltest.errors import UsageError
from kltest.finetune.processes import Processes
from kltest.finetune.settings import Settings


def wanted(settings: Settings, processes: Processes) -> bool:
    """Return whether weights are to be split; UsageError for settings that need whole ones."""
    if processes.count == 1 or os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return False
    for true, words in (
        (os.environ.get("FSDP_VERSION") != "2", "its first version is not supported; launch with --fsdp_version 2"),
        (os.environ.get("FSDP_OFFLOAD_PARAMS") == "true", "weights stay on the device; --fsdp_offload_params false"),
        (
            settings.compile or settings.static_cache,
            "what is compiled is for whole weights; set compile=false and static_cache=false",
        ),
        (
            settings.inner_epochs > 1 and settings.resolved.gradient_every > 0,
            "with several inner epochs the gradient is compared at whole weights alone; set gradient_every=0",
        ),
    ):
        if true:
            raise UsageError(f"FSDP: {words}")
    return True


def split(model: nn.Module, processes: Processes) -> None:
    """Split the weights of a model on the CPU, and move them to the device; gradients are summed over processes."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model

    # What the function reads of an Accelerator, which knows no FSDP on the CPU. The plugin reads what was launched.
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin())
    reads = SimpleNamespace(state=state, mixed_precision="no", is_main_process=processes.main, device=processes.device)
    fsdp2_prepare_model(reads, model)
    for one in _split_modules(model):
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
        one.set_reshard_after_forward(True, recurse=False)  # so that `parameters()` are always the split ones


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold whole weights, so that a process may make other passes than the others; for one that has them, nothing."""
    modules = _split_modules(model)
    for one in modules:
        one.set_reshard_after_forward(False, recurse=False)
        one.unshard()
    try:
        yield
    finally:
        for one in modules:
            one.set_reshard_after_forward(True, recurse=False)
            one.reshard()


def whole(state: Any) -> Any:
    """Return a state with whole tensors; those that were split are gathered, and on the CPU."""
    return tree_map(lambda one: one.full_tensor().cpu() if hasattr(one, "full_tensor") else one, state)


def as_split(state: Mapping[Any, Any], like: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state of whole tensors by name, split as those of `like` are that have the same shape."""
    return {name: _as_split(one, like[name]) if name in like else one for name, one in state.items()}


def _as_split(one: Tensor, like: Any) -> Tensor:
    if not hasattr(like, "full_tensor") or one.shape != like.shape:
        return one
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(one, like.device_mesh, like.placements, src_data_rank=None)


def _split_modules(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "unshard")]
