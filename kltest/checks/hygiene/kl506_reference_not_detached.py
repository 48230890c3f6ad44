"""KL506: the gradient goes to the reference or the sampler.

A loss gets the log-probs of the reference and the sampler as constants, so that `logp - ref_logp` needs no detach:
while the policy gets its gradient, a constant that would receive one as well does no harm. A leak is real if

- the loss itself makes such a constant trainable (`requires_grad_()`, a `.grad` left behind), or
- the gradient goes to the constant *instead of* the policy, whose side of that term is detached. Either no gradient
  reaches the policy at all, although the loss depends on it, and one would reach the constant. Or the gradient is not
  the declared one, and becomes it once the policy's side is not detached where the constant would receive one.

A detached ratio written `(logp.detach() - old_logp).exp()` in a loss whose gradient is right therefore passes, and so
does a term that has no policy's side, as a penalty of `old_logp - ref_logp` (KL305). A reference that the loss computes
from the policy, as a moving average, shows as a wrong gradient (1xx), not here.
"""

from functools import partial

import torch
from torch import Tensor

from kltest.checks.batches import usual_batch, with_gradient
from kltest.checks.check import Found
from kltest.checks.lifted import WithoutStops
from kltest.errors import TargetError
from kltest.identify.findings import Findings, Row, proportion
from kltest.identify.instances import instances
from kltest.moments.differentiate import LossExperiment, leaf_gradients, received
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import LEAVES, Rollout, elsewhere

SIDES = {"ref_": "the reference", "old_": "the sampler"}


def examine(findings: Findings) -> Found | None:
    """Look for gradients that the reference or the sampler receives."""
    experiment = findings.measure.experiment()
    experiment.call(usual_batch(findings))
    if trainable := sorted(findings.loss.record.made_trainable | experiment.loss.record.made_trainable):
        return Found(f"It switched on the gradient of constants: {', '.join(trainable)}.")
    if findings.placement == "reward":
        return None
    for prefix, whose in SIDES.items():
        try:
            found = _received(experiment, usual_batch(findings), prefix)
        except TargetError:  # it refuses such a constant, or torch does: nothing flows there in silence
            continue
        if not any(part.any() for part in found.values()):
            continue
        size = max(float(part.abs().max()) for part in found.values())
        fields = " and ".join(prefix + name for name in found)
        leak = f"{fields} would receive a gradient of up to {size:.3g} per token"
        if findings.observed.blocked:
            if not _depends_on_the_policy(experiment, usual_batch(findings)):
                continue
            return Found(f"No gradient reaches the policy, and {leak}, if {whose} could be trained.")
        for row in _wrong_rows(findings):
            if _right_once_attached(findings, row, prefix):
                return Found(
                    f"In {row.where} the policy's gradient is wrong, and {leak}, if {whose} could be trained: with the "
                    "policy's side of that term attached, the gradient is the declared one."
                )
    return None


def _received(experiment: LossExperiment, rollout: Rollout, prefix: str) -> dict[str, Tensor]:
    """Gradient at the live tokens of a constant that is made trainable, under the policy's name for it."""
    live = rollout.peek("mask") != 0
    found = received(experiment, rollout, [prefix + name for name in LEAVES])
    return {
        name.removeprefix(prefix): part.where(live if part.dim() == 2 else live[..., None], 0.0)
        for name, part in found.items()
    }


def _depends_on_the_policy(experiment: LossExperiment, rollout: Rollout) -> bool:
    """Return True if the value of a loss without a gradient moves with the policy's log-probs."""
    moved = {name: elsewhere(rollout.peek(name)) for name in LEAVES}
    return not torch.equal(experiment.call(rollout).value, experiment.call(rollout.replace(**moved)).value)


def _withheld(experiment: LossExperiment, rollout: Rollout, prefix: str) -> dict[str, Tensor]:
    """Gradient that the policy gets beyond its own if its side is not detached, where it is minus the constant's.

    A log-ratio depends on the difference of the two. Stops on what depends on the constant stay: nothing comes to the
    constant through those.
    """
    flows, own = _received(experiment, rollout, prefix), experiment.call(rollout.replace()).gradients
    constants = {prefix + name: rollout.peek(prefix + name).detach().clone().requires_grad_() for name in LEAVES}
    lifted = rollout.replace(**constants)
    with WithoutStops(list(constants.values())):
        objective = experiment.loss(lifted).objective
    found, near = leaf_gradients(experiment.loss, objective, lifted), TOLERANCES["float32"].groups
    gained = {name: found[name] - own.get(name, 0.0) for name in flows if name in found}
    return {name: part.where((part + flows[name]).abs() <= near * part.abs(), 0.0) for name, part in gained.items()}


def _wrong_rows(findings: Findings) -> list[Row]:
    """First row of batches of one that is wrong, for each sampler.

    Multiples of the target are left out: if half of it is followed, the reference would receive the other half.
    """
    wrong = [
        row
        for row in findings.rows
        if row.wrong and row.batch == 1 and row.method == "exact" and proportion(row.identified, row.expected) is None
    ]
    return [row for sampler in findings.samplers for row in wrong if row.sampler == sampler][:2]


def _right_once_attached(findings: Findings, row: Row, prefix: str) -> bool:
    """Return True if the policy's gradient is the declared one with what its detached side withholds from it."""
    experiment, instance = findings.measure.experiment(), instances(row.environment, findings.seed)[0]
    withheld = partial(_withheld, experiment, prefix=prefix)
    base = Rollout.of(instance, sampler=row.sampler, padding=findings.seed)
    if not any(part.abs().max() > TOLERANCES["float32"].influence for part in withheld(base).values()):
        return False
    return findings.measure.meets(with_gradient(experiment.loss, withheld), instance, row.sampler)


def wrong_side(logp, ref_logp, mask):
    log_ratio = (logp.detach() - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def right_side(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp.detach()).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2
