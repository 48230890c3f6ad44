"""Rate at which bounds on a distance miss it, by simulation, down to error rates of 1e-4.

    python -m benchmarks.coverage [--tries 10000]    # writes coverage.csv

A grading at 1e-6 uses the same bounds further out. That they hold there is an extrapolation: their tails are those of
normal blocks, and what is measured is that misses stay below the stated rate at each of the rates, for noise of which
512 or 4,096 samples in 64 blocks make blocks that are nearly normal. Of rare noise that is not so: there the distance
is moved by what was not seen, as `kltest grade` does it.
"""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas
import typer
from rich.progress import track

from benchmarks.measure import record
from kltest.samples.blocks import MOST_BLOCKS, Sample
from kltest.samples.fits import distance

RATES = (1e-2, 1e-3, 1e-4)
# None, about the noise of the mean, and far beyond it.
BIASES = (0.0, 0.1, 1.0)
SAMPLES = (512, 4096)
DIMENSIONS = 3
NOISES = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "skewed": lambda generator, shape: generator.exponential(size=shape) - 1,
    "heavy-tailed": lambda generator, shape: generator.standard_t(5, size=shape),
    "rare": lambda generator, shape: 10 * ((generator.random(shape) < 0.02) - 0.02),
}


def missed(noise: str, samples: int, bias: float, tries: int, generator: np.random.Generator) -> dict[str, float]:
    """Shares of tries in which the bound from below, or from above, is on the wrong side."""
    direction, (_, own, unit) = np.full(DIMENSIONS, DIMENSIONS**-0.5), np.eye(3)
    found = dict.fromkeys((f"{side}_{rate:g}" for rate in RATES for side in ("low", "high")), 0.0)
    for _ in range(tries):
        drawn = bias * direction + NOISES[noise](generator, (samples, DIMENSIONS))
        longest = float(np.linalg.norm(drawn, axis=1).max()) if noise == "rare" else 0.0
        blocks = drawn.reshape(MOST_BLOCKS, -1, DIMENSIONS).mean(axis=1)
        sample = Sample(np.stack([blocks, blocks, np.broadcast_to(direction, blocks.shape)], axis=1))
        for rate in RATES:
            unseen = math.log(1 / rate) * longest / samples
            bound = distance(sample, own, unit, unit[None], (), rate, unseen)
            found[f"low_{rate:g}"] += (bound.low > bias) / tries
            found[f"high_{rate:g}"] += (bound.high < bias) / tries
    return found


def main(tries: int = 10_000) -> None:
    """Write the table."""
    rows = []
    for number, (noise, samples, bias) in enumerate(track(list(product(NOISES, SAMPLES, BIASES)), "coverage")):
        row = {"noise": noise, "samples": samples, "bias": bias, "tries": tries}
        rows.append(row | missed(noise, samples, bias, tries, np.random.default_rng(number)))
    record(Path(__file__).with_suffix(".csv"), pandas.DataFrame(rows))


if __name__ == "__main__":
    typer.run(main)
