"""Runs the configurations that a store does not have yet; one that fails does not stop the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kltest.errors import KltestError
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Row, Store

Configuration = Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A configuration that gave no rows, why, and where (the last lines of the traceback)."""

    configuration: Configuration
    reason: str
    traceback: str

    @property
    def title(self) -> str:
        return title(self.configuration)


def title(configuration: Configuration) -> str:
    """A configuration in a few words: its values, in order."""
    return "/".join(str(value) for value in configuration.values())


def run(
    compute: Callable[[Configuration], list[Row]],
    configurations: Sequence[Configuration],
    store: Store,
    *,
    label: str,
) -> list[Failure]:
    """Fill the store; what it has already is not computed again. Returns the configurations that failed.

    A failure is not kept: the next run tries it again. KeyboardInterrupt leaves everything finished in the store.
    """
    missing = [configuration for configuration in configurations if store.rows(configuration) is None]
    failures: list[Failure] = []
    if not missing:
        return failures
    with Progress(label, len(configurations), done=len(configurations) - len(missing)) as progress:
        for configuration in missing:
            try:
                rows = compute(configuration)
            except Exception as error:
                failures.append(Failure(configuration, _reason(error), traceback.format_exc()))
            else:
                store.add(configuration, rows)
            progress.advance(title(configuration))
    return failures


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, KltestError) else f"{type(error).__name__}: {error}"
