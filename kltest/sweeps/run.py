"""Runs the configurations that a store does not have yet; one that fails does not stop the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kltest.errors import KltestError
from kltest.sweeps.progress import Progress
from kltest.sweeps.spread import spread
from kltest.sweeps.store import Failure, Row, Store

Configuration = Mapping[str, Any]
Compute = Callable[[Sequence[Configuration]], list[list[Row]]]
Result = list[Row] | Failure


@dataclass(frozen=True)
class Batching:
    """Which configurations are computed in one call: those that differ in `names` alone, at most `size` of them."""

    names: tuple[str, ...] = ()
    size: int = 1

    def batches(self, configurations: Iterable[Configuration]) -> list[list[Configuration]]:
        """The configurations in order, those that belong together side by side."""
        groups: dict[str, list[Configuration]] = {}
        for configuration in configurations:
            rest = {name: value for name, value in configuration.items() if name not in self.names}
            groups.setdefault(repr(sorted(rest.items())), []).append(configuration)
        return [group[at : at + self.size] for group in groups.values() for at in range(0, len(group), self.size)]


def title(configuration: Configuration) -> str:
    """A configuration in a few words: its values, in order, but for fingerprints (names that start with _)."""
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
    """Fill the store; what it has already is not computed again. Returns the configurations that failed.

    `compute` gives the rows of each configuration of a batch; they may depend neither on the rest of the batch nor on
    where and when it is computed. A failure is kept as well, and tried again with `retry_failed`. KeyboardInterrupt
    leaves everything finished in the store. `workers`: processes to spread over (default: as many as there are cores
    and work for them); `cluster`: the address of a Dask scheduler to use instead. `compute` must be picklable then.
    Raises KltestError if a worker process is killed, UsageError if the cluster does not answer.
    """
    missing = [one for one in configurations if _wanted(store.result(one), retry_failed)]
    batches = batching.batches(missing)
    with Progress(label, len(configurations), done=len(configurations) - len(missing)) as progress:
        for results in spread(Attempt(compute), batches, workers=workers, cluster=cluster):
            store.add(results)
            progress.advance(title(results[-1][0]), by=len(results))
    found = [store.result(configuration) for configuration in configurations]
    return [result for result in found if isinstance(result, Failure)]


def _wanted(result: Result | None, retry_failed: bool) -> bool:
    return result is None or (retry_failed and isinstance(result, Failure))


@dataclass(frozen=True)
class Attempt:
    """Computes a batch; where that fails, its configurations one by one, so that only those fail that must."""

    compute: Compute

    def __call__(self, batch: Sequence[Configuration]) -> list[tuple[Configuration, Result]]:
        try:
            rows = self.compute(batch)
            if len(rows) != len(batch):
                raise KltestError(f"{len(batch)} configurations were asked for and {len(rows)} were computed")
            return list(zip(batch, rows, strict=True))
        except Exception as error:
            if len(batch) > 1:
                return [result for configuration in batch for result in self([configuration])]
            reason = str(error) if isinstance(error, KltestError) else f"{type(error).__name__}: {error}"
            return [(batch[0], Failure(batch[0], reason, traceback.format_exc()))]
