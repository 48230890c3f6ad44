"""A torch device that is not the CPU: "fake". Its tensors live in ordinary memory; devices are not mixed, as on a GPU.

Inside `Accelerator()` every operation on such tensors is done by the CPU and counted by its name. An operation that
mixes tensors of the device with others fails, but for numbers without dimension and for indices, as it would on CUDA.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("fake")
DEVICE = torch.device("fake", 0)
module = torch.get_device_module("fake")
module.is_available = lambda: True
module.get_amp_supported_dtype = lambda: [torch.bfloat16]
_autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_autocast.fallback(torch.library.fallthrough_kernel)

# Operations that launch nothing.
VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
}
MAY_MIX = ("aten.copy_", "aten._to_copy", "aten.index", "aten._unsafe_index", "aten.set_data")


class Tensor(torch.Tensor):
    """A tensor of the device; `raw` holds its values on the CPU."""

    @staticmethod
    def __new__(cls, raw):
        size = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, **size, dtype=raw.dtype, device=DEVICE)

    def __init__(self, raw):
        self.raw = raw

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of Accelerator()")

    def __reduce_ex__(self, protocol):
        return self.raw.__reduce_ex__(protocol)


_tensor = torch.tensor


def _made(data, *, device=None, **options):
    """torch.tensor, which no mode sees."""
    made = _tensor(data, **options)
    return made if device is None else made.to(device)


class Accelerator(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __enter__(self):
        torch.tensor = _made
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor = _tensor
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        here = [one for one in given if isinstance(one, Tensor)]
        name = str(function)
        wanted = torch.device(kwargs["device"]) if kwargs.get("device") else None
        if here:
            self.counts[name.rpartition(".")[0].removeprefix("aten.")] += 1
            away = [one for one in given if not isinstance(one, Tensor) and one.dim() > 0]
            if away and not name.startswith(MAY_MIX):
                raise RuntimeError(f"Expected all tensors to be on the same device, in {name}")
        plain = tree_map(lambda one: one.raw if isinstance(one, Tensor) else one, (args, kwargs))
        if wanted is not None:
            plain[1]["device"] = torch.device("cpu")
        found = function(*plain[0], **plain[1])
        if not (here if wanted is None else wanted.type == "fake"):
            return found
        if name.startswith("aten.copy_"):
            return args[0]
        known = {id(one.raw): one for one in here}  # operations in place return what they were given

        def wrapped(one):
            if not isinstance(one, torch.Tensor):
                return one
            return known[id(one)] if id(one) in known else Tensor(one)

        return tree_map(wrapped, found)
