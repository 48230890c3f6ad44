"""Experiments on a loss that is wrong under a stale sampler: its use of the sampler's log-probs.

Each changes one thing in one environment and compares gradients. It is made once an environment.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.checks.trainable import received
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.loss.resolve import Variant
from kltest.moments.differentiate import LossExperiment, at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import LEAVES, Rollout

# Share of the way from policy to sampler: no usual clip (0.2) acts there, and a missing ratio still shows (its bias is
# about this size, and the tolerance is 1e-9 or 1e-4).
NEAR = 0.01
# Change of log-probs, in nats: far below the tightest clip in use (3e-4), far above rounding.
CLOSE = 1e-6
Answer = Callable[[Findings, str], bool]


def _answer(if_it_fails: bool) -> Callable[[Answer], Answer]:
    """Make an experiment once an environment; if the loss fails in it, return this answer."""

    def decorate(experiment: Answer) -> Answer:
        def answer(findings: Findings, environment: str) -> bool:
            try:
                return findings.once(experiment, environment)
            except KltestError:
                return if_it_fails

        return answer

    return decorate


@_answer(if_it_fails=True)
def sampler_has_influence(findings: Findings, environment: str) -> bool:
    """Return True if the loss's gradient changes with the sampler's log-probs.

    Tried far from the sampler and close to the policy: a clipped ratio may be saturated at one of the two.
    """
    rollout = _rollout(findings, environment)
    generator = torch.Generator().manual_seed(1)
    for start, distance in (("old_", 0.3), ("", CLOSE)):
        base = {name: rollout.peek(start + name).detach() for name in LEAVES}
        noise = {name: torch.randn(part.shape, generator=generator).double() for name, part in base.items()}
        moved = {f"old_{name}": part + distance * noise[name] for name, part in base.items()}
        if not _same(findings.loss, rollout, rollout.replace(**moved)):
            return True
    return False


@_answer(if_it_fails=False)
def only_through_the_sum(findings: Findings, environment: str) -> bool:
    """Return True if the sampler enters as one weight a sequence that depends on the sum of its log-probs alone."""
    rollout = _rollout(findings, environment)
    old, mask = rollout.peek("old_logp"), rollout.peek("mask")
    shift = torch.zeros_like(old)
    shift[:, 0], shift[:, 1] = 0.3, -0.3
    same_sum = old + torch.where(mask[:, 1:2] != 0, shift, 0.0)
    if not _same(findings.loss, rollout, rollout.replace(old_logp=same_sum)):
        return False
    moved = old.clone()
    moved[:, 0] += 0.3
    factors = _factors(findings.loss, rollout, rollout.replace(old_logp=moved))
    # A weight of exactly 1/μ is the importance weight itself, and no mistake.
    return bool(factors) and any(abs(factor - math.exp(-0.3)) > 1e-4 for factor in factors)


@_answer(if_it_fails=False)
def right_without_clip(findings: Findings, environment: str) -> bool:
    """Return True if the gradient is the declared one when no clip acts: nearly on-policy, or with clips lifted."""
    loss, instance = findings.loss, instances(environment, findings.seed)[0]

    def lifted(rollout: Rollout) -> Outcome:
        with _LiftLimits():
            return loss(rollout)

    near = table(instance.policy + NEAR * (instance.sampler - instance.policy))
    meets = findings.measure.meets
    return meets(Variant(loss, lifted), instance) or meets(loss, replace(instance, sampler=near))


@_answer(if_it_fails=False)
def fixed_by_reattaching(findings: Findings, environment: str) -> bool:
    """Return True if the gradient is the declared one once it flows through the sampler's ratio wherever it stopped.

    A ratio depends on logp − old_logp, so that a stop-gradient removes minus the derivative with respect to old_logp.
    This derivative is measured with all stops lifted, minus the derivative without lifting, and added to the loss's own
    gradient. Stops on what does not depend on the sampler, such as a reward, stay. Then the derivative without lifting
    is not subtracted: for exp(logp.detach() − old_logp), which differentiates only old_logp.
    """
    loss, instance = findings.loss, instances(environment, findings.seed)[0]

    def missing(rollout: Rollout, *, one_sided: bool) -> Tensor:
        flowing = 0.0 if one_sided else _towards_sampler(loss, rollout)
        with _LiftStops():
            return flowing - _towards_sampler(loss, rollout)

    def reattached(rollout: Rollout, *, one_sided: bool) -> Outcome:
        outcome = loss(rollout)
        extra = (rollout.logp * missing(rollout, one_sided=one_sided)).sum()
        return replace(outcome, objective=outcome.objective + extra, rows=None, returned="scalar")

    rollout, least = _rollout(findings, environment), TOLERANCES["float32"].influence
    return any(
        missing(rollout, one_sided=one).abs().max() > least
        and findings.measure.meets(Variant(loss, partial(reattached, one_sided=one)), instance)
        for one in (False, True)
    )


def _towards_sampler(loss: Loss, rollout: Rollout) -> Tensor:
    found = received(LossExperiment(loss), rollout, ["old_logp"]).get("old_logp")
    return torch.zeros_like(rollout.peek("old_logp")) if found is None else found


def _factors(loss: Loss, one: Rollout, other: Rollout) -> list[float]:
    """Return the factor by which gradients shrink, for each length; none if one length has several."""
    before, after, limit = _gradients(loss, one, other)
    lengths = one.peek("mask").sum(dim=1)
    factors = []
    for length in lengths.unique():
        base, moved = (torch.cat([part[lengths == length].flatten() for part in parts]) for parts in (before, after))
        factor = float((base @ moved) / (base @ base).clamp(min=1e-300))
        if not 0 < factor < 1 - 1e-6 or not _close(factor * base, moved, limit):
            return []
        factors.append(factor)
    return factors


def _rollout(findings: Findings, environment: str) -> Rollout:
    return Rollout.of(instances(environment, findings.seed)[0], sampler="stale", padding=findings.seed)


def _same(loss: Loss, one: Rollout, other: Rollout) -> bool:
    before, after, limit = _gradients(loss, one, other)
    return all(_close(a, b, limit) for a, b in zip(before, after, strict=True))


def _gradients(loss: Loss, one: Rollout, other: Rollout) -> tuple[list[Tensor], list[Tensor], float]:
    """Gradients of two batches at their leaves, and how far apart they are if they are the same."""
    one = one.replace()
    first, second = loss(one), loss(other)
    limit = TOLERANCES[first.dtype].influence
    return at_leaves(loss, first.objective, one), at_leaves(loss, second.objective, other), limit


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
