"""Tokens that the graded environments lack: all but certain ones, and those of a large vocabulary.

After training most next tokens are all but certain under policy, reference or both, and token ids are large. A loss may
leave out what is certain, or what has a large id or a low rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kltest.checks.beyond import bias, biases, prompts, right_row, tokens_of
from kltest.checks.check import shared
from kltest.environments import Instance, Paths, bandit
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.moments.tolerances import TOLERANCES

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

Sure = tuple[float, float]


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

    try:
        found = biases(findings, row, settings, instance_of)
    except KltestError:  # overflows and failing calls are reported by other checks
        return ""
    for (policy, reference), off in zip(settings, found, strict=True):
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
        instance = OfLikelyTokens(instance.environment, *tables)
    try:
        off = bias(findings, row, instance)
    except KltestError:
        return ""
    if off <= allowed:
        return ""
    return (
        f"In a bandit with {MANY} actions, token ids 0 to {MANY - 1}, the expected gradient is off by {off:.2g} of "
        "the declared one; it is right with a few."
    )


@dataclass(frozen=True, eq=False)
class OfLikelyTokens(Instance):
    """A bandit whose rollouts are the likely tokens only."""

    @cached_property
    def paths(self) -> Paths:
        return self.environment.enumerate().take(np.array(LIKELY))


def _row(findings: Findings) -> tuple[Row | None, float | None]:
    """Return the row to go further from and the relative bias that is allowed, None for what is not compared."""
    return right_row(findings, findings.samplers[0]), TOLERANCES[findings.observed.dtype].far
