"""Rollouts of 64 tokens: is the gradient still the declared one there?

A window, a discount or a mask may begin after the few tokens of the graded environments. Here all tokens but a few,
near the start and far from it, are all but certain and equally likely under policy, reference and sampler. So few
rollouts remain that they are enumerated, and the declared gradient is known by dynamic programming.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from kltest.checks.beyond import OfSome, compared
from kltest.checks.check import Found, shared
from kltest.environments import END, Environment, Instance, Paths
from kltest.environments.policies import table
from kltest.identify.case import relative_bias, size
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import with_ties
from kltest.moments.tolerances import TOLERANCES, Tolerances

LENGTH = 64
# Positions of the tokens that are not certain, by the rows of a batch: multisets of rollouts are enumerated.
CHOICES = {1: (0, 5, 19, 42, 63), 2: (0, 19, 63)}
CHOICES_OF_GROUPS = (0, 42)
# Logit of a certain token above the other: 59 of them leave 6e-12, and a log-prob of −30 is legal everywhere.
CERTAIN = 30.0
# Share of a difference below which the part at one position is none.
SMALL = 1e-3


def _rollouts(environment: Environment, choices: tuple[int, ...]) -> Paths:
    """Enumerate the rollouts of `environment_of` with certain tokens only between the choices."""
    count = 2 ** len(choices)
    tokens = np.zeros((count, LENGTH), dtype=np.int64)
    tokens[:, choices] = np.arange(count)[:, None] >> np.arange(len(choices))[::-1] & 1
    contexts = np.zeros_like(tokens)
    for step in range(LENGTH - 1):
        contexts[:, step + 1] = environment.successors[contexts[:, step], tokens[:, step], 0]
    nothing = np.zeros(count, dtype=np.int64)
    return Paths(contexts, tokens, np.ones(tokens.shape, dtype=bool), nothing, nothing.astype(float))


def environment_of(choices: tuple[int, ...]) -> tuple[Environment, np.ndarray]:
    """Return an environment whose contexts are a time step and the choices before it, and the step (C,) of each."""
    steps, first = [], [0]
    for step in range(LENGTH):
        many = 2 ** sum(choice < step for choice in choices)
        steps += [step] * many
        first.append(first[-1] + many)
    successors = np.full((len(steps), 2, 1), END, dtype=np.int64)
    for step in range(LENGTH - 1):
        history = np.arange(first[step + 1] - first[step])[:, None]
        onward = 2 * history + np.arange(2) if step in choices else np.repeat(history, 2, axis=1)
        successors[first[step] : first[step + 1], :, 0] = first[step + 1] + onward
    start, certain = np.zeros(1, dtype=np.int64), np.ones(successors.shape)
    made = Environment("long", LENGTH, start, np.ones(1), successors, certain, np.zeros((len(steps), 2)), tree=True)
    return made, np.array(steps)


def choices_of(batch: int) -> tuple[int, ...]:
    """Return the positions of the tokens that are not certain, for batches of this size."""
    return CHOICES.get(batch, CHOICES_OF_GROUPS)


@lru_cache(maxsize=8)
def long_instance(batch: int, seed: int) -> Instance:
    """Draw the instance for batches of this size; rewards of 0 or 1 a rollout, each about half of the time."""
    choices = choices_of(batch)
    environment, steps = environment_of(choices)
    generator = np.random.default_rng([seed, LENGTH])
    free = np.isin(steps, choices)[:, None]
    base = np.where(free, 0.6 * generator.standard_normal((len(steps), 2)), (CERTAIN, 0.0))
    reference, sampler = (base + free * width * generator.uniform(-1, 1, size=base.shape) for width in (0.4, 0.15))
    tables = map(table, (base, reference, sampler))
    return with_ties(OfSome(environment, *tables, some=_rollouts(environment, choices)), seed)


@shared
def examine_long(findings: Findings) -> tuple[str, str] | None:
    """Compare the gradient of long rollouts with the declared one, if that is what it is in graded environments.

    Returns:
        The code of the check that a difference belongs to, and its words.
    """
    for sampler in findings.samplers:
        rows = [row for row in findings.rows if row.sampler == sampler]
        several = [row for row in rows if row.length != 1]
        if not several or any(row.agrees is not True or row.method != "exact" for row in rows):
            continue
        if found := _compare(findings, max(several, key=lambda row: row.batch)):
            return found
    return None


def late(findings: Findings, code: str) -> Found | None:
    """Return the finding in long rollouts if it belongs to a check."""
    found = examine_long(findings)
    return Found(found[1]) if found and found[0] == code else None


def _compare(findings: Findings, row: Row) -> tuple[str, str] | None:
    instance = long_instance(row.batch, findings.seed)
    found, wanted = compared(findings, row, instance)
    tolerance = max(Tolerances.guard, TOLERANCES[findings.observed.dtype].gradient)
    bias = relative_bias(found, wanted, size(instance))
    if bias <= tolerance:
        return None
    where = f"In rollouts of {LENGTH} tokens ({row.sampler} sampler) the expected gradient is off by {bias:.2g} of it"
    factor = float((found * wanted).sum() / ((wanted**2).sum() or 1.0))
    if np.linalg.norm(found) <= SMALL * np.linalg.norm(wanted):
        return "KL105", f"{where}, and right in short ones: nothing is left of it."
    if np.linalg.norm(found - factor * wanted) <= 10 * tolerance * np.linalg.norm(found):
        return "KL203", f"{where}: it is {factor:.4g} times the declared one, which it is in short rollouts."
    choices = choices_of(row.batch)
    wrong = _places(found - wanted, instance, choices)
    places = f"it differs at tokens {_listed(wrong)} of {_listed(choices)}, counted from 0"
    if "reverse_kl" in findings.expect and choices[-1] not in wrong:
        return "KL205", f"{where}: {places}, so that log-ratios of much later tokens are not credited in full."
    return "KL105", f"{where}, and right in short ones: {places}."


def _places(difference: np.ndarray, instance: Instance, choices: tuple[int, ...]) -> list[int]:
    """Return the choices at whose contexts a difference is not small."""
    contexts, whole = instance.paths.contexts, np.linalg.norm(difference)
    return [t for t in choices if np.linalg.norm(difference[np.unique(contexts[:, t])]) > SMALL * whole]


def _listed(positions: Iterable[int]) -> str:
    return ", ".join(map(str, positions))
