"""KL501: numbers at padded positions get into the loss.

The numbers at padded positions are exchanged, which may change nothing. A loss is responsible for its padding if it
reduces over tokens or takes the mask. A function that returns one number a token and takes no mask leaves padding to
its caller (kltest cuts it out). So does one that takes the mask for something else, as the sum in a sequence's ratio,
and whose output still shows the padding: its gradient at padded positions is then that of the caller's cut and is
ignored; its gradient at live positions counts. One that returns 0 at padded positions cuts padding out itself, and is
to do so whatever stands there.

A row without a live token, as a filter of overlong rollouts leaves it, is padding alone: a gradient there is a warning,
and so are other rows that have none beside it. If such a row makes the loss NaN, training says so itself.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kltest.checks.batches import LOG_PROBS, no_padding, usual_batch
from kltest.checks.check import Found
from kltest.checks.hygiene.kl507_non_deterministic import difference, not_comparable
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared
from kltest.moments.differentiate import CallResult
from kltest.moments.tolerances import near
from kltest.rollout import LEAVES, Rollout

# The least log-prob that is written: those of sampled tokens in training are above it.
LEAST = -50.0
# By its name in a message: the number for the policy's log-probs and for the others', None for other legal entries.
Fills = Mapping[str, tuple[float, float] | None]
FILLS: Fills = {
    "other log-probs and token ids": None,
    "0 for the policy and −50 for the others": (0.0, LEAST),
    "−50 for the policy and 0 for the others": (LEAST, 0.0),
}


def moot(findings: Findings) -> str | None:
    """Return why padding cannot be exchanged, or None."""
    return no_padding(findings) or not_comparable(findings)


@shared
def examine(findings: Findings) -> Found | None:
    """Fill padding with other legal numbers: near those that stood there, and as far apart as the usual ones get."""
    return exchange(findings, FILLS) or _row_of_padding(findings)


def _row_of_padding(findings: Findings) -> Found | None:
    """Add a row without a live token to a batch: nothing of it has a gradient, and the others have one."""
    experiment, base = findings.measure.experiment(), usual_batch(findings)
    more = base.take([*range(len(base)), 0])
    mask = more.peek("mask").clone()
    mask[-1] = 0
    try:
        after = experiment.call(more.replace(mask=mask)).gradients.values()
    except KltestError:  # it takes no such row, or no such number of rows
        return None
    if not all(bool(gradient.isfinite().all()) for gradient in after):
        return None
    if any(gradient[-1].any() for gradient in after):
        return Found("A row without a live token has a gradient, at padded positions.", level="warning")
    if not any(gradient.any() for gradient in after) and any(
        gradient.any() for gradient in experiment.call(base).gradients.values()
    ):
        return Found("Beside a row without a live token the others have no gradient.", level="warning")
    return None


def _others(name: str, dead: Tensor) -> Tensor:
    if name == "tokens":
        # One id less, or 1 for 0: legal in every vocabulary.
        return torch.where(dead > 0, dead - 1, dead + 1)
    # A different change for every field, so that no log-ratio stays.
    scale = 1 + 0.3 * LOG_PROBS.index(name)
    steps = scale * torch.arange(1, dead.numel() + 1, dtype=dead.dtype).reshape(dead.shape)
    return (dead + steps.sin()).log_softmax(-1) if dead.dim() > 1 else (dead - steps / 3).clamp(LEAST, 0.0)


def exchange(findings: Findings, fills: Fills) -> Found | None:
    """Fill the padding in several ways; report the first that changes the value or the gradient."""
    experiment = findings.measure.experiment()
    base = usual_batch(findings)
    before = experiment.call(base)
    takes_mask = "mask" in findings.loss.takes | base.accessed
    if before.outcome.returned == "tokens" and not takes_mask:
        return Found("it returns one number per token and takes no mask, so its caller cuts padding out", "skip")
    for name, numbers in fills.items():
        after = experiment.call(filled(base, numbers))
        if words := _moved(before, after):
            return Found(f"With {name} at padded positions, {words}.")
    return None


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


def filled(base: Rollout, numbers: tuple[float, float] | None) -> Rollout:
    """Return the batch with a number for the policy and one for the others, or other legal ones, at padding."""
    dead = base.peek("mask") == 0
    fields = {name: base.peek(name).detach().clone() for name in (*LOG_PROBS, "tokens")}
    for name, field in fields.items():
        if numbers is None:
            field[dead] = _others(name, field[dead])
        elif name != "tokens":
            field[dead] = numbers[0 if name in LEAVES else 1]
    return base.replace(**fields)


def unmasked(logp, ref_logp):
    return ((logp - ref_logp).square() / 2).sum(-1)
