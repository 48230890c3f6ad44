"""Runs trained together, against the same runs one at a time in numpy: closed-form gradients and the same draws.

What numpy does is written for one environment and one estimator (token k2 as a loss, leave-one-out baseline), without
autograd, names or options; both must end at the same logits. Whole sweeps are timed, uniforms included, without
measurements. In one process it is the CPU's time: a thread draws uniforms ahead, and where a second core is free the
clock shows less. The rows "as a sweep" are what `kltest run` does with such runs: two batches, spread over two
processes, which are there already, with the store and the progress.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.measure import Row, compare, cpu
from benchmarks.sweeps import swept
from kltest.environments import Environment, bandit, sequence
from kltest.sweeps.run import Configuration
from kltest.training import Problem, Run, train
from kltest.training.sources import AHEAD

RUNS, BATCH, BETA, RATE = 1_000, 16, 0.1, 0.5
# One at a time, a part of the runs stands for all: their number is what the time is proportional to.
ALONE = 50
# Sums in another order differ in the last digits, which training carries along.
SAME = 1e-10
# A sweep trains so many times as long, and one at a time so many fewer runs do.
LONGER = 20


def train_bandit(run: Run, steps: int) -> np.ndarray:
    """(1, V) last logits of one run on a bandit, whose draws are counted by arm."""
    logits, reward = run.problem.start[0].copy(), run.problem.environment.reward[0]
    log_reference, beta, rate = run.problem.log_reference[0], run.beta, run.learning_rate
    for uniform in np.random.default_rng(run.seed).random((steps, BATCH)):
        shifted = logits - logits.max()
        chances = np.exp(shifted)
        total = chances.sum()
        log_policy, chances = shifted - np.log(total), chances / total
        drawn = chances.cumsum()[:-1].searchsorted(uniform, side="right")
        counts = np.bincount(drawn, minlength=len(logits))
        advantage = (BATCH * reward - counts @ reward) / (BATCH - 1)
        weights = counts * (advantage - beta * (log_policy - log_reference)) / BATCH
        logits += rate * (weights - chances * weights.sum())
    return logits[None]


def train_sequence(run: Run, steps: int) -> np.ndarray:
    """(C, V) last logits of one run on token sequences of fixed length."""
    environment, logits = run.problem.environment, run.problem.start.copy()
    log_reference, beta, rate = run.problem.log_reference.ravel(), run.beta, run.learning_rate
    contexts, vocabulary = logits.shape
    reward, horizon = environment.reward.ravel(), environment.horizon
    following = environment.successors[:, :, 0].ravel()
    uniforms = np.random.default_rng(run.seed).random((steps, horizon, BATCH))
    cells = np.empty((horizon, BATCH), dtype=np.int64)
    for uniform in uniforms:
        shifted = logits - logits.max(axis=1, keepdims=True)
        chances = np.exp(shifted)
        total = chances.sum(axis=1, keepdims=True)
        log_policy, chances = (shifted - np.log(total)).ravel(), chances / total
        cumulative = chances.cumsum(axis=1)[:, :-1]
        context = np.zeros(BATCH, dtype=np.int64)
        for step in range(horizon):
            token = (uniform[step][:, None] >= cumulative[context]).sum(axis=1)
            cells[step] = context * vocabulary + token
            context = following[cells[step]]
        earned = reward[cells].sum(axis=0)
        advantage = (BATCH * earned - earned.sum()) / (BATCH - 1)
        weights = (advantage - beta * (log_policy[cells] - log_reference[cells])) / BATCH
        table = np.bincount(cells.ravel(), weights.ravel(), contexts * vocabulary).reshape(logits.shape)
        # (batch·x − Σx)/(batch − 1) is x less the mean of the others.
        logits += rate * (table - chances * table.sum(axis=1, keepdims=True))
    return logits


@dataclass(frozen=True)
class Case:
    """Runs on one environment, the loop that trains one of them alone, and the least by which they are to be faster."""

    kind: str
    size: str
    environment: Environment
    steps: int
    alone: Callable[[Run, int], np.ndarray]
    bound: float

    @cached_property
    def runs(self) -> list[Run]:
        """RUNS runs on twenty problems, seeds apart."""
        problems = [Problem.draw(self.environment, seed, reward="normal") for seed in range(20)]
        return [Run(problems[seed % 20], "k2-loss", beta=BETA, learning_rate=RATE, seed=seed) for seed in range(RUNS)]


CASES = (
    Case("bandit", "4 arms", bandit(4), 400, train_bandit, 50.0),
    Case("bandit", "10 arms", bandit(10), 400, train_bandit, 50.0),
    Case("sequence", "V=3, T=3", sequence(3, 3), 100, train_sequence, 20.0),
    Case("sequence", "V=3, T=5", sequence(3, 5), 100, train_sequence, 20.0),
)


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    return [compared(case, processes) for processes in (1, 2) for case in CASES]


def compared(case: Case, processes: int) -> Row:
    """Compare runs together, or as a sweep in two processes, with a part of them alone; all end at the same logits."""
    steps, alone, together = case.steps, ALONE, "together"
    if processes > 1:
        steps, alone, together = steps * LONGER, max(2, ALONE // LONGER), "as a sweep in two processes"
    configurations = [{"case": CASES.index(case), "steps": steps, "seed": seed} for seed in range(RUNS)]

    def ours() -> np.ndarray:
        if processes > 1:
            return np.array([rows[0]["logits"] for rows in swept(trained, configurations, RUNS // 2, processes)])
        return train(case.runs, steps=steps, batch_size=BATCH, optima=False).logits

    def theirs() -> np.ndarray:
        return np.stack([case.alone(run, steps) for run in case.runs[:alone]])

    difference = np.abs(ours()[:alone] - theirs()).max()
    assert difference < SAME, f"{case}: the logits differ by {difference}"
    return compare(
        f"{RUNS:,} {case.kind} runs {together} / one at a time in numpy",
        f"{case.kind}, {case.size}, {steps:,} updates of {BATCH} rollouts",
        ours,
        theirs,
        bound=case.bound,
        at_most=False,
        floor=lambda: least(case, RUNS // processes, steps),
        rounds=5,
        scale=RUNS / alone,
        clock=cpu if processes == 1 else time.perf_counter,
    )


def trained(batch: Sequence[Configuration]) -> list[list[dict]]:
    """The rows of a batch of configurations, as an experiment computes them."""
    runs = CASES[batch[0]["case"]].runs
    history = train([runs[one["seed"]] for one in batch], steps=batch[0]["steps"], batch_size=BATCH, optima=False)
    return [[{**one, "logits": logits.tolist()}] for one, logits in zip(batch, history.logits, strict=True)]


def least(case: Case, runs: int, steps: int) -> None:
    """Work that no way of training runs together leaves out, on one core and with nothing done to the results.

    The uniforms of each run's own stream, an exponential of each logit, V − 1 comparisons a token, and for sequences
    one look-up and one sum by cell a token.
    """
    vocabulary, horizon = case.environment.vocabulary, case.environment.horizon
    tokens, logits = BATCH * horizon, np.zeros((case.environment.n_contexts * vocabulary, runs))
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
        for _ in range(vocabulary - 1):
            np.greater_equal(uniforms, logits[0])
        if horizon > 1:
            np.bincount(cells.reshape(-1), logits.reshape(-1).take(cells).reshape(-1), logits.size)
