"""Experiments on a loss that is wrong under a stale sampler: its use of the sampler's log-probs.

Each experiment changes one thing in one environment and compares gradients.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.loss.resolve import Variant
from kltest.moments.differentiate import at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import LEAVES, Rollout

# Share of the way from policy to sampler: no usual clip (0.2) acts there, and a missing ratio still shows (its bias is
# about this size, and the tolerance is 1e-9 or 1e-4).
NEAR = 0.01
# Change of log-probs, in nats: far below the tightest clip in use (3e-4), far above rounding.
CLOSE = 1e-6


def _answer(if_it_fails: bool) -> "Callable[[Callable[[Probes, Instance], bool]], Callable[[Probes, str], bool]]":
    """Run an experiment once an environment; if the loss fails in it, return this answer."""

    def decorate(experiment: "Callable[[Probes, Instance], bool]") -> "Callable[[Probes, str], bool]":
        @lru_cache(maxsize=64)
        def answer(probes: "Probes", environment: str) -> bool:
            try:
                return experiment(probes, probes.instance(environment))
            except KltestError:
                return if_it_fails

        return answer

    return decorate


@dataclass(eq=False)
class Probes:
    """Experiments on one loss, each run once an environment.

    Attributes:
        loss: The loss.
        instance: Returns the instance of an environment to experiment in.
        agrees: True if the gradient of a loss on an instance, under the stale sampler, is the declared one.
        padding: Seed of what stands at padded positions.
    """

    loss: Loss
    instance: Callable[[str], Instance]
    agrees: Callable[[Loss, Instance], bool]
    padding: int = 0

    @_answer(if_it_fails=True)
    def sampler_has_influence(self, instance: Instance) -> bool:
        """Return True if the loss's gradient changes with the sampler's log-probs.

        Tried far from the sampler and close to the policy: a clipped ratio may be saturated at one of the two.
        """
        rollout = self._rollout(instance)
        generator = torch.Generator().manual_seed(1)

        def moved(start: str, distance: float) -> Rollout:
            fields = {}
            for name in LEAVES:
                base = rollout.peek(start + name).detach()
                fields[f"old_{name}"] = base + distance * torch.randn(base.shape, generator=generator).double()
            return rollout.replace(**fields)

        return not (self._same(rollout, moved("old_", 0.3)) and self._same(rollout, moved("", CLOSE)))

    @_answer(if_it_fails=False)
    def only_through_the_sum(self, instance: Instance) -> bool:
        """Return True if the sampler enters as one weight a sequence that depends on the sum of its log-probs alone."""
        rollout = self._rollout(instance)
        old, mask = rollout.peek("old_logp"), rollout.peek("mask")
        shift = torch.zeros_like(old)
        shift[:, 0], shift[:, 1] = 0.3, -0.3
        same_sum = old + torch.where(mask[:, 1:2] != 0, shift, 0.0)
        if not self._same(rollout, rollout.replace(old_logp=same_sum)):
            return False
        moved = old.clone()
        moved[:, 0] += 0.3
        factors = self._factors(rollout, rollout.replace(old_logp=moved))
        # A weight of exactly 1/μ is the importance weight itself, and no mistake.
        return bool(factors) and any(abs(factor - math.exp(-0.3)) > 1e-4 for factor in factors)

    @_answer(if_it_fails=False)
    def right_without_clip(self, instance: Instance) -> bool:
        """Return True if the gradient is the declared one when no clip acts: nearly on-policy, or with clips lifted."""
        near = table(instance.policy + NEAR * (instance.sampler - instance.policy))
        return self.agrees(Lifted(self.loss), instance) or self.agrees(self.loss, replace(instance, sampler=near))

    @_answer(if_it_fails=False)
    def fixed_by_reattaching(self, instance: Instance) -> bool:
        """Return True if the gradient is the declared one once it passes through a detached sampler's ratio."""
        rollout = self._rollout(instance)
        variants = (Reattached(self.loss), Reattached(self.loss, one_sided=True))
        return any(not loss.changes_nothing(rollout) and self.agrees(loss, instance) for loss in variants)

    def _factors(self, one: Rollout, other: Rollout) -> list[float]:
        """Return the factor by which gradients shrink, for each length; none if one length has several."""
        before, after, limit = self._gradients(one, other)
        lengths = one.peek("mask").sum(dim=1)
        factors = []
        for length in lengths.unique():
            rows = lengths == length
            base = torch.cat([part[rows].flatten() for part in before])
            moved = torch.cat([part[rows].flatten() for part in after])
            factor = float((base @ moved) / (base @ base).clamp(min=1e-300))
            if not 0 < factor < 1 - 1e-6 or not _close(factor * base, moved, limit):
                return []
            factors.append(factor)
        return factors

    def _rollout(self, instance: Instance) -> Rollout:
        return Rollout.of(instance, sampler="stale", padding=self.padding)

    def _same(self, one: Rollout, other: Rollout) -> bool:
        before, after, limit = self._gradients(one, other)
        return all(_close(a, b, limit) for a, b in zip(before, after, strict=True))

    def _gradients(self, one: Rollout, other: Rollout) -> tuple[list[Tensor], list[Tensor], float]:
        one = one.replace()
        first, second = self.loss(one), self.loss(other)
        return (
            at_leaves(self.loss, first.objective, one),
            at_leaves(self.loss, second.objective, other),
            TOLERANCES[first.dtype].influence,
        )


class Reattached(Variant):
    """A loss in which the gradient flows through the sampler's ratio, wherever the original stopped it.

    A ratio depends on logp − old_logp, so that a stop-gradient removes minus the derivative with respect to old_logp.
    This derivative is measured with all stops lifted, minus the derivative without lifting, and added to the loss's own
    gradient. Stops on what does not depend on the sampler, such as a reward, stay. With `one_sided`, the derivative
    without lifting is not subtracted: for exp(logp.detach() − old_logp), which differentiates only old_logp.
    """

    def __init__(self, loss: Loss, *, one_sided: bool = False) -> None:
        super().__init__(loss)
        self.one_sided = one_sided

    def __call__(self, rollout: Rollout) -> Outcome:
        outcome, missing = self._missing(rollout)
        if outcome.objective.requires_grad or missing.any():
            extra = (rollout.logp * missing).sum()
            return replace(outcome, objective=outcome.objective + extra, rows=None, returned="scalar")
        return outcome

    def changes_nothing(self, rollout: Rollout) -> bool:
        """Return True if no gradient was stopped on its way through the sampler's ratio."""
        return not self._missing(rollout)[1].abs().max() > TOLERANCES["float32"].influence

    def _missing(self, rollout: Rollout) -> tuple[Outcome, Tensor]:
        outcome = self.loss(rollout)
        flowing = 0.0 if self.one_sided else self._towards_sampler(rollout)
        return outcome, flowing - self._towards_sampler(rollout, lifted=True)

    def _towards_sampler(self, rollout: Rollout, *, lifted: bool = False) -> Tensor:
        old = rollout.peek("old_logp").detach().clone().requires_grad_()
        changed = rollout.replace(old_logp=old)
        with _LiftStops() if lifted else nullcontext(), warnings.catch_warnings():
            # torch warns about reading a number from a tensor that is no longer detached.
            warnings.simplefilter("ignore", UserWarning)
            objective = self.loss.for_experiments()(changed).objective
        if not objective.requires_grad:
            return torch.zeros_like(old)
        found = torch.autograd.grad(objective, [old], allow_unused=True)[0]
        return torch.zeros_like(old) if found is None else found


class Lifted(Variant):
    """A loss in which clamps, and minima and maxima with a constant, have no effect."""

    def __call__(self, rollout: Rollout) -> Outcome:
        with _LiftLimits():
            return self.loss(rollout)


class _LiftLimits(TorchFunctionMode):
    """Mode in which clamp and clip return their input, and a minimum or maximum with a constant the other argument."""

    CLAMPS = frozenset({"clamp", "clip", "clamp_min", "clamp_max"})
    CHOICES = frozenset({"minimum", "maximum", "min", "max"})
    MAKERS = frozenset({"tensor", "scalar_tensor", "as_tensor", "ones", "zeros", "full"})

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.removesuffix("_") in self.CLAMPS:
            return args[0] if args else (kwargs or {})["input"]
        if name in self.CHOICES and len(args) == 2 and isinstance(args[1], Tensor):
            constant = [self._is_constant(item) for item in args]
            if any(constant) and not all(constant):
                return args[constant.index(False)]
        made = func(*args, **(kwargs or {}))
        if name.removeprefix("new_").removesuffix("_like") in self.MAKERS:
            self._made.append(made)
        return made

    def _is_constant(self, tensor: Tensor) -> bool:
        return tensor.dim() == 0 or any(tensor is made for made in self._made)


class _LiftStops(TorchFunctionMode):
    """Mode in which detach, .data and no_grad have no effect."""

    STOPS = frozenset({torch.Tensor.detach, torch.detach, torch.Tensor.detach_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.STOPS or func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        if func is torch._C._set_grad_enabled:
            args = (True,)
        return func(*args, **(kwargs or {}))


def _close(one: Tensor, other: Tensor, limit: float) -> bool:
    return bool((one - other).abs().max() <= limit * max(float(one.abs().max()), 1e-300))
