"""Runs trained together, against the same runs one at a time in numpy: closed-form gradients and the same draws.

What numpy does is written for token sequences and one estimator (token k2 as a loss, leave-one-out baseline), without
autograd, names or options; both must end at the same logits. Whole sweeps are timed, uniforms included, without
measurements. In one process it is the CPU's time: a thread draws uniforms ahead, and where a second core is free the
clock shows less. The rows "as a sweep" are what `kltest run` does with such runs: two batches, spread over two
processes, which are there already, with the store and the progress.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.measure import Row, compare, cpu
from kltest.environments import bandit, sequence
from kltest.sweeps.run import Batching, Configuration
from kltest.sweeps.run import run as sweep
from kltest.sweeps.store import Store
from kltest.training import Problem, Run, train
from kltest.training.sources import AHEAD

RUNS, BATCH, BETA, RATE = 1_000, 16, 0.1, 0.5
# One at a time, a part of the runs stands for all: their number is what the time is proportional to.
ALONE = 50
# Sums in another order differ in the last digits, which training carries along.
SAME = 1e-10
# A sweep trains so many times as long, and one at a time so many fewer runs do.
LONGER = 20


@dataclass(frozen=True)
class Case:
    """Runs on one environment; `bound` is the least by which they are to be faster together."""

    kind: str
    size: int
    length: int
    steps: int
    bound: float

    @property
    def words(self) -> str:
        size = f"{self.size} arms" if self.kind == "bandit" else f"V={self.size}, T={self.length}"
        return f"{self.kind}, {size}, {{steps:,}} updates of {BATCH} rollouts"

    @cached_property
    def runs(self) -> list[Run]:
        environment = bandit(self.size) if self.kind == "bandit" else sequence(self.size, self.length)
        problems = [Problem.draw(environment, seed, reward="normal") for seed in range(20)]
        return [Run(problems[seed % 20], "k2-loss", beta=BETA, learning_rate=RATE, seed=seed) for seed in range(RUNS)]


CASES = (
    Case("bandit", 4, 1, 400, 80.0),
    Case("bandit", 10, 1, 400, 80.0),
    Case("sequence", 3, 3, 100, 20.0),
    Case("sequence", 3, 5, 100, 20.0),
)


def main() -> list[Row]:
    return [*map(_together, CASES), *map(_swept, CASES)]


def _together(case: Case) -> Row:
    def together() -> np.ndarray:
        return train(case.runs, steps=case.steps, batch_size=BATCH, optima=False).logits

    return _compared(case, f"{RUNS:,} {case.kind} runs together", together, case.steps, ALONE, processes=1)


def _swept(case: Case) -> Row:
    # By its name in the package: what is pickled must be found again by other processes.
    from benchmarks.training import trained

    steps = case.steps * LONGER
    configurations = [{"case": CASES.index(case), "steps": steps, "seed": seed} for seed in range(RUNS)]

    def swept() -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "runs.jsonl", "1") as store:
            batching = Batching(("seed",), RUNS // 2)
            assert not sweep(trained, configurations, store, label="sweep", batching=batching, workers=2)
            return np.array([store.result(one)[0]["logits"] for one in configurations])

    words = f"{RUNS:,} {case.kind} runs as a sweep in two processes"
    return _compared(case, words, swept, steps, max(2, ALONE // LONGER), processes=2)


def _compared(case: Case, what: str, ours: Callable[[], np.ndarray], steps: int, alone: int, *, processes: int) -> Row:
    """Compare with so many of the runs one at a time; both must end at the same logits."""

    def one_at_a_time() -> np.ndarray:
        return np.stack([train_alone(run, steps, BATCH) for run in case.runs[:alone]])

    difference = np.abs(ours()[:alone] - one_at_a_time()).max()
    assert difference < SAME, f"{case}: the logits differ by {difference}"
    return compare(
        f"{what} / one at a time in numpy",
        case.words.format(steps=steps),
        ours,
        one_at_a_time,
        bound=case.bound,
        at_most=False,
        floor=lambda: least(case, RUNS // processes, steps),
        rounds=5,
        scale=RUNS / alone,
        clock=cpu if processes == 1 else time.perf_counter,
    )


def least(case: Case, runs: int, steps: int) -> None:
    """What no way of training runs together leaves out, on one core and with nothing done to the results.

    The uniforms of each run's own stream, an exponential of each logit, V − 1 comparisons a token, and for sequences
    one look-up and one sum by cell a token.
    """
    tokens, logits = BATCH * case.length, np.zeros((case.runs[0].problem.start.size, runs))
    cells = np.random.default_rng(0).integers(len(logits), size=(tokens, 1)) * runs + np.arange(runs)
    generators = [np.random.default_rng(seed) for seed in range(runs)]
    ahead = max(1, AHEAD // (runs * tokens))
    drawn = np.empty((runs, ahead * tokens))
    for step in range(steps):
        if step % ahead == 0:
            for generator, own in zip(generators, drawn, strict=True):
                generator.random(out=own)
        np.exp(logits)
        uniforms = drawn.reshape(tokens, -1)[:, :runs]
        for _ in range(case.size - 1):
            np.greater_equal(uniforms, logits[0])
        if case.length > 1:
            np.bincount(cells.reshape(-1), logits.reshape(-1).take(cells).reshape(-1), logits.size)


def trained(batch: Sequence[Configuration]) -> list[list[dict]]:
    """The rows of a batch of configurations, as an experiment computes them."""
    runs = CASES[batch[0]["case"]].runs
    history = train([runs[one["seed"]] for one in batch], steps=batch[0]["steps"], batch_size=BATCH, optima=False)
    return [[{**one, "logits": logits.tolist()}] for one, logits in zip(batch, history.logits, strict=True)]


def train_alone(run: Run, steps: int, batch: int) -> np.ndarray:
    """(C, V) last logits of one run on token sequences of fixed length, of which a bandit's are the shortest."""
    environment, logits = run.problem.environment, run.problem.start.copy()
    log_reference, beta, rate = run.problem.log_reference.ravel(), run.beta, run.learning_rate
    contexts, vocabulary = logits.shape
    reward, horizon = environment.reward.ravel(), environment.horizon
    following = environment.successors[:, :, 0].ravel()
    uniforms = np.random.default_rng(run.seed).random((steps, horizon, batch))
    cells = np.empty((horizon, batch), dtype=np.int64)
    for uniform in uniforms:
        shifted = logits - logits.max(axis=1, keepdims=True)
        chances = np.exp(shifted)
        total = chances.sum(axis=1, keepdims=True)
        log_policy, chances = (shifted - np.log(total)).ravel(), chances / total
        cumulative = chances.cumsum(axis=1)[:, :-1]
        context = np.zeros(batch, dtype=np.int64)
        for step in range(horizon):
            token = (uniform[step][:, None] >= cumulative[context]).sum(axis=1)
            cells[step] = context * vocabulary + token
            context = following[cells[step]]
        earned = reward[cells].sum(axis=0)
        advantage = (batch * earned - earned.sum()) / (batch - 1)
        weights = (advantage - beta * (log_policy[cells] - log_reference[cells])) / batch
        table = np.bincount(cells.ravel(), weights.ravel(), contexts * vocabulary).reshape(logits.shape)
        # (batch·x − Σx)/(batch − 1) is x less the mean of the others.
        logits += rate * (table - chances * table.sum(axis=1, keepdims=True))
    return logits
