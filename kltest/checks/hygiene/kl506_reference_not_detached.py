"""KL506: the gradient goes to the reference or the sampler.

A loss gets the log-probs of the reference and the sampler as constants, so that `logp - ref_logp` needs no detach. A
leak is real if

- the loss itself makes such a constant trainable (`requires_grad_()`, a `.grad` left behind), or
- the gradient goes to the constant *instead of* the policy: the policy lacks what the constant would receive if it were
  trainable. Either no gradient reaches the policy at all, and one would reach the constant. Or the gradient is not the
  declared one, and becomes it once the policy gets what the constant would receive, with its sign turned (a log-ratio
  depends on the difference of the two).

A detached ratio written `(logp.detach() - old_logp).exp()` in a loss whose gradient is right therefore passes. A
reference that the loss computes from the policy, as a moving average, shows as a wrong gradient (1xx), not here.
"""

from torch import Tensor

from kltest.checks.batches import usual_batch, with_gradient
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row, proportion
from kltest.identify.instances import instances
from kltest.moments.differentiate import LossExperiment, received
from kltest.rollout import LEAVES, Rollout

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
        found = _received(experiment, usual_batch(findings), prefix)
        if not any(part.any() for part in found.values()):
            continue
        size = max(float(part.abs().max()) for part in found.values())
        fields = " and ".join(prefix + name for name in found)
        leak = f"{fields} would receive a gradient of up to {size:.3g} per token"
        if findings.observed.blocked:
            return Found(f"No gradient reaches the policy, and {leak}, if {whose} could be trained.")
        for row in _wrong_rows(findings):
            if _right_once_moved(findings, row, prefix):
                return Found(
                    f"In {row.where} the policy's gradient is wrong, and {leak}, if {whose} could be trained: added "
                    "to the policy's, it makes it the declared one."
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


def _right_once_moved(findings: Findings, row: Row, prefix: str) -> bool:
    """Return True if the policy's gradient is the declared one with what the constant would receive, sign turned."""
    experiment, instance = findings.measure.experiment(), instances(row.environment, findings.seed)[0]

    def turned(rollout: Rollout) -> dict[str, Tensor]:
        return {name: -part for name, part in _received(experiment, rollout, prefix).items()}

    return findings.measure.meets(with_gradient(experiment.loss, turned), instance, row.sampler)


def wrong_side(logp, ref_logp, mask):
    log_ratio = (logp.detach() - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def right_side(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp.detach()).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2
