"""The loop: rollouts, the two parts of the gradient, one step on the logits, for many runs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kltest.training.drawn import Drawn
from kltest.training.enumerated import Enumerated
from kltest.training.estimator import sharing
from kltest.training.history import MEASURED, History
from kltest.training.measure import Measure
from kltest.training.penalty import Pull
from kltest.training.problems import Run, check_alike
from kltest.training.reward import Baseline, Ratio, push
from kltest.training.settings import Settings
from kltest.training.sums import by_run, softmax, softmax_gradient, total
from kltest.training.tokens import penalty_of
from kltest.training.world import World

EXPLODED = 1e6
"""A logit further from zero than this counts as diverged."""
CHUNK = 2**18
"""Numbers in one field of a chunk of runs: more of them share the cost of a call, fewer stay in the cache."""


def train(
    runs: Sequence[Run],
    *,
    steps: int,
    batch_size: int | None = None,
    group_size: int | None = None,
    inner_steps: int = 1,
    baseline: Baseline = "leave-one-out",
    ratio: Ratio = "none",
    clip: float = 0.2,
    max_norm: float | None = None,
    record: int | Sequence[int] | None = None,
    optima: bool = True,
    chunk: int | None = None,
) -> History:
    """Train R runs for `steps` updates each, and measure them exactly on the way (conventions: `kltest.training`).

    The worlds of the runs may differ in reward alone. `batch_size` rollouts are drawn for each update, in groups of
    `group_size` of one prompt if given; with None gradients are exact expectations. The sampler is renewed every
    `inner_steps` updates. `baseline`, `ratio` and `clip` are those of the reward part (kltest.training.reward).
    Gradients longer than `max_norm` are shortened to it. `record`: every so many updates, or after which numbers of
    updates, to measure; the start and the end always are. Without `optima` no π* is solved for. `chunk` runs
    are worked on at a time, by default as many as fit into the cache; results do not depend on it.

    Raises UsageError for settings out of range and for estimators that cannot be called so, InvalidEnvironmentError for
    environments that differ in more than their reward or cannot be enumerated. A run that diverges is stopped and
    marked, never raised.
    """
    settings = Settings(steps, batch_size, group_size, inner_steps, baseline, ratio, clip, max_norm, optima)
    recorded = settings.recorded(record)
    check_alike([run.problem for run in runs])
    columns = {name: np.full((len(recorded), len(runs)), np.nan) for name in MEASURED}
    shape = (len(runs), *runs[0].problem.start.shape)
    logits, diverged = np.empty(shape), np.full(len(runs), -1)
    for rows in sharing(runs):
        size = chunk or max(1, CHUNK // _numbers(runs[0], settings))
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            world = World([runs[row] for row in part])
            measured, last, since = _train_together(world, settings, recorded)
            for name in MEASURED:
                columns[name][:, part] = measured[name]
            logits[part], diverged[part] = last, since
    return History(np.array(recorded), **columns, diverged=diverged, logits=logits)


@np.errstate(all="ignore")
def _train_together(
    world: World, settings: Settings, recorded: Sequence[int]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Measurements (K, R), last logits (R, C, V) and the update at which each run diverged (R,)."""
    runs = len(world.runs)
    penalty = penalty_of(world) if world.runs[0].estimator is not None else None
    source = _source(world, settings, apart=penalty is None or not penalty.couples)
    measure = Measure(world, optima=settings.optima)
    found: dict[str, list[np.ndarray]] = {name: [] for name in MEASURED}
    logits = world.start.copy()
    diverged = np.full(runs, -1)
    policy = sampler = softmax(logits)
    for step in range(settings.steps + 1):
        recording = step in recorded
        if step % settings.inner_steps == 0:
            sampler = policy
        batch = source.draw(sampler, step)
        signal = np.zeros(batch.shape) if penalty is not None and penalty.whole else None
        if signal is None:
            earned = batch.along(batch.chosen(world.reward))
            log_ratio = None if sampler is policy else batch.chosen(policy.log_probs - sampler.log_probs)
            signal = push(batch, earned, log_ratio, settings.baseline, settings.ratio, settings.clip)
        pull = Pull() if penalty is None else penalty.pull(batch, policy.log_probs, sampler.log_probs, log=recording)
        table = batch.collect(signal if pull.logp is None else signal - pull.logp, logits)
        if pull.logits is not None:
            table = table - batch.collect_next(pull.logits, logits)
        gradient = softmax_gradient(table, policy)
        if recording or settings.max_norm is not None:
            norm = np.sqrt(total(total(np.square(gradient))))
        if recording:
            for name, values in measure(policy).items():
                found[name].append(values)
            found["gradient_norm"].append(norm)
            found["logged"].append(np.full_like(norm, np.nan) if pull.logged is None else pull.logged)
        if step == settings.steps:
            break
        if settings.max_norm is not None:
            gradient = gradient * (settings.max_norm / np.maximum(norm, settings.max_norm))
        gradient *= world.rate
        moved = np.add(logits, gradient, out=gradient)
        # Said so that NaN counts as unsound.
        if not (moved.min() >= -EXPLODED and moved.max() <= EXPLODED) or (diverged >= 0).any():
            unsound = ~(np.abs(moved).max(axis=(0, 1)) <= EXPLODED)
            diverged = np.where(unsound & (diverged < 0), step + 1, diverged)
            moved = np.where(diverged >= 0, logits, moved)
        logits = moved
        spent = sampler is not policy or (step + 1) % settings.inner_steps == 0
        policy = softmax(logits, policy if spent else None)
    measured = {name: np.stack(values) for name, values in found.items()}
    return measured, by_run(logits), diverged


def _source(world: World, settings: Settings, *, apart: bool) -> Enumerated | Drawn:
    """Where rollouts come from; `apart` says that the estimator does not couple them."""
    if settings.batch_size is None:
        return Enumerated(world.environment, len(world.runs), settings.group_size)
    seeds = [run.seed for run in world.runs]
    size, group, steps = settings.batch_size, settings.group_size, settings.steps
    return Drawn(world.environment, seeds, size, group, steps, counted=apart)


def _numbers(run: Run, settings: Settings) -> int:
    """About how many numbers one run has in its largest field."""
    environment = run.problem.environment
    rows = environment.count() * (settings.group_size or 1) if settings.batch_size is None else settings.batch_size
    return int(max(rows * environment.horizon, run.problem.start.size))
