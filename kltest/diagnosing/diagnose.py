"""`kltest.diagnose`: what logged log-probs show, without any model."""

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kltest.diagnosing.answers import Answer
from kltest.diagnosing.intervals import LEAST, Units
from kltest.diagnosing.logs import Logs, read
from kltest.diagnosing.penalty import coefficient
from kltest.diagnosing.questions import OF_LOG_PROBS, columns, unusable
from kltest.diagnosing.report import Diagnosis
from kltest.errors import UsageError
from kltest.version import VERSION

QUESTIONS: tuple[Callable[[Logs, Units], Answer], ...] = (*OF_LOG_PROBS, coefficient)


def diagnose(
    source: Any, *, names: Mapping[str, str] | None = None, error_rate: float = 0.01, strict: bool = False
) -> Diagnosis:
    """Report what logs of rollouts show of sampler, engine, reference, masks and penalty, without any model.

    Args:
        source: A file (.jsonl, .json, .parquet, .pt), or a list of rollouts or batches: mappings of numbers, lists,
            arrays or tensors, by the names that trainers use.
        names: Names of columns by field, for those that the usual names do not find.
        error_rate: Highest probability that any interval of the report misses.
        strict: Questions that are not looked at make the verdict inconclusive.

    Returns:
        A Diagnosis: `verdict`, `answers`, `to_text()`, `to_json()`.

    Raises:
        UsageError: The source cannot be read, or its columns cannot be used.
        NoRolloutsError: It holds no rollout.
    """
    return diagnosed(source, names=names, error_rate=error_rate, strict=strict)[0]


def diagnosed(
    source: Any, *, names: Mapping[str, str] | None = None, error_rate: float = 0.01, strict: bool = False
) -> tuple[Diagnosis, Logs]:
    """Return a diagnosis, and the logs that were read."""
    if not 0 < error_rate < 1:
        raise UsageError(f"the error rate is a number between 0 and 1; it is {error_rate:g}")
    logs = read(source, names)
    began, units = time.monotonic(), Units(logs.group, error_rate)
    usable = logs.without(unusable(logs))
    answers = [columns(logs, units), *(question(usable, units) for question in QUESTIONS)]
    unit = "prompt" if len(units) < len(logs) else "rollout"
    notes = list(logs.notes)
    if len(units) < LEAST:
        notes.append(f"There are no intervals, and nothing that needs one is decided: {unit}s are fewer than {LEAST}.")
    found = Diagnosis(
        source=str(source) if isinstance(source, str | Path) else "logs",
        error_rate=error_rate,
        unit=unit,
        units=len(units),
        rollouts=len(logs),
        tokens=int(logs.live.sum()),
        columns=logs.names,
        unread=logs.unread,
        answers=answers,
        strict=strict,
        notes=notes,
        versions={"kltest": VERSION, "python": platform.python_version()},
        seconds=time.monotonic() - began,
    )
    return found, logs
