"""KL510: the KL part of the gradient is not proportional to the coefficient."""

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from kltest.checks.batches import (
    GroupFixture,
    as_array,
    gradient_of,
    group_fixture,
    limit,
    nearest_multiple,
    norm,
    usual_batch,
)
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row, proportion, shared
from kltest.identify.measure import Measure
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout, elsewhere

# Multiples of β. In low precision ℓ(β) − ℓ(0) over a small β is rounding.
FACTORS = {"float64": (0.001, 0.1, 0.5, 1.0, 2.0)}
FEW_FACTORS = (0.5, 1.0, 2.0)
NOTHING = 1e-12
# β over two orders of magnitude, above what is commonly added to a standard deviation.
OVER = (0.02, 0.2, 2.0)
# Relative difference: a constant in the denominator leaves a few per cent of a coefficient that cancels.
ALIKE = 0.1

Kind = Literal["proportional", "ignored", "cancels", "other"]


class Coefficient(NamedTuple):
    """Effect of β; `strength[β]` is the size of the KL part of the gradient over its size at the β of the grading."""

    kind: Kind
    strength: dict[float, float]


def moot(findings: Findings) -> str | None:
    """Return a reason to skip checks of the coefficient if the loss takes none, else None."""
    return None if findings.loss.takes_beta else "the loss takes no coefficient"


@shared
def coefficient(findings: Findings) -> Coefficient:
    """Classify how the KL part of the gradient depends on β, in one group of rollouts under a current sampler.

    β cancels if it does not change the gradient of a group of equal rewards, and changes that of other groups.
    """
    measure = findings.measure
    fixture, dtype = group_fixture(findings), findings.observed.dtype
    untied = fixture.rollout(fixture.different, fixture.untied)
    base = measure.loss.beta(untied)
    parts, moves = {}, False
    for factor in FACTORS.get(dtype, FEW_FACTORS):
        parts[factor * base], value = _push(measure, untied, factor * base)
        moves |= value != 0.0
    own = parts[base]
    strength = {beta: nearest_multiple(part, own) for beta, part in parts.items()}
    if max(map(norm, parts.values())) <= NOTHING:
        # A gate may be closed in this group, and a penalty on the way from the sampler is zero at the sampler.
        stale = replace(fixture, sampler="stale").rollout(fixture.different, fixture.untied)
        reached = any(findings.observed.reached) or norm(_push(measure, stale, base)[0]) > NOTHING
        return Coefficient("proportional" if moves or reached else "ignored", strength)
    shares = [(part, beta / base * own) for beta, part in parts.items()]
    allowed = TOLERANCES[dtype].proportional
    if all(norm(part - share) <= allowed * norm(share) for part, share in shares):
        return Coefficient("proportional", strength)
    tied = _same_for_all(measure, fixture, [1.0] * fixture.size)
    cancels = tied and not _same_for_all(measure, fixture, fixture.untied)
    return Coefficient("cancels" if cancels else "other", strength)


def _same_for_all(measure: Measure, fixture: GroupFixture, rewards: list[float]) -> bool:
    rollout = fixture.rollout(fixture.different, rewards)
    pushes = [_push(measure, rollout, beta)[0] for beta in OVER]
    size = max(map(norm, pushes))
    return size > 0 and all(norm(push - pushes[-1]) <= ALIKE * size for push in pushes)


def _push(measure: Measure, rollout: Rollout, beta: float) -> tuple[np.ndarray, float]:
    """(B, T, 1 + V) contribution of β to the gradient, β times the KL part, and its contribution to the value."""
    found = measure.differentiate(rollout, beta)
    return beta * as_array(found, rollout), beta * float(found.outcome.objective.detach())


def explains(row: Row, findings: Findings) -> bool | str:
    """Return True, or a few words, if the gradient is that of a coefficient which is ignored or not a factor."""
    kind = coefficient(findings).kind
    if kind == "ignored":
        return row.identified in (None, {"zero": 1.0}) and "the loss at β is the loss without it"
    return kind == "other" and (row.identified is None or proportion(row.identified, row.expected) is not None)


def examine(findings: Findings) -> Found | None:
    """Report a coefficient that changes nothing, that the KL part is not proportional to, or beside which one stays."""
    found = coefficient(findings)
    if found.kind not in ("ignored", "other"):
        return _without(findings) if found.kind == "proportional" else None
    if found.kind == "ignored":
        return Found("The loss takes a coefficient, and neither its value nor its gradient changes with it.")
    words = ", ".join(f"{strength:.4g} at β = {beta:g}" for beta, strength in found.strength.items())
    return Found(f"What β adds to the gradient, as a multiple of what it adds at the β of this grading: {words}.")


def _without(findings: Findings) -> Found | None:
    """Warn of what still moves with the reference at β = 0: what β multiplies was graded, and that was not.

    It may be meant, as a gate or another term is.
    """
    part = findings.loss.for_experiments()
    batch = usual_batch(findings)
    others = batch.replace(**{name: elsewhere(batch.peek(name).detach()) for name in ("ref_logp", "ref_logits")})
    # Over β: all of the loss, less what β adds.
    whole = part.changed(less="")
    rest, moved = (gradient_of(whole, one) - gradient_of(part, one) for one in (batch, others))
    size = max(norm(rest), norm(gradient_of(part, batch)))
    if (off := norm(moved - rest) / (size or 1.0)) <= limit(findings):
        return None
    return Found(
        f"At β = 0 its gradient still moves with the reference, by {off:.2g} of its size: another "
        "term has one, or a gate. What was graded is what β multiplies.",
        level="warning",
    )


def squared_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (kl_coef * log_ratio).square() / 2


def plain_coefficient(logp, ref_logp, mask, kl_coef):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return kl_coef * log_ratio.square() / 2
