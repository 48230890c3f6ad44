"""KL208: right only for masks without gaps.

Tool output between the turns of a rollout, and several turns, leave masked columns between live tokens, or before the
first one. Such columns are put into a batch, and the two turns of an environment are graded.
"""

import torch

from kltest.checks.batches import apart, as_array, limit, usual_batch
from kltest.checks.check import Found
from kltest.checks.stress import ROUGHLY
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import TURNS
from kltest.moments.differentiate import differentiate
from kltest.names import field_named
from kltest.report import Level
from kltest.truth import render

# Names that say which tokens exist, whoever wrote them; every other name of a mask says which tokens are the policy's.
OF_EXISTING_TOKENS = frozenset({"attention_mask", "full_attention_mask", "lengths"})

# Masked columns of a batch, by where they are put before its columns: number of live ones before them, and how many.
GAPS = {"a masked column": (1, 1), "three masked columns": (1, 3), "two masked columns": (0, 2)}

# Rounding and small constants move all rows; the difference of two turns is larger.
OFF = 0.01


def moot(findings: Findings) -> str | None:
    """Return the reason to skip the check if the loss reads no mask."""
    return None if "mask" in findings.observed.uses else "it reads no mask"


def examine(findings: Findings) -> Found | None:
    """Put masked columns into a batch, then grade rollouts of two turns, if it is right without gaps."""
    if not findings.rows or any(row.agrees is not True for row in findings.rows):
        return None
    moved = _moved(findings)
    words = moved or _in_turns(findings)
    return Found(words, level=_level(findings)) if words else None


def _level(findings: Findings) -> Level:
    names = {name for name in findings.loss.arguments.fillings if name == "lengths" or field_named(name) == "mask"}
    return "warning" if names and names <= OF_EXISTING_TOKENS else "error"


def _moved(findings: Findings) -> str:
    """Describe the first gap that matters; batches that the loss refuses for their width are passed over."""
    for gap, (before, many) in GAPS.items():
        try:
            off = _off_by(findings, before, many)
        except KltestError:
            if not findings.reach.holes:
                raise
            continue
        findings.reach.holes = True
        if off > limit(findings):
            where = "between live tokens" if before else "before the first token"
            return (
                f"With {gap} {where} the gradient differs by {off:.3g} of its size from that with the same behind "
                "them: what stands there counts, or a live token after it does not."
            )
    return ""


def _off_by(findings: Findings, before: int, many: int) -> float:
    last = usual_batch(findings).wider(many, findings.seed)
    columns = list(range(last.peek("mask").shape[1]))
    places = [*columns[:before], *columns[-many:], *columns[before:-many]]
    fields = {name: last.peek(name).detach() for name in last}
    second = last.replace(**{name: field[:, places] for name, field in fields.items() if field.dim() > 1})
    expected, found = (as_array(differentiate(findings.loss, one, None), one) for one in (last, second))
    return apart(found, expected[:, places])


def _in_turns(findings: Findings) -> str:
    """Describe the first row of two turns that disagrees; those of a loss that cannot be called there say nothing."""
    if TURNS in findings.environments:
        return ""
    for sampler in findings.samplers:
        try:
            rows = _rows_in_turns(findings, sampler)
        except KltestError:
            return ""
        for row in rows:
            if row.wrong and row.relative_bias > OFF:
                follows = "no named gradient" if row.identified is None else render(row.identified)
                return f"In rollouts of two turns with tool output between them ({row.where}) it follows {follows}."
    return ""


def _rows_in_turns(findings: Findings, sampler: str) -> list[Row]:
    """Measure rows; of a loss that draws random numbers with few draws, if these leave no doubt."""
    rough = findings.measure.rough
    rows = rough.rows(TURNS, sampler) if rough else []
    clear = rows and all(row.agrees and row.relative_bias <= ROUGHLY * limit(findings) for row in rows)
    return rows if clear else findings.measure.rows(TURNS, sampler)


def up_to_its_length(logp, ref_logp, mask):
    live = torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True)
    return (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2
