"""A loss in bfloat16 and float16: its gradient beside that of the same loss in float64 on the same rounded inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kltest.checks.call_once import Seen, look
from kltest.checks.check import Found
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.loss.outcome import Loss
from kltest.rollout import LEAVES, Rollout

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Significant bits, and the distance of neighbouring numbers near 10.
DIGITS = {"bfloat16": 8, "float16": 11}
GRID = {"bfloat16": 2.0**-4, "float16": 2.0**-7}
ROWS, LENGTH, VOCABULARY = 12, 5, 6
# Relative error of the gradient, over all live tokens. Measured on 38 registered estimators and some twenty spellings:
# plain ones that compute in the type they are given stay below 0.03 in bfloat16 and 0.004 in float16, sums of
# log-probs that are subtracted only then (as in DPO) below 0.075 and 0.012. Beyond three times that, digits
# were thrown away, and a quarter of the gradient is noise.
ALLOWED = {"bfloat16": 0.25, "float16": 0.04}
SEED = 0
# Ways through the neighbourhood of a batch, and steps on each: in a smooth stretch each is about a 24th of the way.
WAYS, STEPS, JUMP = 4, 24, 0.25


def mild_batch(kind: torch.dtype, seed: int) -> Rollout:
    """Rollouts with log-ratios below 1.5 and tokens as unlikely as −7, every number one that `kind` can hold."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    base = 1.5 * noise(ROWS, LENGTH, VOCABULARY)
    tables = {
        "": base,
        "ref_": base + 0.4 * noise(*base.shape).clamp(-1.5, 1.5),
        "old_": base + 0.1 * noise(*base.shape).clamp(-1.5, 1.5),
    }
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < 1 + torch.arange(ROWS)[:, None] % LENGTH).double()
    reward = (torch.arange(ROWS) % 2).double()
    group = torch.arange(ROWS) // (ROWS // 3)
    same = (group[:, None] == group[None, :]).double()
    fields = {"mask": mask, "tokens": tokens, "group": group, "reward": reward}
    fields["advantage"] = reward - same @ reward / same.sum(dim=1)
    for prefix, logits in tables.items():
        fields[f"{prefix}logits"] = logits.log_softmax(-1).to(kind).double()
        fields[f"{prefix}logp"] = fields[f"{prefix}logits"].gather(-1, tokens[..., None])[..., 0]
    return Rollout(fields)


def too_low(findings: Findings) -> Found | None:
    """Half precision inside, although float64 was given; else gradients that half precision on input destroys."""
    dtype = findings.observed.dtype
    if dtype in NARROW:
        return Found(
            f"Given float64, it computes in {dtype}, whose numbers have {DIGITS[dtype]} significant bits: log-probs "
            f"near −10 are rounded to multiples of {GRID[dtype]:g}, and so are log-ratios."
        )
    return narrow_inputs(findings.loss)


def narrow_inputs(loss: Loss) -> Found | None:
    """How far the gradient is off where the inputs come in bfloat16 or float16.

    A coefficient is set to one: the KL part is a difference over β, and a small one would magnify rounding.
    """
    loss = loss.at(1.0) if loss.takes_beta else loss
    wrong, not_called = [], []
    for name, kind in NARROW.items():
        batch = mild_batch(kind, SEED)
        exact = look(loss.for_experiments(), batch)
        if not any(part.any() for part in exact.gradients.values()):
            continue
        try:
            found = look(loss.for_experiments(kind), batch.replace())
        except KltestError as error:
            not_called.append(f"with {name} it raises: {str(error).splitlines()[-1].strip()}")
            continue
        off = _relative_error(exact, found, exact.live)
        if math.isfinite(off) and off > ALLOWED[name]:
            off = _relative_error(exact, found, exact.live & ~jumps(loss, batch, name))
        if not math.isfinite(off):
            wrong.append(f"with {name} its gradient is not finite")
        elif off > ALLOWED[name]:
            wrong.append(f"with {name} its gradient is off by {off:.2g} of it")
    if wrong:
        return Found(
            f"Given log-probs in half precision, {' and '.join(wrong)}, compared with float64 on the same rounded "
            "numbers, in a mild world; a loss that takes care of its digits is off by less than 0.03."
        )
    if not_called:
        return Found(f"It could not be called with half precision: {'; '.join(not_called)}.", "inconclusive")
    return None


def jumps(loss: Loss, batch: Rollout, name: str) -> Tensor:
    """(B, T) bool, where the gradient of the loss in float64 jumps within what rounding does to a log-prob.

    On which side of a jump a number lies, as the sign of π − ref in total variation, no arithmetic of so few digits can
    tell, and none is blamed for it. On a way through the neighbourhood a gradient that is smooth changes in every step
    by about the same, one that jumps does in one.
    """
    generator = torch.Generator().manual_seed(SEED)
    moved = torch.zeros_like(batch.peek("mask"), dtype=torch.bool)
    names = [side + field for side in ("", "ref_", "old_") for field in LEAVES]
    logs = {field: batch.peek(field).detach() for field in names}
    for _ in range(WAYS):
        ways = {
            # Of a likely token it is the probability that is rounded, to 2⁻ᵇ of it.
            field: (2.0 * torch.randint(2, log.shape, generator=generator) - 1) * log.abs().clamp(min=1.0)
            for field, log in logs.items()
        }
        seen = []
        for share in torch.linspace(-1.0, 1.0, STEPS + 1).tolist():
            by = share * 2.0 ** -DIGITS[name]
            fields = {field: (log + by * ways[field]).clamp(max=0.0) for field, log in logs.items()}
            gradients = look(loss.for_experiments(), batch.replace(**fields)).gradients
            seen.append(torch.cat([part.reshape(*moved.shape, -1) for part in gradients.values()], dim=-1))
        steps = torch.stack(seen).diff(dim=0).norm(dim=-1)
        largest, together = steps.amax(dim=0), steps.sum(dim=0)
        moved |= (largest > JUMP * together) & (largest > JUMP * seen[0].norm(dim=-1))
    return moved


def _relative_error(exact: Seen, found: Seen, where: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ over some tokens (B, T) bool, of all leaves; 0 where there is nothing."""
    off = size = 0.0
    for name, gradient in exact.at(where).items():
        other = found.at(where).get(name, torch.zeros_like(gradient))
        off += float((other - gradient).square().sum())
        size += float(gradient.square().sum())
    if not math.isfinite(off):
        return math.inf
    return math.sqrt(off / size) if size else 0.0
