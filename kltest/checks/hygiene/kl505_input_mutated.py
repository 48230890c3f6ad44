"""KL505: the loss writes into its inputs."""

from math import log

from kltest.checks.batches import usual_batch
from kltest.checks.check import Found
from kltest.checks.demonstrations import Demonstration, Losses, one_row
from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    """Compare the inputs bit for bit with what they were before the call."""
    experiment = findings.measure.experiment()
    for sampler in findings.samplers:
        experiment.loss(usual_batch(findings, sampler))
    changed = {**findings.loss.record.writes, **experiment.loss.record.writes}
    if not changed:
        return None
    return Found(" ".join(f"After the call {name} has changed: {what}." for name, what in sorted(changed.items())))


def in_place(logp, ref_logp, mask):
    log_ratio = ref_logp.neg_().add_(logp)
    return log_ratio.where(mask != 0, 0.0).sum(-1).square() / 2


def demonstrate(losses: Losses) -> Demonstration:
    """Value of each loss in two epochs that share the stored log-probs of the reference."""
    values = []
    for loss in losses.values():
        stored = one_row((log(0.5),))
        values.append([float(loss(one_row((log(0.8),)), stored, one_row((1.0,)))) for _ in range(2)])
    first, second = zip(*values, strict=True)
    return Demonstration(
        "one token, π = 0.8, ref = 0.5; the reference's log-probs are stored, for two epochs",
        ("", *losses),
        (("value, first epoch", *first), ("value, second epoch", *second)),
    )
