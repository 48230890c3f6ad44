"""Cost of a sweep beside its work: the store, flushed to the disk for every batch, and the progress on the way."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.environments import loss
from benchmarks.measure import Row, compare
from kltest.environments import Instance, sequence
from kltest.moments import exact
from kltest.sweeps.run import Batching, Compute, Configuration, run
from kltest.sweeps.store import Store

CONFIGURATIONS = [{"seed": seed} for seed in range(60)]


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    return [
        compare(
            "a sweep with its store and progress / the work alone",
            f"60 exact moments of 6,561 rollouts, {size} to a batch",
            partial(swept, compute, CONFIGURATIONS, size),
            partial(compute, CONFIGURATIONS),
            bound=1.05,
            floor=1.0,
            rounds=5,
        )
        for size in (1, 10)
    ]


def swept(compute: Compute, configurations: Sequence[Configuration], size: int, workers: int = 1) -> list[list[dict]]:
    """Compute configurations as `kltest run` does, in batches of a size, and return the rows of each."""
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "runs.jsonl", "1") as store:
        assert not run(
            compute, configurations, store, label="sweep", batching=Batching(("seed",), size), workers=workers
        )
        return [store.result(one) for one in configurations]


def compute(batch: Sequence[Configuration]) -> list[list[dict]]:
    found = [exact(loss("k2-loss-sequence"), Instance.draw(sequence(3, 8), one["seed"])) for one in batch]
    return [[{"variance": one.variance, "gradient": one.gradient[:40].tolist()}] for one in found]
