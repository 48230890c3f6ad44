"""Runs of the configurations that a store does not have yet; one that fails does not stop the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kltest.errors import KltestError
from kltest.sweeps.progress import Progress
from kltest.sweeps.spread import spread
from kltest.sweeps.store import Failure, Result, Row, Store

Configuration = Mapping[str, Any]
Compute = Callable[[Sequence[Configuration]], list[list[Row]]]


@dataclass(frozen=True)
class Batching:
    """Configurations that differ in `names` alone are computed in one call, at most `size` of them."""

    names: tuple[str, ...] = ()
    size: int = 1

    def batches(self, configurations: Iterable[Configuration]) -> list[list[Configuration]]:
        """Return the configurations in order, those of one batch side by side."""
        groups: dict[str, list[Configuration]] = {}
        for configuration in configurations:
            rest = {name: value for name, value in configuration.items() if name not in self.names}
            groups.setdefault(repr(sorted(rest.items())), []).append(configuration)
        return [group[at : at + self.size] for group in groups.values() for at in range(0, len(group), self.size)]


def title(configuration: Configuration) -> str:
    """Return a configuration's values, in order, without fingerprints (names that start with _)."""
    return "/".join(str(value) for name, value in configuration.items() if not name.startswith("_"))


def run(
    compute: Compute,
    configurations: Sequence[Configuration],
    store: Store,
    *,
    label: str,
    batching: Batching = Batching(),
    workers: int | None = None,
    cluster: str | None = None,
    retry_failed: bool = False,
) -> list[Failure]:
    """Compute the configurations that a store lacks. KeyboardInterrupt leaves everything finished in the store.

    Args:
        compute: Function of a batch that returns the rows of each of its configurations. They may depend neither on
            the rest of the batch nor on where and when it is computed.
        configurations: Configurations to have.
        store: Open store to fill.
        label: Name of the work, for its progress.
        batching: Configurations that are computed in one call.
        workers: Processes to use; None: as many as there are cores and work for them. `compute` must be picklable.
        cluster: Address of a Dask scheduler to use instead.
        retry_failed: True to compute stored failures again.

    Returns:
        The configurations that failed, now or before.

    Raises:
        KltestError: A worker process was killed.
        UsageError: The cluster does not answer.
    """
    again = (Failure, type(None)) if retry_failed else type(None)
    missing = [one for one in configurations if isinstance(store.result(one), again)]
    batches = batching.batches(missing)
    with Progress(label, len(configurations), done=len(configurations) - len(missing)) as progress:
        for results in spread(partial(attempt, compute), batches, workers=workers, cluster=cluster):
            store.add(results)
            progress.advance(title(results[-1][0]), by=len(results))
    found = [store.result(configuration) for configuration in configurations]
    return [result for result in found if isinstance(result, Failure)]


def attempt(compute: Compute, batch: Sequence[Configuration]) -> list[tuple[Configuration, Result]]:
    """Compute a batch; if that fails, its configurations one by one, so that only those fail that must."""
    try:
        rows = compute(batch)
        if len(rows) != len(batch):
            raise KltestError(f"{len(batch)} configurations were asked for and {len(rows)} were computed")
        return list(zip(batch, rows, strict=True))
    except Exception as error:
        if len(batch) > 1:
            return [result for configuration in batch for result in attempt(compute, [configuration])]
        reason = str(error) if isinstance(error, KltestError) else f"{type(error).__name__}: {error}"
        return [(batch[0], Failure(batch[0], reason, traceback.format_exc()))]
