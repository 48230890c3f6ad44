"""Where work is done: here, in processes of this machine, or on a cluster. The results are the same."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from kltest.errors import KltestError, UsageError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

# Seconds of work ahead from which on processes are worth their start (and importing torch in each).
WORTH_PROCESSES = 6.0
SECONDS_TO_ANSWER = 10
# One thread a process: sums come out the same, bit for bit, wherever they are done.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def spread(
    work: Callable[[Batch], Result], batches: Sequence[Batch], *, workers: int | None = None, cluster: str | None = None
) -> Iterator[Result]:
    """The result of each batch, in the order in which they are finished.

    Without `workers` it begins here and goes over to a process a core once it sees that this is worth their start.
    """
    left = list(batches)
    cores = len(os.sched_getaffinity(0))
    if cluster is None and (workers is None or workers == 1):
        _one_thread()
        started = time.monotonic()
        for done, batch in enumerate(batches):
            ahead = (time.monotonic() - started) / max(done, 1) * len(left)
            if workers is None and cores > 1 and len(left) > 1 and ahead > WORTH_PROCESSES:
                break
            left.pop(0)
            yield work(batch)
    if left:
        yield from _in_processes(work, left, workers or cores, cluster)


def _in_processes(
    work: Callable[[Batch], Result], batches: Sequence[Batch], workers: int, cluster: str | None
) -> Iterator[Result]:
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    backend = _local() if cluster is None else _dask(cluster)
    job = joblib.delayed(_Job(work, None if cluster else os.getpid()))
    with backend:
        parallel = joblib.Parallel(n_jobs=-1 if cluster else workers, return_as="generator_unordered")
        try:
            yield from parallel(job(batch) for batch in batches)
        except TerminatedWorkerError as error:
            raise KltestError(
                "a worker process was killed, perhaps for want of memory. What was finished is kept; run the same "
                "command again, it goes on from there"
            ) from error


class _Job:
    """The work, as a process does it: in one thread, and no longer than the process that asked for it lives."""

    def __init__(self, work: Callable[[Any], Any], parent: int | None) -> None:
        self.work, self.parent = work, parent

    def __call__(self, batch: Any) -> Any:
        _one_thread()
        if self.parent is not None:
            _follow(self.parent)
        return self.work(batch)


def _one_thread() -> None:
    # Counts for libraries that are imported later; the one that is asked after its import is torch.
    for name in ONE_THREAD:
        os.environ[name] = "1"
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


_followed: list[int] = []


def _follow(parent: int) -> None:
    """End with the parent, however it ends: nothing that it asked for is of use without it."""
    if parent in _followed:
        return
    _followed.append(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _local() -> AbstractContextManager[Any]:
    import joblib

    return joblib.parallel_config(backend="loky", inner_max_num_threads=1)


def _dask(address: str) -> AbstractContextManager[Any]:
    import joblib

    return joblib.parallel_config(backend="dask", client=connect(address), wait_for_workers_timeout=SECONDS_TO_ANSWER)


@functools.cache
def connect(address: str) -> Any:
    """The client of a Dask scheduler, one a process; UsageError if Dask is not installed or nothing answers."""
    try:
        from dask.distributed import Client
    except ImportError as error:
        raise UsageError("--cluster needs Dask; in a checkout: python -m pip install -e '.[cluster]'") from error
    try:
        client = Client(address, timeout=SECONDS_TO_ANSWER)
        if not client.scheduler_info()["workers"]:
            client.wait_for_workers(1, timeout=SECONDS_TO_ANSWER)
    except (OSError, TimeoutError, ValueError) as error:
        raise UsageError(
            f"--cluster {address}: no Dask scheduler with workers answers there ({_first_line(error)}). Start one with "
            "`dask scheduler`, and `dask worker ADDRESS` where kltest is installed and this checkout has the same path"
        ) from error
    return client


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
