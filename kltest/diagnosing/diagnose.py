"""`kltest.diagnose`: what logged log-probs show, without any model."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kltest.diagnosing import questions, rewards  # register their questions, in the order of the report
from kltest.diagnosing.answers import FINDING, INCONCLUSIVE, NOT_LOOKED_AT, NOTHING, QUESTIONS
from kltest.diagnosing.intervals import LEAST, MOST_INTERVALS, Units
from kltest.diagnosing.logs import Logs, read
from kltest.diagnosing.report import Diagnosis
from kltest.errors import UsageError
from kltest.version import versions

__all__ = ["diagnose", "diagnosed", "questions", "rewards"]


def diagnose(
    source: Any,
    *,
    names: Mapping[str, str] | None = None,
    error_rate: float = 0.01,
    strict: bool = False,
    beta: float | None = None,
) -> Diagnosis:
    """Report what logs of rollouts show of sampler, engine, reference, masks and penalty, without any model.

    Args:
        source: A file (.jsonl, .json, .parquet, .pt), or a list of rollouts or batches: mappings of numbers, lists,
            arrays or tensors, by the names that trainers use.
        names: Names of columns by field, for those that the usual names do not find; an empty one leaves a field out.
        error_rate: Highest probability that any interval of the report misses.
        strict: Questions that are not looked at make the verdict inconclusive.
        beta: Coefficient of the KL term that was trained with: with rewards it tells how far the optimum is.

    Returns:
        A Diagnosis: `verdict`, `answers`, `to_text()`, `to_json()`.

    Raises:
        UsageError: The source cannot be read, or its columns cannot be used.
        NoRolloutsError: It holds no rollout.
    """
    return diagnosed(source, names, error_rate, strict=strict, beta=beta)[0]


def diagnosed(
    source: Any, names: Mapping[str, str] | None, error_rate: float, *, strict: bool, beta: float | None = None
) -> tuple[Diagnosis, Logs]:
    """Return a diagnosis, and the logs that were read."""
    if not 0 < error_rate < 1:
        raise UsageError(f"the error rate is a number between 0 and 1; it is {error_rate:g}")
    if beta is not None and not 0 < beta < math.inf:
        raise UsageError(f"the coefficient β of the KL term is a positive number; it is {beta:g}")
    began, logs = time.monotonic(), replace(read(source, names), beta=beta)
    units = Units(logs.group, error_rate / MOST_INTERVALS)
    answers = [asked(logs, units) for asked in QUESTIONS.values()]
    found, unit = {one.status for one in answers}, "prompt" if "group" in logs.columns else "rollout"
    undecided = INCONCLUSIVE in found or found == {NOT_LOOKED_AT} or (strict and NOT_LOOKED_AT in found)
    if len(units) < LEAST:
        logs.notes.append(f"Fewer than {LEAST} {unit}s: there are no intervals, and what needs one is not decided.")
    diagnosis = Diagnosis(
        source=str(source) if isinstance(source, str | Path) else "logs",
        verdict=FINDING if FINDING in found else INCONCLUSIVE if undecided else NOTHING,
        error_rate=error_rate,
        unit=unit,
        units=len(units),
        rollouts=len(logs),
        tokens=int(logs.live.sum()),
        columns=logs.names,
        unread=logs.unread,
        answers=answers,
        notes=logs.notes,
        versions=versions(),
        seconds=time.monotonic() - began,
    )
    return diagnosis, logs
