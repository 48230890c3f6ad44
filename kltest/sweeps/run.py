"""Runs the configurations that a store does not have yet; one that fails does not stop the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from kltest.errors import KltestError
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Row, Store

Configuration = Mapping[str, Any]
Compute = Callable[[Configuration], list[Row]]

# Below this many configurations a process, starting it (and importing torch there) costs more than it saves.
WORTH_A_PROCESS = 8


@dataclass(frozen=True)
class Failure:
    """A configuration that gave no rows, why, and where (the traceback)."""

    configuration: Configuration
    reason: str
    traceback: str

    @property
    def title(self) -> str:
        return title(self.configuration)


def title(configuration: Configuration) -> str:
    """A configuration in a few words: its values, in order, but for fingerprints (names that start with _)."""
    return "/".join(str(value) for name, value in configuration.items() if not name.startswith("_"))


def run(
    compute: Compute,
    configurations: Sequence[Configuration],
    store: Store,
    *,
    label: str,
    workers: int | None = None,
) -> list[Failure]:
    """Fill the store; what it has already is not computed again. Returns the configurations that failed.

    A failure is not kept: the next run tries it again. KeyboardInterrupt leaves everything finished in the store.
    `workers`: processes to spread over (default: as many as there are cores and work for them); `compute` must be
    picklable then. Each configuration is computed on its own, so the results do not depend on their number.
    Raises KltestError if a worker process is killed.
    """
    missing = [configuration for configuration in configurations if store.rows(configuration) is None]
    failures: list[Failure] = []
    if not missing:
        return failures
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), len(missing) // WORTH_A_PROCESS)
    results = _in_processes(compute, missing, workers) if workers > 1 else _here(compute, missing)
    with Progress(label, len(configurations), done=len(configurations) - len(missing)) as progress:
        for configuration, result in results:
            if isinstance(result, Failure):
                failures.append(result)
            else:
                store.add(configuration, result)
            progress.advance(title(configuration))
    return failures


Results = Iterator[tuple[Configuration, list[Row] | Failure]]


def _here(compute: Compute, configurations: Sequence[Configuration]) -> Results:
    for configuration in configurations:
        yield configuration, _attempt(compute, configuration)


def _in_processes(compute: Compute, configurations: Sequence[Configuration], workers: int) -> Results:
    # Started afresh, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        pending = {executor.submit(_attempt, compute, configuration): configuration for configuration in configurations}
        for future in as_completed(pending):
            yield pending[future], future.result()
    except BrokenProcessPool as error:
        raise KltestError(
            "a worker process was killed, perhaps for want of memory. What was finished is kept; run the same command "
            "again, it goes on from there"
        ) from error
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    executor.shutdown()


def _start_worker() -> None:
    """An interrupt is the parent's to handle; a parent that is killed takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"  # one core a worker; counts when torch is imported, which comes later
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _attempt(compute: Compute, configuration: Configuration) -> list[Row] | Failure:
    try:
        return compute(configuration)
    except Exception as error:
        reason = str(error) if isinstance(error, KltestError) else f"{type(error).__name__}: {error}"
        return Failure(configuration, reason, traceback.format_exc())
