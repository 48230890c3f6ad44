"""Work spread over this process, processes of this machine, or a cluster, with the same results."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kltest.errors import KltestError, UsageError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

# If more seconds of work than this are left, processes are worth their start, in which each imports torch.
WORTH_PROCESSES = 6.0
SECONDS_TO_ANSWER = 10


def spread(
    work: Callable[[Batch], Result], batches: Sequence[Batch], *, workers: int | None = None, cluster: str | None = None
) -> Iterator[Result]:
    """Yield the result of each batch, in the order in which they are finished; options and errors as for `run`.

    Without `workers`, work begins in this process and goes over to a process a core if that is worth their start.
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

    options: dict[str, Any] = {"backend": "loky", "inner_max_num_threads": 1}
    if cluster:
        options = {"backend": "dask", "client": connect(cluster), "wait_for_workers_timeout": SECONDS_TO_ANSWER}
    parent = None if cluster else os.getpid()
    with joblib.parallel_config(**options):
        parallel = joblib.Parallel(n_jobs=-1 if cluster else workers, return_as="generator_unordered")
        try:
            yield from parallel(joblib.delayed(_job)(work, parent, batch) for batch in batches)
        except TerminatedWorkerError as error:
            raise KltestError(
                "a worker process was killed, perhaps for want of memory. What was finished is kept; run the same "
                "command again, it goes on from there"
            ) from error


def _job(work: Callable[[Batch], Result], parent: int | None, batch: Batch) -> Result:
    """Call the work in one thread of a process that ends with its parent."""
    _one_thread()
    if parent is not None:
        _follow(parent)
    return work(batch)


def _one_thread() -> None:
    """Use one thread, so that sums are the same to the last bit in every process."""
    # The environment reaches libraries that are imported later; torch may have been imported.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@functools.cache
def _follow(parent: int) -> None:
    """End this process when its parent ends, even if that is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@functools.cache
def connect(address: str) -> Any:
    """Return the client of a Dask scheduler, one a process; UsageError without Dask or an answer."""
    try:
        from dask.distributed import Client
    except ImportError as error:
        raise UsageError("--cluster needs Dask; in a checkout: python -m pip install -e '.[cluster]'") from error
    try:
        client = Client(address, timeout=SECONDS_TO_ANSWER)
        if not client.scheduler_info()["workers"]:
            client.wait_for_workers(1, timeout=SECONDS_TO_ANSWER)
    except (OSError, TimeoutError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"--cluster {address}: no Dask scheduler with workers answers there ({reason}). Start one with "
            "`dask scheduler`, and `dask worker ADDRESS` where kltest is installed and this checkout has the same path"
        ) from error
    return client
