"""Beyond the graded environments: the gradient and the declared one on further instances, whole or prompt by prompt.

The graded environments are mild. A loss may follow the declared gradient in all of them and another one

- once the policy has left the reference, as Huber's loss does beyond its bound;
- where next tokens are all but certain under policy, reference or both, as most are after training;
- with a large vocabulary, whose ids and ranks are large.

It is compared with the truth there, so that a declared gradient that is bounded itself, as total variation's, is right.
How far apart depends on the question. A clamp is exact and visible at any distance. A number that differs a little
where a probability is a millionth may be the small constant that guards a logarithm, and is no other gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, TypeVar

import numpy as np

from kltest.checks.check import shared, signed
from kltest.environments import Environment, Instance, Paths, bandit, sequence
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings, Row
from kltest.moments.tolerances import TOLERANCES

Setting = TypeVar("Setting")
Shifts = tuple[tuple[float, ...], tuple[float, ...]]
Sure = tuple[float, float]
VOCABULARY = 3
# Added to the logits of the first actions, of the reference and of the policy. The expectation weighs an action by its
# probability, and e⁻¹⁶ is as small as the tolerance.
FAR = ((-30.0, -6.0), (-15.0, -4.0))
NEARER = ((-12.0, -6.0), (-8.0, -4.0))
# Probability of the likeliest token under policy and reference, an entry for each prompt, beyond .95, .99 and .999: one
# of the two is sure, then both are. Log-ratios of tokens stay below 5, which training reaches, so that no clamp acts
# that is only a warning.
ONE_SURE = ((0.96, 0.5), (0.5, 0.96), (0.993, 0.65), (0.65, 0.993), (0.9992, 0.905), (0.905, 0.9992))
BOTH_SURE = ((0.993, 0.9992), (0.9992, 0.993))
# In batches, which are enumerated prompt by prompt, only the surest.
SUREST = (*ONE_SURE[-2:], BOTH_SURE[-1])
# Actions of a bandit, and those that have all of the probability if batches are enumerated.
MANY, LIKELY = 300, (41, 170, 299)
CERTAIN = 30.0
TOKEN_FIELDS = frozenset({"tokens", "logits", "ref_logits", "old_logits"})


@dataclass(frozen=True, eq=False)
class OfSome(Instance):
    """An instance of which some rollouts are enumerated; all others are all but impossible."""

    some: Paths = field(kw_only=True)

    @cached_property
    def paths(self) -> Paths:
        """The rollouts that are enumerated."""
        return self.some


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


def _worst(findings: Findings, shifts: Shifts, tolerance: Literal["gradient", "far"]) -> str:
    """Describe the far bandit with the largest bias of a loss that is right in a mild one; empty if it is right."""
    allowed = TOLERANCES[findings.observed.dtype]
    if allowed.far is None:
        return ""
    try:
        rows = findings.measure.rows("bandit", "current")
    except KltestError:
        return ""
    if not rows or any(row.agrees is not True or row.method != "exact" for row in rows):
        return ""
    found = [(0.0, "")]
    for row in rows:
        for instance in _moved(findings.measure.case(row).instances[0], shifts):
            with suppress(KltestError):  # overflows and failing calls are reported by other checks
                off = bias(findings, row, instance)
                ratios = ", ".join(signed(ratio, 3) for ratio in np.sort(instance.policy[0] - instance.reference[0]))
                words = (
                    f"In a bandit with the log-ratios {ratios} the expected gradient is off by {off:.2g} of the "
                    "declared one; it is right in milder ones."
                )
                found += [(off, words)] * (off > getattr(allowed, tolerance))
    return max(found)[1]


def _moved(instance: Instance, shifts: Shifts) -> list[Instance]:
    """The instance with its reference moved, and with its policy (and sampler) moved."""
    count = instance.environment.vocabulary
    reference, policy = (np.resize([*shift[: count - 1], *[0.0] * count], count) for shift in shifts)
    left = table(instance.policy + policy)
    return [
        replace(instance, reference=table(instance.reference + reference)),
        replace(instance, policy=left, sampler=left),
    ]


differs = shared(partial(_worst, shifts=FAR, tolerance="gradient"))
# In bandits that are less far, beyond what a small constant makes there.
differs_much = shared(partial(_worst, shifts=NEARER, tolerance="far"))


@shared
def wrong_where_sure(findings: Findings) -> str:
    """Describe the first prompt with a sure policy or reference at which the gradient is not the declared one."""
    row, allowed = _row(findings)
    if row is None or allowed is None:
        return ""
    settings = SUREST if row.batch > 1 else (*ONE_SURE, *BOTH_SURE)

    def instance_of(sure: Sequence[Sure]) -> Instance:
        generator = np.random.default_rng([findings.seed, len(settings)])
        environment = prompts(len(sure), tokens_of(row), generator)
        likeliest = np.repeat(np.array(sure), environment.n_contexts // len(sure), axis=0).T
        second = (1 - likeliest) * generator.uniform(0.45, 0.55, size=likeliest.shape)
        policy, reference = np.log(np.stack([likeliest, second, 1 - likeliest - second], axis=-1))
        return Instance.of(environment, policy, reference, policy + generator.uniform(-0.3, 0.3, size=policy.shape))

    found: list[float] = []
    with suppress(KltestError):
        found = biases(findings, row, settings, instance_of)
    for (policy, reference), off in zip(settings, found, strict=False):
        if off > allowed:
            return (
                f"Where the likeliest token has probability {policy:g} under the policy and {reference:g} under the "
                f"reference, the expected gradient is off by {off:.2g} of the declared one; it is right in the graded "
                "environments, where neither is sure."
            )
    return ""


@shared
def wrong_with_many_tokens(findings: Findings) -> str:
    """Describe a bandit of MANY actions in which the gradient is not the declared one; "" if the loss sees no token."""
    row, allowed = _row(findings)
    if row is None or allowed is None or not findings.observed.uses & TOKEN_FIELDS:
        return ""
    reward = np.random.default_rng(findings.seed).integers(2, size=(1, MANY)).astype(float)
    instance = Instance.draw(bandit(MANY, reward=reward), findings.seed)
    if row.batch > 1:
        above = np.where(np.isin(np.arange(MANY), LIKELY), CERTAIN, 0.0)
        tables = (table(logits + above) for logits in (instance.policy, instance.reference, instance.sampler))
        instance = OfSome(instance.environment, *tables, some=instance.paths.take(np.array(LIKELY)))
    with suppress(KltestError):
        if (off := bias(findings, row, instance)) > allowed:
            return (
                f"In a bandit with {MANY} actions, token ids 0 to {MANY - 1}, the expected gradient is off by "
                f"{off:.2g} of the declared one; it is right with a few."
            )
    return ""


def _row(findings: Findings) -> tuple[Row | None, float | None]:
    """Return the row to go further from and the relative bias that is allowed, None for what is not compared."""
    return right_row(findings, findings.samplers[0]), TOLERANCES[findings.observed.dtype].far
