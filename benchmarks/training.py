"""Runs trained together, against the same runs one at a time in numpy: closed-form gradients and the same draws.

What numpy does is written for one world and one estimator (token k2 as a loss, leave-one-out baseline), without
autograd, names or options; both must end at the same logits. The clock covers whole sweeps, uniforms included, without
measurements. Uniforms are drawn ahead by a thread, so that a second core helps where one is free; `taskset -c 0` shows
what one core does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.measure import Row, compare, save
from kltest.environments import bandit, sequence
from kltest.training import Problem, Run, train

RUNS, BATCH, BETA, RATE = 1_000, 16, 0.1, 0.5
# One at a time, a part of the runs stands for all: their number is what the time is proportional to.
ALONE = 50
# Sums in another order differ in the last digits, which training carries along.
SAME = 1e-10


def main() -> list[Row]:
    rows = []
    for case, environment, alone, steps, bound in (
        ("bandit, 4 arms, 400 updates of 16 rollouts", bandit(4), train_bandit, 400, 50.0),
        ("bandit, 10 arms, 400 updates of 16 rollouts", bandit(10), train_bandit, 400, 50.0),
        ("sequence, V=3, T=3, 100 updates of 16 rollouts", sequence(3, 3), train_sequence, 100, 20.0),
        ("sequence, V=3, T=5, 100 updates of 16 rollouts", sequence(3, 5), train_sequence, 100, 20.0),
    ):
        rows.append(_row(case, environment, alone, steps, bound))
    save("training", rows)
    return rows


def _row(case, environment, alone: Callable[..., np.ndarray], steps: int, bound: float) -> Row:
    problems = [Problem.draw(environment, seed, reward="normal") for seed in range(20)]
    runs = [Run(problems[seed % 20], "k2-loss", beta=BETA, learning_rate=RATE, seed=seed) for seed in range(RUNS)]

    def together() -> np.ndarray:
        return train(runs, steps=steps, batch_size=BATCH, optima=False).logits

    def one_at_a_time() -> np.ndarray:
        return np.stack([alone(run, steps, BATCH) for run in runs[:ALONE]])

    difference = np.abs(together()[:ALONE] - one_at_a_time()).max()
    assert difference < SAME, f"{case}: the logits differ by {difference}"
    return compare(
        f"{RUNS:,} {case.split(',')[0]} runs together / one at a time in numpy",
        case,
        together,
        one_at_a_time,
        bound=bound,
        at_most=False,
        rounds=5,
        scale=RUNS / ALONE,
    )


def train_bandit(run: Run, steps: int, batch: int) -> np.ndarray:
    """(1, V) last logits of one run on a bandit."""
    logits, reward = run.problem.start[0].copy(), run.problem.environment.reward[0]
    log_reference, beta, rate = run.problem.log_reference[0], run.beta, run.learning_rate
    arms = len(logits)
    uniforms = np.random.default_rng(run.seed).random((steps, batch))
    for uniform in uniforms:
        shifted = logits - logits.max()
        chances = np.exp(shifted)
        total = chances.sum()
        log_policy, chances = shifted - np.log(total), chances / total
        drawn = chances.cumsum()[:-1].searchsorted(uniform, side="right")
        counts = np.bincount(drawn, minlength=arms)
        earned = counts @ reward
        advantage = (batch * reward - earned) / (batch - 1)
        weights = counts * (advantage - beta * (log_policy - log_reference)) / batch
        logits += rate * (weights - chances * weights.sum())
    return logits[None]


def train_sequence(run: Run, steps: int, batch: int) -> np.ndarray:
    """(C, V) last logits of one run on token sequences of fixed length."""
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


if __name__ == "__main__":
    main()
