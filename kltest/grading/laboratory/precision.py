"""A loss in bfloat16 and float16: its gradient beside that of the same loss in float64 on the same rounded inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.grading.checks.check import Found
from kltest.grading.findings import Findings
from kltest.grading.laboratory.looking import Seen, look
from kltest.rollout import Rollout
from kltest.targets.outcome import Loss

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
    dtype = findings.evaluator.dtype
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
        off = _relative_error(exact, found)
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


def _relative_error(exact: Seen, found: Seen) -> float:
    """‖found − exact‖ / ‖exact‖ over the live tokens of all leaves."""
    off = size = 0.0
    for name, gradient in exact.at(exact.live).items():
        other = found.at(found.live).get(name, torch.zeros_like(gradient))
        off += float((other - gradient).square().sum())
        size += float(gradient.square().sum())
    return math.sqrt(off / size) if math.isfinite(off) else math.inf
