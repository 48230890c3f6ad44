"""The logged KL where a metric is usually read: long rollouts, gaps between live tokens, batches of many rows.

Where the gradient is off as well, its own checks report that.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from kltest.checks.check import Found
from kltest.checks.logged_values.metrics import BATCH, MANY, SYMBOLS, as_one, logged, metric_of, settled
from kltest.checks.stress import LENGTH, LONGER, long_instance, right_in_long_rollouts
from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.identify.instances import TURNS, instances
from kltest.identify.values import first_match, true_values
from kltest.moments.tolerances import TOLERANCES
from kltest.report import Level
from kltest.rollout import Rollout

ROWS = (8, 16, 32)
# Half of the largest log-ratio of a token, so that those of rollouts go far beyond ten.
FAR = 4.0


def elsewhere(findings: Findings) -> Found | None:
    """Report where a logged KL that is right in the graded environments is none."""
    if not findings.agree:
        return None
    names = {found.row.matches for _, found in logged(findings) if found.row.matches}
    tried = chain(_in_long_rollouts(findings, names), _in_turns(findings), _in_batches(findings, names))
    for level, words in tried:
        return Found(f"{words} It is a KL in the graded environments.", level=level)
    return None


def after_earlier_calls(findings: Findings) -> Found | None:
    """Report that what a loss logs over its calls comes to no KL: of each rollout, called again and again."""
    for environment in findings.environments:
        instance = instances(environment, findings.seed)[0]
        every = Rollout.of(instance, padding=findings.seed)
        alone = []
        for row in range(len(every)):
            value = settled(findings, every.take([row]))
            if value is None:
                return Found(f"Of one batch it is another number in each of {MANY} calls, and comes to none.")
            alone.append(value)
        mean, truths = float(instance.rollout_weights("current") @ alone), true_values(instance)
        if first_match([mean], [truths], _limit(findings)) is None:
            words = ", ".join(f"{symbol} = {truths[name]:.6g}" for name, symbol in SYMBOLS.items())
            return Found(f"In {environment} it comes to {mean:.6g} over calls of a rollout, where {words}.")
    return None


def _in_long_rollouts(findings: Findings, names: set[str]) -> Iterator[tuple[Level, str]]:
    if not right_in_long_rollouts(findings):
        return
    cases: tuple[tuple[Level, str, Instance], ...] = (
        ("error", f"{LENGTH} tokens", long_instance(1, findings.seed)),
        ("error", f"{LONGER} tokens", long_instance(1, findings.seed, LONGER, apart=0.0)),
        (
            "warning",
            f"{LONGER} tokens, with log-ratios of a token of up to 4,",
            long_instance(1, findings.seed, LONGER),
        ),
        (
            "warning",
            f"{LENGTH} tokens, of which five have log-ratios of up to {2 * FAR:g},",
            long_instance(1, findings.seed, width=FAR),
        ),
    )
    for level, words, instance in cases:
        every = Rollout.of(instance, padding=findings.seed)
        alone = [_of_copies(findings, every, row) for row in range(len(every))]
        mean, truths = float(instance.rollout_weights("current") @ alone), true_values(instance)
        usual = {name: truth for name, truth in truths.items() if name in names}
        if usual and first_match([mean], [usual], _limit(findings)) is None:
            wanted = " or ".join(f"{truth:.4g}" for truth in dict.fromkeys(usual.values()))
            yield level, f"In rollouts of {words} it is {mean:.4g}, and the KL {wanted}."


def _in_turns(findings: Findings) -> Iterator[tuple[Level, str]]:
    """Only if KL208 can be asked: of a loss that reads a mask."""
    if "mask" not in findings.observed.uses:
        return
    for row in findings.measure.rows(TURNS, "current"):
        found = row.reported
        if row.agrees and found and found.is_metric and found.judged and found.row.matches is None:
            mean, truth = found.means[0], found.truths[0]["kl"]
            yield "error", f"With masked columns between live tokens it is {mean:.4g}, and the KL {truth:.4g}."


def _in_batches(findings: Findings, names: set[str]) -> Iterator[tuple[Level, str]]:
    """A batch logs the mean of what its rows log, or of their tokens.

    What combines rows in another way is none if it is not over pairs in expectation, or not for copies of one rollout.
    """
    every = Rollout.of(instances("ragged", findings.seed)[0], padding=findings.seed)
    order = np.random.default_rng(findings.seed).permutation(len(every))
    alone = np.array([_of_copies(findings, every, row) for row in range(len(every))])
    lengths = every.peek("mask").sum(dim=1).numpy()
    for many in ROWS:
        rows = np.resize(order, many)
        together = as_one(metric_of(findings, every.take(rows)))
        means = (alone[rows].mean(), np.average(alone[rows], weights=lengths[rows]))
        if not np.isclose(together, means, rtol=_limit(findings), atol=0).any():
            copies = as_one(metric_of(findings, every.take(rows[:1].repeat(many))))
            if not (_right_in_pairs(findings, names) and np.isclose(copies, alone[rows[0]], rtol=_limit(findings))):
                yield (
                    "error",
                    f"A batch of {many} rollouts logs {together:.4g}, and each alone {means[0]:.4g} on average.",
                )
            raise KltestError(f"a batch of {many} rollouts logs another number than its rows do on average")


def _right_in_pairs(findings: Findings, names: set[str]) -> bool:
    instance = instances("bandit", findings.seed)[0]
    every, chance = Rollout.of(instance, padding=findings.seed), instance.rollout_weights("current")
    pairs = [[one, other] for one in range(len(every)) for other in range(len(every))]
    mean = sum(chance[pair].prod() * as_one(metric_of(findings, every.take(pair))) for pair in pairs)
    return first_match([float(mean)], [true_values(instance)], _limit(findings)) in {*names, "kl"}


def _limit(findings: Findings) -> float:
    return TOLERANCES[findings.observed.dtype].value


def _of_copies(findings: Findings, every: Rollout, row: int) -> float:
    """What is logged for a rollout alone, or for a group of copies of it if the loss takes no single ones."""
    try:
        return as_one(metric_of(findings, every.take([row])))
    except KltestError:
        return as_one(metric_of(findings, every.take([row] * BATCH)))
