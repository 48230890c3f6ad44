"""What stands at padded positions is exchanged: nothing may come of it.

A loss answers for its padding where it reduces over tokens, or where it takes the mask. A function that returns one
number a token and takes no mask leaves padding to its caller (kltest cuts it out), and so does one that takes the mask
for something else, as for the sum in a sequence's ratio: its own output still shows what stands at padded positions.
Its gradient there says nothing, then, since the caller's cut is what made it; at live positions it does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kltest.checks.call_once import Seen, look, usual_batch
from kltest.checks.check import Found
from kltest.checks.hygiene.repeat import why_not as cannot_be_compared
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.moments.agreement import near
from kltest.rollout import Rollout

LOG_PROBS = tuple(f"{whose}{what}" for whose in ("", "ref_", "old_") for what in ("logp", "logits"))
HUGE = 1e4
Fill = Callable[[str, Tensor], Tensor]


def why_not(findings: Findings) -> str | None:
    """Why nothing is to be learnt from padding, if so."""
    if not any(instances(environment, findings.seed)[0].paths.padded for environment in findings.environments):
        return "only worlds without padding were graded"
    return cannot_be_compared(findings)


def leak(findings: Findings) -> Found | None:
    """Finite garbage and huge values in the padding."""
    return _exchange(
        findings,
        {
            "other log-probs and token ids": _others,
            f"{HUGE:g} for the policy and −{HUGE:g} for the others": lambda name, dead: _signed(name, dead, HUGE),
            f"−{HUGE:g} for the policy and {HUGE:g} for the others": lambda name, dead: _signed(name, dead, -HUGE),
        },
    )


def not_finite(findings: Findings) -> Found | None:
    """NaN and infinities in the padding."""
    fills = {"NaN": float("nan"), "+inf": float("inf"), "−inf": float("-inf")}
    return _exchange(findings, {name: _constant(value) for name, value in fills.items()})


def _exchange(findings: Findings, fills: dict[str, Fill]) -> Found | None:
    loss = findings.loss.for_experiments()
    base = usual_batch(findings)
    before = look(loss, base)
    takes_mask = "mask" in loss.takes | base.accessed
    if before.outcome.returned == "tokens" and not takes_mask:
        return Found(
            "it returns one number a token and takes no mask: padding is its caller's, who cuts it out", "skip"
        )
    for name, fill in fills.items():
        after = look(loss, _filled(base, fill))
        if words := _moved(before, after):
            return Found(f"With {name} at padded positions, {words}.")
    return None


def _moved(before: Seen, after: Seen) -> str | None:
    """What an exchange at padded positions changed, in words."""
    dtype, live = before.outcome.dtype, before.live
    if before.value.shape != after.value.shape:
        return f"it returns shape {tuple(after.value.shape)} where it returned {tuple(before.value.shape)}"
    if not _same(before.value, after.value, dtype):
        if before.value.dim() == 0:
            return f"the value is {after.value.item():.6g} where it was {before.value.item():.6g}"
        row = int(_differs(before.value, after.value).reshape(len(live), -1).any(dim=1).nonzero()[0])
        one, other = (float(value[row].sum()) for value in (before.value, after.value))
        return f"the value of rollout {row} is {other:.6g} where it was {one:.6g}"
    for name, gradient in before.at(live).items():
        found = after.at(live).get(name, torch.zeros_like(gradient))
        if not _same(gradient, found, dtype):
            place = int(_differs(gradient, found).flatten().nonzero()[0])
            one, other = (float(part.flatten()[place]) for part in (gradient, found))
            return f"the gradient at a live token ({name}) is {other:.6g} where it was {one:.6g}"
    if _left_to_the_caller(before, after):
        return None
    for name, gradient in after.at(~live).items():
        wrong = gradient[gradient != 0]
        if len(wrong):
            return f"the gradient at a padded position ({name}) is {float(wrong[0]):.6g} and not 0"
    return None


def _left_to_the_caller(before: Seen, after: Seen) -> bool:
    if before.outcome.returned != "tokens":
        return False
    assert before.outcome.value is not None
    assert after.outcome.value is not None
    at_padding = [seen.outcome.value[~seen.live] for seen in (before, after)]  # type: ignore[index]
    return not torch.equal(*at_padding)


def _same(before: Tensor, after: Tensor, dtype: str) -> bool:
    return bool(torch.isfinite(after).all()) and near(after.numpy(), before.numpy(), dtype)


def _differs(before: Tensor, after: Tensor) -> Tensor:
    gap = (after - before).abs()
    return ~torch.isfinite(after) | (gap == gap.nan_to_num(0.0).max()) & (gap > 0)


def _filled(base: Rollout, fill: Fill) -> Rollout:
    dead = base.peek("mask") == 0
    fields = {}
    for name in (*LOG_PROBS, "tokens"):
        field = base.peek(name).detach().clone()
        field[dead] = fill(name, field[dead]).to(field.dtype)
        fields[name] = field
    return base.replace(**fields)


def _others(name: str, dead: Tensor) -> Tensor:
    if name == "tokens":
        # One id less, from the lowest to the highest that occurs: legal in every vocabulary.
        return torch.where(dead > 0, dead - 1, dead + 1)
    # Another change for every field, so that no log-ratio stays.
    apart = 1 + 0.3 * LOG_PROBS.index(name)
    steps = apart * torch.arange(1, dead.numel() + 1, dtype=dead.dtype).reshape(dead.shape)
    return (dead + steps.sin()).log_softmax(-1) if dead.dim() > 1 else dead - steps / 3


def _signed(name: str, dead: Tensor, size: float) -> Tensor:
    if name == "tokens":
        return dead
    return torch.full_like(dead, size if name in ("logp", "logits") else -size)


def _constant(value: float) -> Fill:
    return lambda name, dead: dead if name == "tokens" else torch.full_like(dead, value)
