"""Samplers that are far from the policy: is the gradient still the declared one there?

The graded samplers are mild, so that no cap, window or mask on the ratio of policy to sampler acts. Here some tokens
are e^d times as likely under the policy as under the sampler, and others e^−d times, with d up to DISTANCES[-1]. The
reference stays near the policy.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kltest.checks.check import Found, shared
from kltest.environments import Instance, sequence
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings, Row
from kltest.moments.tolerances import TOLERANCES

# |log π/μ| of the first token and of the second, an entry for each prompt. Training reaches 5 a token and 10 a rollout;
# a clamp at 20 is out of reach.
REACHED = ((1.0, 1.0), (2.5, 2.5), (5.0, 0.0), (5.0, 5.0))
BEYOND = ((7.0, 0.0), (10.0, 0.0), (14.0, 0.0), (19.0, 0.0))
# Relative bias: a constant of 1e-8 beside the sampler's probability makes less than that at a log-ratio of 10.
LEAST = 1e-3
HALVINGS = 6
VOCABULARY = 3

Pair = tuple[float, float]


@dataclass(frozen=True, eq=False)
class FarSamplers:
    """The declared gradient of one row, and the loss's, if the sampler is far from the policy."""

    findings: Findings
    row: Row

    @cached_property
    def tokens(self) -> int:
        """Tokens of a rollout: two if the loss agrees in rollouts of several and treats them apart, else one."""
        return 1 if self.row.length == 1 or self.row.batch > 1 else 2

    def biases(self, pairs: tuple[Pair, ...]) -> list[float]:
        """Relative bias at each pair of distances, in one environment if rollouts are graded one by one."""
        if self.row.batch > 1:
            return [bias for pair in pairs for bias in self._biases((pair,))]
        return self._biases(pairs)

    def begins(self, agrees: Pair, differs: Pair) -> float:
        """Return the sum of the two distances from which the gradient differs, by bisection between two pairs."""
        near, far = np.array(agrees), np.array(differs)
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            if self.wrong(self.biases(((float(middle[0]), float(middle[1])),))[0]):
                far = middle
            else:
                near = middle
        return float(far[: self.tokens].sum())

    def wrong(self, bias: float) -> bool:
        return bias > max(LEAST, TOLERANCES[self.findings.observed.dtype].gradient)

    def _biases(self, pairs: tuple[Pair, ...]) -> list[float]:
        instance = self._instance(pairs)
        found = self.findings.measure.expected(self.row, instance).gradient
        self.findings.see(instance, "stale", self.row.batch)
        wanted = target(self.findings.expect, instance, "stale")
        parts = (np.split(array, len(pairs)) for array in (found, wanted))
        unit = size(instance) / len(pairs)
        return [relative_bias(one, other, unit) for one, other in zip(*parts, strict=True)]

    def _instance(self, pairs: tuple[Pair, ...]) -> Instance:
        """A prompt for each pair: the first action e^d times as likely as under the sampler, the second e^−d times."""
        generator = np.random.default_rng([self.findings.seed, VOCABULARY])
        prompts = np.full(len(pairs), 1 / len(pairs))
        environment = sequence(VOCABULARY, self.tokens, prompts=prompts, name="far sampler")
        reward = generator.integers(2, size=environment.reward.shape).astype(float)
        environment = replace(environment, reward=reward)
        later = environment.n_contexts // len(pairs) - 1
        distances = np.concatenate([[first, *[second] * later] for first, second in pairs])
        often, seldom = generator.uniform(0.3, 0.45, size=(2, len(distances))), np.exp(-distances)
        first = np.stack([often[0], often[0] * seldom])
        second = np.stack([often[1] * seldom, often[1]])
        policy, sampler = np.log(np.stack([first, second, 1 - first - second], axis=2))
        reference = policy + generator.uniform(-0.6, 0.6, size=policy.shape)
        return Instance.of(environment, policy, reference, sampler)


@shared
def examine_far(findings: Findings) -> Found | None:
    """Compare the gradient with the declared one, if that is what it is in all graded environments."""
    rows = [row for row in findings.rows if row.sampler == "stale"]
    usable = findings.observed.dtype in ("float64", "float32")
    if not rows or not usable or any(row.agrees is not True or row.method != "exact" for row in rows):
        return None
    far = FarSamplers(findings, max(rows, key=lambda row: (row.batch, row.length is not None, row.length or 0)))
    near, reached = (0.0, 0.0), REACHED[: 2 + far.tokens]
    for pair, bias in zip(reached, far.biases(reached), strict=True):
        if far.wrong(bias):
            return Found(_words(far, near, pair, bias), level="error")
        near = pair
    try:
        beyond = far.biases(BEYOND)
    except KltestError as error:
        return Found(f"log-ratios up to {BEYOND[-1][0]:g} could not be tried: {error}", "inconclusive", "warning")
    near = REACHED[2]
    for pair, bias in zip(BEYOND, beyond, strict=True):
        if far.wrong(bias):
            return Found(_words(far, near, pair, bias), level="warning")
        near = pair
    return None


def _words(far: FarSamplers, agrees: Pair, differs: Pair, bias: float) -> str:
    """Tell from which log-ratio on, of one token or summed, and how far off."""
    whole = sum(differs[: far.tokens])
    of = "of one token"
    alone = (differs[0], 0.0)
    if far.tokens == 1 or alone == differs or far.wrong(far.biases((alone,))[0]):
        agrees, differs = (agrees[0], 0.0), alone
    else:
        agrees, of = alone, "summed over a rollout"
    return (
        f"Rollouts come from a sampler farther from the policy than in the graded environments: from log-ratios "
        f"of policy to sampler of about ±{far.begins(agrees, differs):.2g} {of} the expected gradient is not the "
        f"declared one; at ±{whole:g} it is off by {bias:.2g} of it. It is right with less."
    )
