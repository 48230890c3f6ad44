"""What a loss does to its inputs: writes, gradients switched on, gradients that go to the wrong side.

Where the line of KL506 is drawn. A loss is handed the reference's and the sampler's log-probs as constants, so that
`logp - ref_logp` needs no detach and is not accused for lacking one. A leak is real where
- the loss itself makes such a constant trainable (`requires_grad_()`, a `.grad` left behind), or
- the gradient goes to the constant *instead of* the policy: what a constant would receive, if it could, is what the
  policy lacks. Either no gradient reaches the policy at all, and one would reach the constant; or the gradient is not
  the declared one, and is once that which the constant would receive is given, with its sign turned, to the policy
  (a log-ratio depends on the difference of the two).
A detached ratio that is spelt `(logp.detach() - old_logp).exp()` in a loss whose gradient is right is therefore
silent: the constant gets nothing in training, and nothing is missing. A reference that is computed inside the loss from
the policy, as a moving average, is seen as the wrong gradient that it gives (1xx), not here.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from kltest.checks.call_once import look, usual_batch
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row, proportion
from kltest.identify.identification import tolerance
from kltest.identify.instances import instances
from kltest.loss.outcome import Loss, Outcome
from kltest.moments import exact
from kltest.moments.differentiate import backward
from kltest.rollout import LEAVES, Rollout
from kltest.truth import combine, gradient

SIDES = {"ref_": "the reference", "old_": "the sampler"}


def writes(findings: Findings) -> Found | None:
    """Inputs that are not bit for bit what they were."""
    loss = findings.loss.for_experiments()
    for sampler in findings.samplers:
        loss(usual_batch(findings, sampler))
    changed = {**findings.loss.writes, **loss.writes}
    if not changed:
        return None
    return Found(" ".join(f"After the call, {name} is another one: {what}." for name, what in sorted(changed.items())))


def leak(findings: Findings) -> Found | None:
    """Gradients that the reference or the sampler receives."""
    loss = findings.loss.for_experiments()
    look(loss, usual_batch(findings))
    if trainable := sorted(findings.loss.made_trainable | loss.made_trainable):
        return Found(f"It switched on the gradient of what it was given as a constant: {', '.join(trainable)}.")
    if findings.placement == "reward":
        return None
    for prefix, whose in SIDES.items():
        received = _received(loss, usual_batch(findings), prefix)
        if not any(part.any() for part in received.values()):
            continue
        size = max(float(part.abs().max()) for part in received.values())
        where = f"{' and '.join(prefix + name for name in received)} would receive one of up to {size:.3g} a token"
        if findings.blocked:
            return Found(f"No gradient reaches the policy, and {where}, if {whose} could be trained.")
        for row in _wrong_rows(findings):
            if _right_once_moved(findings, row, prefix):
                return Found(
                    f"In {row.where} the policy's gradient is wrong, and {where}, if {whose} could be trained: given "
                    "to the policy, that makes it the declared one."
                )
    return None


class Moved:
    """A loss in which the policy gets, with its sign turned, the gradient that a constant would have received."""

    def __init__(self, loss: Loss, prefix: str) -> None:
        self.loss, self.prefix = loss, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, rollout: Rollout) -> Outcome:
        outcome = self.loss(rollout)
        received = _received(self.loss, rollout, self.prefix)
        extra = [(rollout.peek(name) * -part).sum() for name, part in received.items()]
        return replace(outcome, objective=outcome.objective + sum(extra), rows=None, returned="scalar")


def _received(loss: Loss, rollout: Rollout, prefix: str) -> dict[str, Tensor]:
    """The gradient at the live tokens of a constant that is allowed one, under the policy's name for it."""
    constants = {name: rollout.peek(prefix + name).detach().clone().requires_grad_() for name in LEAVES}
    with warnings.catch_warnings():
        # A number that is read from what requires grad, which torch remarks on, requires none with its caller.
        warnings.simplefilter("ignore", UserWarning)
        objective = loss(rollout.replace(**{prefix + name: field for name, field in constants.items()})).objective
    if not objective.requires_grad:
        return {}
    live = rollout.peek("mask") != 0
    found = backward(loss, objective, list(constants.values()))
    return {
        name: part.where(live if part.dim() == 2 else live[..., None], 0.0)
        for name, part in zip(constants, found, strict=True)
        if part is not None
    }


def _wrong_rows(findings: Findings) -> list[Row]:
    """The shortest world in which the gradient of a batch of one is wrong, for each sampler.

    A multiple of the target is a wrong coefficient: of a half, what the reference would get is the other half.
    """
    wrong = [
        row
        for row in findings.rows
        if row.wrong and row.batch == 1 and row.method == "exact" and proportion(row.identified, row.expected) is None
    ]
    return [row for sampler in findings.samplers for row in wrong if row.sampler == sampler][:2]


def _right_once_moved(findings: Findings, row: Row, prefix: str) -> bool:
    instance = instances(row.environment, findings.seed)[0]
    found = exact(Moved(findings.loss.for_experiments(), prefix), instance, row.sampler, padding=findings.seed)
    target = combine(findings.expect, instance)
    unit = max(float(np.linalg.norm(part)) for part in (target, gradient("reverse_kl", instance)))
    return float(np.linalg.norm(found.gradient - target)) <= tolerance(found.dtype) * unit
