"""KL508: half precision costs the gradient its digits.

The gradient in bfloat16 and float16 is compared with that of the same loss in float64 on the same rounded inputs, of
mild rollouts; in bfloat16 also of rollouts as long as those of trainers, and of tokens with large ids, since a length,
a place or an id is another one in it. So is the gradient inside torch.autocast, which makes products of matrices in
half precision, if the rollouts are unlikely as a whole. Another formula behind a branch that asks for the precision is
found without rounding (kltest.checks.surroundings).
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kltest.checks.batches import LOG_PROBS, of_instance, rows_taken, usual_batch
from kltest.checks.check import Found
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.checks.stress import LONGER, MANY, long_instance
from kltest.checks.surroundings import Surroundings, precisions
from kltest.environments import Instance, bandit
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings
from kltest.moments.differentiate import CallResult, LossExperiment
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Significant bits; neighbouring numbers near 10 are 2⁴ of the last bit apart.
DIGITS = {"bfloat16": 8, "float16": 11}
# Relative errors of an expected gradient in float32: of a careful loss well below the first; above the second it is no
# question of digits any more.
SEEN, MUCH = 1e-3, 1e-2
# Share of a gradient in half precision by which it is another one, as of another token, where rounding is none of it.
ANOTHER = 0.9
# It has whole numbers up to 256, and float16 those up to 2,048.
COARSEST = "bfloat16"
# Ways in which log-probs are moved by their rounding; a change of a token's gradient by more than this share is a jump.
MOVES, JUMP = 8, 0.25

moot = not_comparable


def examine(findings: Findings) -> Found | None:
    """Half precision inside although float64 was passed, or what lower precision of the inputs does to the gradient."""
    if findings.observed.draws:
        why = "it draws random numbers (KL507), and others in batches of another precision"
        return precisions(findings) or Found(why, "inconclusive", level="warning")
    off = _off_in_float32(findings)
    if off > SEEN:
        words = f"In float32 the expected gradient is off by {off:.2g} of it."
        return Found(words, level="error" if off > MUCH else "warning")
    if another := precisions(findings):
        return another
    dtype = findings.observed.dtype
    if dtype in NARROW:
        return Found(
            f"Given float64, it computes in {dtype}, whose numbers have {DIGITS[dtype]} significant bits: log-probs "
            f"near −10 are rounded to multiples of {2.0 ** (4 - DIGITS[dtype]):g}, and so are log-ratios."
        )
    if another := _where_much_is_lost(findings):
        return another
    wrong, not_called = [], []
    for name, kind in NARROW.items():
        try:
            off = _off_in_one_batch(findings, usual_batch(findings), kind, name)
        except KltestError as error:
            not_called.append(f"with {name} it raises: {str(error).splitlines()[-1].strip()}")
            continue
        if not math.isfinite(off):
            wrong.append(f"with {name} its gradient is not finite")
        elif off > (TOLERANCES[name].narrow or 0.0):
            wrong.append(f"with {name} its gradient is off by {off:.2g} of it")
    if wrong:
        return Found(
            f"Given log-probs in half precision, {' and '.join(wrong)}, compared with float64 on the same rounded "
            "numbers, on mild input; a careful loss is off by less than 0.03."
        )
    if not_called:
        return Found(f"It could not be called with half precision: {'; '.join(not_called)}.", "inconclusive")
    return None


def _where_much_is_lost(findings: Findings) -> Found | None:
    """Report another gradient in half precision, or inside autocast, where rollouts are long or tokens have large ids.

    What rounding alone may make is not reported there. Batches that the loss refuses are passed over.
    """
    tried: dict[str, tuple[torch.dtype, Surroundings | None]] = {
        f"given log-probs in {COARSEST}": (NARROW[COARSEST], None),
        f"inside torch.autocast in {COARSEST}, given float32": (
            torch.float32,
            partial(torch.autocast, "cpu", NARROW[COARSEST]),
        ),
    }
    for how, (kind, surroundings) in tried.items():
        for where, batch in _large(findings, alike=surroundings is not None):
            with suppress(KltestError):
                off = _off_in_one_batch(findings, batch, kind, COARSEST, surroundings)
                if ANOTHER < off < math.inf:  # what overflows is KL503's
                    return Found(
                        f"{where}, {how}, its gradient is off by {off:.2g} of it, compared with float64 on the same "
                        "rounded numbers.",
                        level="error",
                    )
    return None


def _large(findings: Findings, alike: bool) -> Iterator[tuple[str, Rollout]]:
    """Yield batches of long rollouts, unlikely ones if tokens are `alike`, and of tokens with large ids."""
    many = rows_taken(findings)
    drawn = [(f"In rollouts of {LONGER} tokens", long_instance(1, findings.seed, LONGER, alike=alike), 0)]
    if "tokens" in findings.observed.uses:  # odd ids above 256, which bfloat16 has not
        drawn.append((f"With token ids up to {MANY - 1}", Instance.draw(bandit(MANY), findings.seed), MANY - 2 * many))
    for where, instance, first in drawn:
        rollout = of_instance(findings, instance)
        rows = np.linspace(first, len(rollout), many, endpoint=False)
        yield where, rollout.take(rows.astype(int))


def _off_in_float32(findings: Findings) -> float:
    """Largest distance of a row's expected gradient in float32 from the declared one, or from that in float64.

    The declared one counts if the row agrees with it. Relative to the gradient that is compared with.
    """
    off = 0.0
    for row in findings.rows:
        if row.batch > 1 or not row.gradients:
            continue
        instance = row.case.instances[0]
        wanted = row.gradients[0]
        if row.agrees:
            wanted = target(findings.expect, instance, row.sampler)
        if row.identified == {"zero": 1.0}:  # up to rounding, so that nothing is relative to it
            wanted = np.zeros_like(wanted)
        with suppress(KltestError):
            found = findings.measure.expected(row, instance, torch.float32, wanted).gradient
            off = max(off, relative_bias(found, wanted, size(instance)))
    if all(row.batch > 1 for row in findings.rows):  # expectations over batches take long: one batch tells as much
        with suppress(KltestError):
            off = max(off, _off_in_one_batch(findings, usual_batch(findings), torch.float32))
    return off


def _off_in_one_batch(
    findings: Findings,
    batch: Rollout,
    kind: torch.dtype,
    narrow: str = "",
    surroundings: Surroundings | None = None,
) -> float:
    """Distance of the gradient of one batch from that in float64 on the same numbers, relative to it.

    If it is more than is allowed in a `narrow` dtype, tokens do not count whose gradient jumps within the rounding: as
    the sign of π − ref in total variation, on whose side of a jump a number lies nobody can tell with so few digits.
    """
    batch = batch.replace(**{name: batch.peek(name).detach().to(kind).double() for name in LOG_PROBS})
    # A coefficient is set to one: the KL part is a difference over β, and a small β would magnify rounding.
    beta = 1.0 if findings.loss.takes_beta else None
    in_float64 = findings.measure.experiment(beta=beta)
    exact = in_float64.call(batch)
    if not any(part.any() for part in exact.gradients.values()):
        return 0.0
    rounded = findings.measure.experiment(kind, beta=beta)
    if surroundings:
        rounded.loss = rounded.loss.within(surroundings)
    found = rounded.call(batch.replace())
    off = _relative_error(exact, found, exact.live)
    if narrow and math.isfinite(off) and off > (TOLERANCES[narrow].narrow or 0.0):
        off = _relative_error(exact, found, exact.live & ~_jumps(in_float64, batch, exact, narrow))
    return off


def _jumps(experiment: LossExperiment, batch: Rollout, exact: CallResult, name: str) -> Tensor:
    """(B, T) bool, True if the gradient in float64 jumps when log-probs move by their rounding."""
    generator = torch.Generator().manual_seed(0)
    jumped = torch.zeros_like(exact.live)
    for _ in range(MOVES):
        moved = {}
        for field in LOG_PROBS:
            log = batch.peek(field).detach()
            signs = 2.0 * torch.randint(2, log.shape, generator=generator) - 1
            # For a likely token it is the probability that is rounded, to 2⁻ᵇ of it.
            moved[field] = (log + signs * log.abs().clamp(min=1.0) * 2.0 ** -DIGITS[name]).clamp(max=0.0)
        for leaf, part in experiment.call(batch.replace(**moved)).gradients.items():
            before = exact.gradients.get(leaf, torch.zeros_like(part)).reshape(*jumped.shape, -1)
            change = part.reshape(*jumped.shape, -1) - before
            jumped |= change.norm(dim=-1) > JUMP * before.norm(dim=-1)
    return jumped


def _relative_error(exact: CallResult, found: CallResult, positions: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ of all leaves over some positions (B, T) bool; 0 if both are zero."""
    wanted, other = exact.at(positions), found.at(positions)
    gaps = [other.get(name, torch.zeros_like(part)) - part for name, part in wanted.items()]
    off, size = (math.sqrt(sum(float(part.square().sum()) for part in parts)) for parts in (gaps, wanted.values()))
    return off / size if size else 0.0


def in_bfloat16(logp, ref_logp, mask):
    log_ratio = logp.bfloat16() - ref_logp.bfloat16()
    return log_ratio.where(mask != 0, 0.0).sum(-1).square() / 2
