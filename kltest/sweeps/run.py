"""Runs of the configurations that a store does not have yet; one that fails does not stop the others.

Work is spread over this process, processes of this machine, or a cluster, with the same results.
"""

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import joblib
from joblib.externals.loky.process_executor import TerminatedWorkerError

from kltest.errors import KltestError, UsageError
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Failure, Result, Row, Store

Configuration = Mapping[str, Any]
Compute = Callable[[Sequence[Configuration]], list[list[Row]]]
Batch = TypeVar("Batch")
Done = TypeVar("Done")

# If more seconds of work than this are left, processes are worth their start, in which each imports torch.
WORTH_PROCESSES = 6.0
SECONDS_TO_ANSWER = 10


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


def spread(
    work: Callable[[Batch], Done], batches: Sequence[Batch], *, workers: int | None = None, cluster: str | None = None
) -> Iterator[Done]:
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
        yield from _on_cluster(work, left, cluster) if cluster else _in_processes(work, left, workers or cores)


def _on_cluster(work: Callable[[Batch], Done], batches: Sequence[Batch], address: str) -> Iterator[Done]:
    # Not by joblib's own Dask backend: if a cluster has a single thread, that computes in this process without a word.
    from dask.distributed import as_completed

    client = connect(address)
    futures = client.map(partial(_job, work, None), batches, pure=False)
    try:
        for future in as_completed(futures):
            yield future.result()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise KltestError(
            f"--cluster {address}: a task cannot be run there ({reason}). Scheduler and workers need all that this "
            "process imports: kltest, and this checkout at the same path. What was finished is kept"
        ) from error
    finally:
        client.cancel(futures)


def _in_processes(work: Callable[[Batch], Done], batches: Sequence[Batch], workers: int) -> Iterator[Done]:
    # loky replaces a worker whose memory has grown by 300 MB, and warns. Loading torch is enough; no job is lost.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor")
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        parallel = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
        try:
            yield from parallel(joblib.delayed(_job)(work, os.getpid(), batch) for batch in batches)
        except TerminatedWorkerError as error:
            raise KltestError(
                "a worker process was killed, perhaps for want of memory. What was finished is kept; run the same "
                "command again, it goes on from there"
            ) from error


def _job(work: Callable[[Batch], Done], parent: int | None, batch: Batch) -> Done:
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


@cache
def _follow(parent: int) -> None:
    """End this process when its parent ends, even if that is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@cache
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
