"""KL208: right only for masks without gaps.

Tool output between the turns of a rollout, and several turns, leave masked columns between live tokens, or before the
first one, in each row at others. Such columns are put into a batch, and the two turns of an environment are graded.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from kltest.checks.batches import apart, as_array, limit, of_instance, rows_taken, usual_batch
from kltest.checks.check import Found
from kltest.checks.stress import ROUGHLY, long_instance, right_in_long_rollouts
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import TURNS
from kltest.moments.differentiate import differentiate
from kltest.names import field_named
from kltest.report import Level
from kltest.rollout import Rollout
from kltest.truth import render

# Names that say which tokens exist, whoever wrote them; every other name of a mask says which tokens are the policy's.
OF_EXISTING_TOKENS = frozenset({"attention_mask", "full_attention_mask", "lengths"})

# Masked columns of a batch, by where they are put before its columns: number of live ones before them, and how many.
GAPS = {"a masked column": (1, 1), "three masked columns": (1, 3), "two masked columns": (0, 2)}
# Masked columns that stand elsewhere in each row: before its first token, or after one, two or three.
SCATTERED = 2
# Turns of longer rollouts, as an agent's: how many, live tokens of each, and masked columns after each, as tool output.
# No more columns than rollouts without gaps are tried with.
TURNS_AND_GAPS = ((16, 1, 3), (4, 2, 14))

# Rounding and small constants move all rows; the difference of two turns is larger.
OFF = 0.01


def moot(findings: Findings) -> str | None:
    """Return the reason to skip the check if the loss reads no mask."""
    return None if "mask" in findings.observed.uses else "it reads no mask"


def examine(findings: Findings) -> Found | None:
    """Put masked columns into a batch, then grade rollouts of two turns, if it is right without gaps."""
    if not findings.agree:
        return None
    moved = _moved(findings)
    words = moved or _in_turns(findings)
    return Found(words, level=_level(findings)) if words else None


def _level(findings: Findings) -> Level:
    names = {name for name in findings.loss.arguments.fillings if name == "lengths" or field_named(name) == "mask"}
    return "warning" if names and names <= OF_EXISTING_TOKENS else "error"


def _moved(findings: Findings) -> str:
    """Describe the first gap that matters; batches that the loss refuses for their width are passed over."""
    for words, batch, places in _with_gaps(findings):
        try:
            off = _off_by(findings, batch, places)
        except KltestError:
            if not findings.reach.holes:
                raise
            continue
        findings.reach.holes = True
        if off > limit(findings):
            return (
                f"With {words} the gradient differs by {off:.3g} of its size from that with the same behind "
                "them: what stands there counts, or a live token after it does not."
            )
    return ""


def _with_gaps(findings: Findings) -> Iterator[tuple[str, Rollout, np.ndarray]]:
    """Yield gaps in words, a batch with as many masked columns behind its others, and the order that makes the gaps.

    The order is of the columns of all rows, or (B, T) of each one's own. What a row is compared with in its column, as
    a baseline of a loss that couples rows, stays there.
    """
    for gap, (before, many) in GAPS.items():
        batch = usual_batch(findings).wider(many, findings.seed)
        where = "between live tokens" if before else "before the first token"
        yield f"{gap} {where}", batch, _gap(batch, before, many)
    if all(row.batch == 1 for row in findings.rows):
        batch = usual_batch(findings).wider(SCATTERED, findings.seed)
        rows, columns = batch.peek("mask").shape
        each = [_gap(batch, row % (columns - SCATTERED + 1), SCATTERED) for row in range(rows)]
        yield f"{SCATTERED} masked columns, at another place in each row,", batch, np.stack(each)
    with suppress(KltestError):
        if right_in_long_rollouts(findings):
            yield from _many_turns(findings)


def _gap(batch: Rollout, before: int, many: int) -> np.ndarray:
    """Return the order of columns in which the last `many` come after as many as stand `before` them."""
    columns = np.arange(batch.peek("mask").shape[1])
    return np.concatenate([columns[:before], columns[-many:], columns[before:-many]])


def _many_turns(findings: Findings) -> Iterator[tuple[str, Rollout, np.ndarray]]:
    for turns, tokens, gap in TURNS_AND_GAPS:
        instance = long_instance(1, findings.seed, turns * tokens)
        batch = of_instance(findings, instance)
        live = np.arange(turns * tokens).reshape(turns, tokens)
        masked = live.size + np.arange(turns * gap).reshape(turns, gap)
        words = f"{gap} masked columns after each of {turns} turns"
        places = np.concatenate([live, masked], axis=1).ravel()
        yield words, batch.take(range(rows_taken(findings))).wider(masked.size, findings.seed), places


def _off_by(findings: Findings, batch: Rollout, places: np.ndarray) -> float:
    own = np.arange(len(batch))[:, None], np.broadcast_to(places, (len(batch), places.shape[-1])).copy()
    fields = {name: batch.peek(name).detach() for name in batch}
    second = batch.replace(**{name: field[own] for name, field in fields.items() if field.dim() > 1})
    expected, found = (as_array(differentiate(findings.loss, one, None), one) for one in (batch, second))
    return apart(found, expected[own])


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
