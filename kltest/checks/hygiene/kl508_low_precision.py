"""KL508: half precision costs the gradient its digits.

The gradient in bfloat16 and float16 is compared with that of the same loss in float64 on the same rounded inputs.
"""

import math
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from kltest.checks.batches import with_advantage
from kltest.checks.check import Found
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings
from kltest.moments.differentiate import CallResult, LossExperiment
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import LEAVES, Rollout

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Significant bits; neighbouring numbers near 10 are 2⁴ of the last bit apart.
DIGITS = {"bfloat16": 8, "float16": 11}
ROWS, LENGTH, VOCABULARY = 12, 5, 6
SEED = 0
# Relative errors of an expected gradient in float32: of a careful loss well below the first; above the second it is no
# question of digits any more.
SEEN, MUCH = 1e-3, 1e-2
# Paths through the neighbourhood of a batch and steps on each; on a smooth stretch a step is about a 24th of the path.
PATHS, STEPS, JUMP = 4, 24, 0.25


def mild_batch(kind: torch.dtype, seed: int) -> Rollout:
    """Rollouts with log-ratios below 1.5 and log-probs down to −7, every number representable in `kind`."""
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
    rows = torch.arange(ROWS)
    fields = {"mask": mask, "tokens": tokens, "group": rows // (ROWS // 3), "reward": (rows % 2).double()}
    for prefix, logits in tables.items():
        fields[f"{prefix}logits"] = logits.log_softmax(-1).to(kind).double()
        fields[f"{prefix}logp"] = fields[f"{prefix}logits"].gather(-1, tokens[..., None])[..., 0]
    return with_advantage(Rollout(fields))


moot = not_comparable


def examine(findings: Findings) -> Found | None:
    """Half precision inside although float64 was passed, or what lower precision of the inputs does to the gradient."""
    off = _off_in_float32(findings)
    if off > SEEN:
        words = f"In float32 the expected gradient is off by {off:.2g} of it."
        return Found(words, level="error" if off > MUCH else "warning")
    dtype = findings.observed.dtype
    if dtype in NARROW:
        return Found(
            f"Given float64, it computes in {dtype}, whose numbers have {DIGITS[dtype]} significant bits: log-probs "
            f"near −10 are rounded to multiples of {2.0 ** (4 - DIGITS[dtype]):g}, and so are log-ratios."
        )
    # A coefficient is set to one: the KL part is a difference over β, and a small β would magnify rounding.
    measure = findings.measure
    beta = 1.0 if measure.loss.takes_beta else None
    wrong, not_called = [], []
    for name, kind in NARROW.items():
        batch = mild_batch(kind, SEED)
        exact = measure.experiment(beta=beta).call(batch)
        if not any(part.any() for part in exact.gradients.values()):
            continue
        try:
            found = measure.experiment(kind, beta=beta).call(batch.replace())
        except KltestError as error:
            not_called.append(f"with {name} it raises: {str(error).splitlines()[-1].strip()}")
            continue
        off = _relative_error(exact, found, exact.live)
        allowed = TOLERANCES[name].narrow
        assert allowed is not None
        if math.isfinite(off) and off > allowed:
            off = _relative_error(exact, found, exact.live & ~_jumps(measure.experiment(beta=beta), batch, name))
        if not math.isfinite(off):
            wrong.append(f"with {name} its gradient is not finite")
        elif off > allowed:
            wrong.append(f"with {name} its gradient is off by {off:.2g} of it")
    if wrong:
        return Found(
            f"Given log-probs in half precision, {' and '.join(wrong)}, compared with float64 on the same rounded "
            "numbers, on mild input; a careful loss is off by less than 0.03."
        )
    if not_called:
        return Found(f"It could not be called with half precision: {'; '.join(not_called)}.", "inconclusive")
    return None


def _off_in_float32(findings: Findings) -> float:
    """Largest distance of a row's expected gradient in float32 from the declared one, or from that in float64.

    The declared one counts if the row agrees with it. Relative to the gradient that is compared with.
    """
    off = 0.0
    for row in findings.rows:
        if row.batch > 1 or not findings.measure.gradients(row):
            continue
        instance = findings.measure.case(row).instances[0]
        wanted = findings.measure.gradients(row)[0]
        if row.agrees:
            wanted = target(findings.expect, instance, row.sampler)
        if row.identified == {"zero": 1.0}:  # up to rounding, so that nothing is relative to it
            wanted = np.zeros_like(wanted)
        with suppress(KltestError):
            found = findings.measure.expected(row, instance, torch.float32, wanted).gradient
            off = max(off, relative_bias(found, wanted, size(instance)))
    if all(row.batch > 1 for row in findings.rows):  # expectations over batches take long: one batch tells as much
        with suppress(KltestError):
            batch, beta = mild_batch(torch.float32, SEED), 1.0 if findings.loss.takes_beta else None
            exact = findings.measure.experiment(beta=beta).call(batch)
            found_there = findings.measure.experiment(torch.float32, beta=beta).call(batch.replace())
            off = max(off, _relative_error(exact, found_there, exact.live))
    return off


def _jumps(experiment: LossExperiment, batch: Rollout, name: str) -> Tensor:
    """(B, T) bool, True if the gradient in float64 jumps within the rounding of the log-probs.

    No arithmetic of so few digits can tell on which side of a jump a number lies, as the sign of π − ref in total
    variation, so such tokens do not count. On a path through the neighbourhood a smooth gradient changes by about the
    same in every step, and one that jumps in a single step.
    """
    generator = torch.Generator().manual_seed(SEED)
    moved = torch.zeros_like(batch.peek("mask"), dtype=torch.bool)
    names = [side + field for side in ("", "ref_", "old_") for field in LEAVES]
    logs = {field: batch.peek(field).detach() for field in names}
    for _ in range(PATHS):
        path = {
            # For a likely token it is the probability that is rounded, to 2⁻ᵇ of it.
            field: (2.0 * torch.randint(2, log.shape, generator=generator) - 1) * log.abs().clamp(min=1.0)
            for field, log in logs.items()
        }
        seen = []
        for share in torch.linspace(-1.0, 1.0, STEPS + 1).tolist():
            by = share * 2.0 ** -DIGITS[name]
            fields = {field: (log + by * path[field]).clamp(max=0.0) for field, log in logs.items()}
            gradients = experiment.call(batch.replace(**fields)).gradients
            seen.append(torch.cat([part.reshape(*moved.shape, -1) for part in gradients.values()], dim=-1))
        steps = torch.stack(seen).diff(dim=0).norm(dim=-1)
        largest, together = steps.amax(dim=0), steps.sum(dim=0)
        moved |= (largest > JUMP * together) & (largest > JUMP * seen[0].norm(dim=-1))
    return moved


def _relative_error(exact: CallResult, found: CallResult, positions: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ of all leaves over some positions (B, T) bool; 0 if both are zero."""
    wanted, other = exact.at(positions), found.at(positions)
    gaps = [other.get(name, torch.zeros_like(part)) - part for name, part in wanted.items()]
    off, size = (math.sqrt(sum(float(part.square().sum()) for part in parts)) for parts in (gaps, wanted.values()))
    return off / size if size else 0.0


def in_bfloat16(logp, ref_logp, mask):
    log_ratio = logp.bfloat16() - ref_logp.bfloat16()
    return log_ratio.where(mask != 0, 0.0).sum(-1).square() / 2
