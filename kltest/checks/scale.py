"""Agreement up to scale: a loss without a coefficient may follow the same positive multiple of the declared gradient.

A coefficient that is written into a loss is no defect. One that moves with the length of rollouts, the number of padded
columns or the number of rows is: the multiple is compared over all of these before it counts as a constant.
"""

from contextlib import suppress
from dataclasses import replace
from math import isclose
from typing import Literal

from kltest.checks.batches import (
    apart,
    gradient,
    gradient_of,
    limit,
    nearest_multiple,
    share_by_size,
    single_tokens,
    usual_batch,
)
from kltest.checks.policy.objectives import multiples
from kltest.checks.sequences.larger_batches import groups_apart
from kltest.checks.sequences.lengths import influence
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row, multiple, proportion, shared
from kltest.identify.graded import whole
from kltest.identify.measure import Measure
from kltest.loss.placement import ROW_FIELDS
from kltest.moments.averaged import DTYPE as AVERAGED
from kltest.moments.tolerances import Tolerances
from kltest.names import training_step
from kltest.rollout import Rollout

# One token, three, and up to three.
LENGTHS = ("bandit", "sequence", "ragged")
# Padded columns that are added to a batch: a few, and as many as make it 64 wide, or fewer if the loss refuses that;
# then as many as make it 128 wide, and as wide as batches of trainers are.
COLUMNS = ((3, 2, 1), (61, 29, 13), (125,), (4091, 2045, 1021))
# If each call is a mean over many.
COLUMNS_OF_MANY = (*COLUMNS[:-1], (1021,))
# Training steps at which a coefficient may be what it is called with.
STEPS = (0, 100, 1000, 10**6)


def agree_up_to_scale(findings: Findings) -> None:
    """Let rows agree that follow c times the declared gradient, if c is a positive constant: `findings.scale`.

    What is declared becomes c times as much for all further experiments. Rows stay open if constancy cannot be tried.
    """
    first = [row for row in findings.rows if row.sampler == findings.samplers[0]]
    factor = _common(first)
    fixed = any(coefficient != 1 for coefficient in findings.expect.values())
    if fixed:
        return
    # A small constant in a denominator moves rows off the declared gradient by itself, whatever others follow.
    findings.rows = [_scaled(row, 1.0) if _nearly(row) else row for row in findings.rows]
    if factor is None or abs(factor - 1) < Tolerances.guard / 2:
        return
    try:
        if findings.loss.takes_beta and not _is_of_a_schedule(findings, factor):
            if (alike := _scales_the_rest(findings, factor)) == "no":
                return
            findings.scales_all = alike == "yes"
        if not _constant(findings, factor, first):
            return
    except KltestError as error:
        reason = f"follows {factor:.6g} times the declared gradient; whether that is a constant could not be tried"
        findings.rows = [replace(row, agrees=None, note=f"{reason}: {error}") for row in findings.rows]
        return
    findings.scale = factor
    findings.expect = findings.measure.declared = {name: factor * one for name, one in findings.expect.items()}
    known = findings.observed.rows
    for place, rows in known.items():
        known[place] = [_scaled(row, factor) for row in rows]
    asked = [(environment, sampler) for environment in findings.environments for sampler in findings.samplers]
    findings.rows = [row for place in asked for row in known[place]]


@shared
def widened(findings: Findings) -> tuple[float, int]:
    """Relative change of the gradient at live tokens if padded columns are added to a batch, and how many change it.

    The batch is the usual one, and then one of single tokens without a padded column, if the loss takes that.
    """
    moved, columns = _widened(usual_batch(findings), findings)
    if moved <= limit(findings):
        with suppress(KltestError):
            moved, columns = _widened(single_tokens(findings), findings)
    return moved, columns


def _widened(narrow: Rollout, findings: Findings) -> tuple[float, int]:
    before = gradient(findings.measure, narrow)
    moved, added = 0.0, 0
    failure: KltestError | None = None
    for several in COLUMNS if findings.observed.dtype != AVERAGED else COLUMNS_OF_MANY:
        for columns in several:
            try:
                after = gradient(findings.measure, narrow.wider(columns, findings.seed))[:, : before.shape[1]]
            except KltestError as error:
                failure = error
                continue
            moved, added = apart(after, before), columns
            break
        if moved > limit(findings):
            break
    if not added and failure:
        raise failure
    return moved, added


def _nearly(row: Row) -> bool:
    factor = _factor(row)
    return factor is not None and abs(factor - 1) < Tolerances.guard / 2


def _common(rows: list[Row]) -> float | None:
    """The factor of all rows, None if they differ or one of them follows something else."""
    factors = [_factor(row) for row in rows]
    same = (factor and isclose(factor, factors[0] or 0, rel_tol=Tolerances.guard) for factor in factors)
    return factors[0] if factors and all(same) else None


def _factor(row: Row) -> float | None:
    """The c > 0 of a row that follows c times the declared gradient, or c times its form with the prefixes fixed."""
    found = multiple(row) if row.method == "exact" else None
    return found if found is not None and found > 0 else None


def _is_of_a_schedule(findings: Findings, factor: float) -> bool:
    """Return True if the factor is 1 at another training step: the coefficient falls or rises."""
    batch, loss = usual_batch(findings), findings.measure.experiment().loss
    usual = gradient_of(loss, batch)
    for name in (name for name in loss.arguments.stated if training_step(name) is not None):
        for step in STEPS:
            changed = gradient_of(loss.with_value(name, step), batch)
            share = nearest_multiple(changed, usual)
            same = apart(changed, share * usual) <= limit(findings)
            if same and isclose(factor * share, 1, rel_tol=Tolerances.guard):
                return True
    return False


def _scales_the_rest(findings: Findings, factor: float) -> Literal["yes", "no", "unknown"]:
    """Tell if the factor of a KL term with a coefficient is that of the policy term as well, the gradient at β = 0.

    That is −a·∇E[R], a > 0. The factor is to be a; or a·n/(n − 1), if advantages of a group of n are centred by a mean
    that contains them. With advantages that are divided by their deviation, a depends on the rewards and is unknown.
    """
    uses, sizes, seed = findings.observed.uses, findings.measure.sizes, findings.seed
    if findings.placement != "loss" or not uses & ROW_FIELDS:
        return "no"
    rest = Measure(whole(findings.loss), {"expected_reward": -1.0}, uses, seed=seed, sizes=sizes)
    row = rest.rows(findings.environments[0], "current")[-1]
    shares = [-share for _, share in multiples(row, findings) or ()]
    if not shares or min(shares) <= 0:
        return "no"
    if not all(isclose(share, shares[0], rel_tol=Tolerances.guard) for share in shares):
        return "unknown"
    own = shares[0], shares[0] / (1 - 1 / row.batch) if row.batch > 1 else shares[0]
    return "yes" if any(isclose(factor, share, rel_tol=Tolerances.guard) for share in own) else "no"


def _constant(findings: Findings, factor: float, rows: list[Row]) -> bool:
    """True if the factor is the same at other lengths, with other padded columns and in batches of other sizes."""
    lengths = [row for name in LENGTHS for row in findings.measure.rows(name, findings.samplers[0])]
    same = _common(lengths)
    if same is None or not isclose(same, factor, rel_tol=Tolerances.guard) or widened(findings)[0] > limit(findings):
        return False
    return not findings.observed.coupled or _at_other_sizes(findings, factor, rows)


def _at_other_sizes(findings: Findings, factor: float, rows: list[Row]) -> bool:
    """True if the factor is the same in batches of other sizes."""
    row = max(rows, key=lambda row: row.batch)
    shares = share_by_size(row, findings).values()
    if not shares and findings.measure.sizes.grouped:
        # It takes groups of one size, but of any number. A baseline with other rollouts' costs moves with their size.
        return groups_apart(findings, [row.batch] * 2) and not influence(findings).log_ratios
    return bool(shares) and all(isclose(share, factor, rel_tol=Tolerances.factor) for share in shares)


def _scaled(row: Row, factor: float) -> Row:
    expected = {name: factor * coefficient for name, coefficient in row.expected.items()}
    if row.agrees is None:
        return replace(row, expected=expected)
    whole = proportion(row.identified, expected)
    agrees = whole is not None and isclose(whole, 1.0, rel_tol=Tolerances.guard)
    return replace(row, expected=expected, agrees=agrees or row.agrees, scale=factor if agrees else None)
