"""Exchange of the numbers at padded positions, which may change nothing.

A loss is responsible for its padding if it reduces over tokens or takes the mask. A function that returns one number a
token and takes no mask leaves padding to its caller (kltest cuts it out). So does one that takes the mask for something
else, as the sum in a sequence's ratio, and whose output still shows the padding: its gradient at padded positions is
then that of the caller's cut and is ignored; its gradient at live positions counts. One that returns 0 at padded
positions cuts padding out itself, and is to do so whatever stands there.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kltest.checks.batches import no_padding, usual_batch
from kltest.checks.check import Found
from kltest.checks.hygiene.kl507_non_deterministic import difference, not_comparable
from kltest.identify.findings import Findings
from kltest.moments.differentiate import CallResult
from kltest.moments.tolerances import near
from kltest.rollout import Rollout

LOG_PROBS = tuple(f"{whose}{what}" for whose in ("", "ref_", "old_") for what in ("logp", "logits"))
Fill = Callable[[str, Tensor], Tensor]


def not_exchangeable(findings: Findings) -> str | None:
    """Return why padding cannot be exchanged, or None."""
    return no_padding(findings) or not_comparable(findings)


def exchange(findings: Findings, fills: dict[str, Fill]) -> Found | None:
    """Call the loss with its padding filled in several ways; report the first that changes the value or the gradient.

    Args:
        findings: of the loss.
        fills: by its name in the message, a function of a field's name and its entries at padded positions.
    """
    experiment = findings.measure.experiment()
    base = usual_batch(findings)
    before = experiment.call(base)
    takes_mask = "mask" in findings.loss.takes | base.accessed
    if before.outcome.returned == "tokens" and not takes_mask:
        return Found("it returns one number per token and takes no mask, so its caller cuts padding out", "skip")
    for name, fill in fills.items():
        after = experiment.call(_filled(base, fill))
        if words := _moved(before, after):
            return Found(f"With {name} at padded positions, {words}.")
    return None


def numbers(name: str, dead: Tensor, policy: float, others: float) -> Tensor:
    """Return one number for the policy's log-probs and another for the others', everywhere."""
    return dead if name == "tokens" else torch.full_like(dead, policy if name in ("logp", "logits") else others)


def _moved(before: CallResult, after: CallResult) -> str:
    """Describe what an exchange at padded positions changed; empty for nothing."""

    def same(one: Tensor, other: Tensor) -> bool:
        return bool(torch.isfinite(other).all()) and near(other.numpy(), one.numpy(), before.outcome.dtype)

    if words := difference(before, after, same):
        return words
    padding, now = _at_padding(before), _at_padding(after)
    if not padding.any() and now.isnan().any():
        return "what it returns there is NaN, and 0 for finite numbers, as if it were cut out"
    if not torch.equal(padding, now):
        return ""
    for name, gradient in after.at(~before.live).items():
        wrong = gradient[gradient != 0]
        if len(wrong):
            return f"the gradient at a padded position ({name}) is {float(wrong[0]):.6g} and not 0"
    return ""


def _at_padding(result: CallResult) -> Tensor:
    """Return what stands at padded positions of the result; nothing unless it was one number a token."""
    value = result.outcome.value
    return torch.zeros(0) if value is None or result.outcome.returned != "tokens" else value[~result.live]


def _filled(base: Rollout, fill: Fill) -> Rollout:
    dead = base.peek("mask") == 0
    fields = {}
    for name in (*LOG_PROBS, "tokens"):
        field = base.peek(name).detach().clone()
        field[dead] = fill(name, field[dead]).to(field.dtype)
        fields[name] = field
    return base.replace(**fields)
