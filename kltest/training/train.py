"""The training loop for many runs at once: rollouts, both parts of the gradient, one step on the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from kltest.errors import UsageError
from kltest.training.batch import softmax, softmax_gradient, total, transposed
from kltest.training.measure import MEASURED, History, PolicyMeasure
from kltest.training.penalty import PenaltyGradient, penalty_of
from kltest.training.problems import Run, Runs, check_alike, sharing
from kltest.training.reward import Ratio, score_weights
from kltest.training.sources import Drawn, EveryRollout

# Largest absolute logit; a run beyond it counts as diverged.
EXPLODED = 1e6
# Numbers in one field of a chunk of runs: more share the overhead of a call, fewer stay in the cache.
CHUNK = 2**18


@dataclass(frozen=True)
class TrainSettings:
    """The settings that all runs of a call share; see `train`. Raises UsageError if one is out of range."""

    steps: int
    batch_size: int | None
    group_size: int | None
    inner_steps: int
    ratio: Ratio
    optima: bool

    def __post_init__(self) -> None:
        for name, smallest in {"steps": 0, "batch_size": 1, "group_size": 1, "inner_steps": 1}.items():
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= smallest):
                raise UsageError(f"{name} must be a whole number of at least {smallest}, not {number!r}")
        if self.ratio not in get_args(Ratio):
            raise UsageError(f"the ratio {self.ratio!r} is none of {', '.join(get_args(Ratio))}")
        if self.batch_size is not None and self.group_size is not None and self.batch_size % self.group_size:
            raise UsageError(f"a batch of {self.batch_size} rollouts cannot be cut into groups of {self.group_size}")

    def recorded(self, record: int | Sequence[int] | None) -> list[int]:
        """Numbers of updates after which to measure: every `record`-th or those listed, and always 0 and the last."""
        if isinstance(record, int):
            if record < 1:
                raise UsageError(f"records are made every 1 update or more, not every {record}")
            record = range(0, self.steps + 1, record)
        listed = {0, self.steps, *(record or ())}
        if outside := [step for step in listed if not 0 <= step <= self.steps]:
            raise UsageError(f"there is nothing to record after update {outside[0]}: training has {self.steps}")
        return sorted(listed)


def train(
    runs: Sequence[Run],
    *,
    steps: int,
    batch_size: int | None = None,
    group_size: int | None = None,
    inner_steps: int = 1,
    ratio: Ratio = "none",
    record: int | Sequence[int] | None = None,
    optima: bool = True,
    chunk: int | None = None,
) -> History:
    """Train R runs for `steps` updates each and measure them exactly on the way (conventions: `kltest.training`).

    Args:
        runs: Runs whose environments differ in nothing but the reward.
        steps: Number of updates.
        batch_size: Rollouts drawn for each update; None for exact expectations.
        group_size: Rollouts of one prompt that form a group; it divides `batch_size`.
        inner_steps: Updates between two renewals of the sampler.
        ratio: Importance ratio of the reward part, see `kltest.training.reward`.
        record: Measure after every so many updates, or after the listed numbers of updates; always at start and end.
        optima: Solve for π*, as `kl_to_optimum` and `gap` need it.
        chunk: Runs that are trained at a time, by default as many as fit into the cache; results do not depend on it.

    Returns:
        Measurements, final logits and the update at which a run diverged. A diverged run is stopped, never raised.

    Raises:
        UsageError: A setting is out of range, or an estimator cannot be called.
        InvalidEnvironmentError: Environments differ in more than their reward, or cannot be enumerated.
    """
    settings = TrainSettings(steps, batch_size, group_size, inner_steps, ratio, optima)
    recorded = settings.recorded(record)
    check_alike([run.problem for run in runs])
    columns = {name: np.full((len(recorded), len(runs)), np.nan) for name in MEASURED}
    shape = (len(runs), *runs[0].problem.start.shape)
    logits, diverged = np.empty(shape), np.full(len(runs), -1)
    for rows in sharing(runs):
        size = chunk or max(1, CHUNK // _numbers(runs[0], settings))
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            measured, last, since = _train_together(Runs([runs[row] for row in part]), settings, recorded)
            for name, values in measured.items():
                columns[name][:, part] = values
            logits[part], diverged[part] = last, since
    return History(np.array(recorded), **columns, diverged=diverged, logits=logits)


@np.errstate(all="ignore")
def _train_together(
    runs: Runs, settings: TrainSettings, recorded: Sequence[int]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return measurements (K, R), final logits (R, C, V) and the update at which each run diverged (R,)."""
    penalty = penalty_of(runs) if runs.each[0].estimator is not None else None
    source = _source(runs, settings, coupled=penalty is not None and penalty.couples)
    measure = PolicyMeasure(runs, optima=settings.optima)
    found: list[dict[str, np.ndarray]] = []
    logits = runs.start.copy()
    diverged = np.full(len(runs), -1)
    policy = sampler = softmax(logits)
    for step in range(settings.steps + 1):
        recording = step in recorded
        if step % settings.inner_steps == 0:
            sampler = policy
        batch = source.draw(sampler)
        if penalty is not None and penalty.whole:
            ascent = np.zeros(batch.shape)
        else:
            earned = batch.along(batch.chosen(runs.reward))
            log_ratio = None if sampler is policy else batch.chosen(policy.log_probs - sampler.log_probs)
            ascent = score_weights(batch, earned, log_ratio, settings.ratio)
        descent = PenaltyGradient()
        if penalty is not None:
            descent = penalty.gradient(batch, policy.log_probs, sampler.log_probs, log=recording)
        table = batch.collect(ascent if descent.logp is None else ascent - descent.logp, logits)
        if descent.logits is not None:
            table = table - batch.collect_next(descent.logits, logits)
        gradient = softmax_gradient(table, policy)
        if recording:
            norm = np.sqrt(total(total(np.square(gradient))))
            logged = {} if descent.logged is None else {"logged": descent.logged}
            found.append({**measure(policy), "gradient_norm": norm, **logged})
        if step == settings.steps:
            break
        gradient *= runs.rate
        moved = np.add(logits, gradient, out=gradient)
        # Both comparisons are false for NaN, which therefore counts as diverged.
        if not (moved.min() >= -EXPLODED and moved.max() <= EXPLODED) or (diverged >= 0).any():
            unsound = ~(np.abs(moved).max(axis=(0, 1)) <= EXPLODED)
            diverged = np.where(unsound & (diverged < 0), step + 1, diverged)
            moved = np.where(diverged >= 0, logits, moved)
        logits = moved
        # The policy's memory is reused unless the sampler still refers to it.
        spent = sampler is not policy or (step + 1) % settings.inner_steps == 0
        policy = softmax(logits, policy if spent else None)
    measured = {name: np.stack([each[name] for each in found]) for name in found[0]}
    return measured, transposed(logits), diverged


def _source(runs: Runs, settings: TrainSettings, *, coupled: bool) -> EveryRollout | Drawn:
    if settings.batch_size is None:
        return EveryRollout(runs.environment, len(runs), settings.group_size)
    seeds = [run.seed for run in runs.each]
    size, group, steps = settings.batch_size, settings.group_size, settings.steps
    return Drawn(runs.environment, seeds, size, group, steps, counted=not coupled)


def _numbers(run: Run, settings: TrainSettings) -> int:
    """Approximate number of numbers in the largest field of one run."""
    environment = run.problem.environment
    rows = environment.count() * (settings.group_size or 1) if settings.batch_size is None else settings.batch_size
    return int(max(rows * environment.horizon, run.problem.start.size))
