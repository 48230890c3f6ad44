"""Policy and reference: passes in the modes that they were found in, equal weights, gradients, and how they are left.

Weights that FSDP has split are put together (`summon_full_params`) where they are written; passes go through its
wrapper. Every pass is made on all ranks in the same order.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kltest.auditing.audit import buffers_kept, still
from kltest.errors import KltestError, UsageError
from kltest.language_models.generation import at_least_single
from kltest.language_models.language import LanguageModel, unwrapped
from kltest.loss.global_state import preserved
from kltest.loss.view import as_bits
from kltest.preflighting.batches import Batch

# What wrappers put into the names of parameters.
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module", "base_layer"}
_ADAPTER = ("lora_", "adapter", "ia3_", "prompt_encoder", "modules_to_save")
_ZERO = ("lora_B.", "lora_embedding_B.")


class UnlikeError(KltestError):
    """Two models that cannot have the same weights: other names or shapes of parameters."""


@dataclass
class Pair:
    """Policy and reference.

    Attributes:
        policy: The model that is trained.
        reference: The reference; the policy with `bare` for one that is the policy without its adapters, None if only
            its log-probs are known.
        passes: How many passes were made, by `policy`, `reference` and `backward`.
    """

    policy: LanguageModel
    reference: LanguageModel | None
    temperature: float = 1.0
    passes: Counter[str] = field(default_factory=Counter)

    @property
    def is_sharded(self) -> bool:
        """True if several devices share the weights of the policy or the reference."""
        return any(map(_is_sharded, self.modules))

    @property
    def modules(self) -> list[nn.Module]:
        """The models, each once."""
        found = [one.model for one in (self.policy, self.reference) if one is not None]
        return [one for number, one in enumerate(found) if all(one is not other for other in found[:number])]

    def logits(self, one: LanguageModel, batch: Batch, attention: Tensor | None = None) -> Tensor:
        """Return (B, L, V) logits over the temperature, in float32 or float64."""
        self.passes["policy" if one is self.policy else "reference"] += 1
        mask = batch.attention if attention is None else attention
        found, _ = one.forward(batch.ids, None if bool(mask.all()) else mask, keep=batch.ids.shape[1])
        return at_least_single(found) / self.temperature

    def gradients(self, batch: Batch, at: Mapping[str, Tensor]) -> dict[str, float]:
        """Take gradients at the log-probs to the weights by one backward pass.

        Args:
            batch: The batch.
            at: Gradients: `logp` (B, W) and `logits` (B, W, V) at log-probs, or `raw` (B, K, V) at the last K logits.

        Returns:
            The norm of the gradient of each parameter that requires one, NaN where no gradient arrived.
        """
        _resharded(self.policy.model)
        trained = [one for one in self.policy.model.named_parameters() if one[1].requires_grad]
        kept = [one.grad for _, one in trained]
        try:
            for _, one in trained:
                one.grad = None
            with torch.enable_grad():
                raw = self.logits(self.policy, batch)
                ends = {"raw": raw}
                if "raw" not in at:
                    ends["logits"] = of_targets(raw, batch).log_softmax(-1)
                    ends["logp"] = chosen(ends["logits"], batch)
                used = {name: ends[name][:, -one.shape[1] :] for name, one in at.items() if ends[name].requires_grad}
                if used:
                    self.passes["backward"] += 1
                    torch.autograd.backward([*used.values()], [at[name].to(end) for name, end in used.items()])
            found = torch.tensor([_square(one.grad) for _, one in trained], device=self.policy.device).reshape(-1, 2)
        finally:
            for (_, one), grad in zip(trained, kept, strict=True):
                one.grad = grad
        if len(found) and _is_sharded(self.policy.model):
            torch.distributed.all_reduce(found)
        norms = found[:, 0].sqrt().where(found[:, 1] > 0, torch.nan)
        return {plain_name(name): norm for (name, _), norm in zip(trained, norms.tolist(), strict=True)}

    @contextmanager
    def equal(self) -> Iterator[None]:
        """Give policy and reference the same weights inside: the policy's, with adapters that do nothing.

        Raises:
            UnlikeError: Their parameters have other names or shapes, or there are adapters that cannot be made to do
                nothing.
        """
        with _summoned(*self.modules):
            own, theirs = (_parameters(one) for one in (self.modules[0], self.modules[-1]))
            adapters = {name for name in own if any(word in name for word in _ADAPTER)}
            if left := [name for name in adapters if "lora_" not in name and own[name].requires_grad]:
                raise UnlikeError(f"nothing is known that makes {min(left)} do nothing")
            zero = {name: torch.zeros_like(own[name]) for name in adapters if any(word in name for word in _ZERO)}
            base = {name: one for name, one in own.items() if name not in adapters}
            if theirs is own or len(self.modules) == 1:
                base, theirs = {}, {}
            for name in (*theirs, *base):
                if name not in theirs or name not in base or theirs[name].shape != base[name].shape:
                    raise UnlikeError(f"{name} is in one of them alone, or has another shape there")
            kept = [
                {name: one[name].detach().to("cpu", copy=True) for name in written}
                for one, written in ((own, zero), (theirs, base))
            ]
            _write(own, zero)
            _write(theirs, base)
        try:
            yield
        finally:
            with _summoned(*self.modules):
                for model, values in zip((self.modules[0], self.modules[-1]), kept, strict=True):
                    _write(_parameters(model), values)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): one for name, one in model.named_parameters()}


@torch.no_grad()
def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].detach().copy_(value)


def chosen(log_probs: Tensor, batch: Batch) -> Tensor:
    """Return (B, W) log-probs of the targets from those of all next tokens (B, W, V).

    An id beyond the vocabulary stands for the last one: that a model does not know it is found by its own check.
    """
    return log_probs.gather(2, batch.targets.clamp(max=log_probs.shape[-1] - 1)[..., None])[..., 0]


def of_targets(logits: Tensor, batch: Batch) -> Tensor:
    """Return the (B, W, V) logits that predict the targets, of logits (B, L, V)."""
    return logits[:, -batch.width - 1 : -1]


def plain_name(name: str) -> str:
    """Return the name of a parameter without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("base_model.model.")


def has_adapters(model: nn.Module) -> bool:
    """Return True if a model has adapters that can be disabled."""
    return any(isinstance(getattr(one, "disable_adapters", None), bool) for one in model.modules())


def adapters_act(model: nn.Module) -> bool:
    """Return True if a model has adapters and they are not disabled."""
    return any(getattr(one, "disable_adapters", None) is False for one in model.modules())


def bare(policy: LanguageModel) -> LanguageModel:
    """Return a policy without its adapters; UsageError if it has none."""
    if not has_adapters(policy.model):
        raise UsageError(
            "there is no reference: the model has no adapters that could be disabled, and the batch no ref_logp; give "
            "the reference model, or the folder of one"
        )
    return LanguageModel(policy.model, policy.tokenizer, policy.end, policy.pad, policy.compute_dtype, bare=True)


def _is_sharded(model: nn.Module) -> bool:
    return any(_splits(one) for one in model.modules()) or any(hasattr(one, "to_local") for one in model.parameters())


def _splits(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


@contextmanager
def _summoned(*models: nn.Module) -> Iterator[None]:
    """Put together the weights that FSDP has split; what is written into them stays."""
    with ExitStack() as stack:
        for model in models:
            _resharded(model)
            if any(map(_splits, model.modules())):
                fsdp = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
                stack.enter_context(fsdp.summon_full_params(model))
        yield


def _resharded(model: nn.Module) -> None:
    """Let each device hold its own part again of weights that FSDP2 has split: it leaves some whole after a pass."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "set_reshard_after_forward"):
            reshard()


def training(language: LanguageModel) -> list[str]:
    """Return the modules in training mode; wrappers of FSDP have none of their own."""
    return [name for name, one in language.model.named_modules() if one.training and not _splits(one)]


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this device."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _square(gradient: Tensor | None) -> tuple[float, float]:
    """Return the squared norm of the part of a gradient that is here, and whether there is one."""
    return (0.0, 0.0) if gradient is None else (float(local(gradient).double().square().sum()), 1.0)


@contextmanager
def left_as_found(pair: Pair) -> Iterator[list[str]]:
    """Leave models and random numbers as they were; yields a list that at the end says what is not as it was."""
    changed: list[str] = []
    before = [_fingerprint(one) for one in pair.modules]
    devices = {one.device for model in pair.modules for one in model.parameters() if one.device.type == "cuda"}
    with preserved(), torch.random.fork_rng(devices=list(devices)), ExitStack() as stack:
        for model in pair.modules:
            stack.enter_context(buffers_kept(model))
        modes = {module: module.training for model in pair.modules for module in model.modules()}
        try:
            yield changed
        finally:
            for module, mode in modes.items():
                module.training = mode
    for role, model, was in zip(("policy", "reference"), pair.modules, before, strict=False):
        now = _fingerprint(model)
        changed += [f"{name} of the {role}" for name in {**was, **now} if was.get(name) != now.get(name)]


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return sums of the bits of parameters, gradients and buffers, and modes of modules, by name."""
    _resharded(model)
    tensors: dict[str, Any] = {f"buffer {name}": one for name, one in model.named_buffers()}
    for name, one in model.named_parameters():
        if one.grad is not None:
            tensors[f"gradient of {plain_name(name)}"] = one.grad
    found = {name: _digest(local(one.detach())) for name, one in tensors.items()}
    with _summoned(model):
        for name, one in model.named_parameters():
            found[f"parameter {plain_name(name)}"] = _digest(local(one.detach()))
    return found | {f"training mode of {name or 'the model'}": one.training for name, one in model.named_modules()}


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, type and two sums of bits, of all numbers and of every other: they see exchanged numbers too."""
    flat = tensor.contiguous().reshape(-1)
    bits = as_bits(flat)
    return tuple(tensor.shape), tensor.dtype, *(int(part.sum(dtype=torch.int64)) for part in (bits, bits[::2]))


def evaluated(pair: Pair) -> AbstractContextManager[None]:
    """Return the context in which both models are in evaluation mode."""
    return still(pair.policy, pair.reference)


def sharing(pair: Pair) -> Sequence[str]:
    """Return the parameters of a separate reference that are the policy's own and are trained."""
    if pair.reference is None or pair.reference.model is pair.policy.model:
        return []
    own = {local(one).data_ptr() for one in pair.policy.model.parameters() if one.requires_grad and local(one).numel()}
    return [
        plain_name(name)
        for name, one in pair.reference.model.named_parameters()
        if local(one).numel() and local(one).data_ptr() in own
    ]


def embeddings_tied(model: Any) -> bool:
    """Return True if one matrix, which is trained, is both the input and the output embedding."""
    inner = unwrapped(model)
    ends = [getattr(inner, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    first, last = (getattr(one, "weight", None) for one in ends)
    return first is not None and first is last and bool(getattr(first, "requires_grad", False))
