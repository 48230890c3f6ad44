"""Cost of a sweep beside its work: the store, flushed to the disk for every batch, and the progress on the way."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Row, compare
from kltest.environments import Instance, sequence
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.sweeps.run import Batching, Configuration, run
from kltest.sweeps.store import Store

CONFIGURATIONS = [{"seed": seed} for seed in range(60)]


def main() -> list[Row]:
    rows = [_row(size) for size in (1, 10)]
    return rows


def _row(size: int) -> Row:
    loss = resolve("k2-loss-sequence", Call())

    def compute(batch: Sequence[Configuration]) -> list[list[dict]]:
        return [_rows(loss, one["seed"]) for one in batch]

    def bare() -> None:
        for one in CONFIGURATIONS:
            compute([one])

    def swept() -> None:
        with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "runs.jsonl", "1") as store:
            run(compute, CONFIGURATIONS, store, label="sweep", batching=Batching(("seed",), size), workers=1)

    return compare(
        "a sweep with its store and progress / the work alone",
        f"60 exact moments of 6,561 rollouts, {size} to a batch",
        swept,
        bare,
        bound=1.05,
        floor=1.0,
        rounds=5,
    )


def _rows(loss, seed: int) -> list[dict]:
    moments = exact(loss, Instance.draw(sequence(3, 8), seed))
    return [{"seed": seed, "variance": moments.variance, "gradient": moments.gradient[:40].tolist()}]
