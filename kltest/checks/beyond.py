"""The gradient and the declared one on instances beyond the graded ones, as a whole or prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kltest.environments import Environment, Instance, sequence
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings, Row

Setting = TypeVar("Setting")
VOCABULARY = 3


def right_row(findings: Findings, sampler: str) -> Row | None:
    """Return the row to go further from, of batches if rows are coupled, else of several tokens if there is one.

    None if a row of this sampler is not exact, or is not right.
    """
    rows = [row for row in findings.rows if row.sampler == sampler]
    if not rows or any(row.agrees is not True or row.method != "exact" for row in rows):
        return None
    return max(rows, key=lambda row: (row.batch, row.length is not None, row.length or 0))


def compared(findings: Findings, row: Row, instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected gradient (C, V) of batches like a row's, and the declared one; the report says it looked."""
    found = findings.measure.expected(row, instance).gradient
    findings.see(instance, row.sampler, row.batch)
    return found, target(findings.expect, instance, row.sampler)


def bias(findings: Findings, row: Row, instance: Instance) -> float:
    """Relative bias of the expected gradient of batches like a row's."""
    return relative_bias(*compared(findings, row, instance), size(instance))


def tokens_of(row: Row) -> int:
    """Tokens of a rollout: two if the loss agrees in rollouts of several and treats them apart, else one."""
    return 1 if row.length == 1 or row.batch > 1 else 2


def prompts(many: int, tokens: int, generator: np.random.Generator) -> Environment:
    """Return sequences of equally likely prompts, each token with a reward of 0 or 1."""
    environment = sequence(VOCABULARY, tokens, prompts=np.full(many, 1 / many), name="prompts")
    return replace(environment, reward=generator.integers(2, size=environment.reward.shape).astype(float))


def biases(
    findings: Findings, row: Row, settings: Sequence[Setting], instance_of: Callable[[Sequence[Setting]], Instance]
) -> list[float]:
    """Relative bias at each setting, in one environment if rollouts are graded one by one.

    Args:
        findings: of the loss.
        row: is measured in batches of this row's size, with rollouts from its sampler.
        settings: whatever makes a prompt.
        instance_of: makes an instance with a prompt for each of some settings.
    """
    if row.batch > 1:
        return [bias(findings, row, instance_of([one])) for one in settings]
    instance = instance_of(settings)
    parts = (np.split(array, len(settings)) for array in compared(findings, row, instance))
    unit = size(instance) / len(settings)
    return [relative_bias(one, other, unit) for one, other in zip(*parts, strict=True)]
