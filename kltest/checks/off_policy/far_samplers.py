"""Samplers that are far from the policy: is the gradient still the declared one there?

The graded samplers are mild, so that no cap, window or mask on the ratio of policy to sampler acts. Here some tokens
are e^d times as likely under the policy as under the sampler, and others e^−d times, with d up to that of BEYOND[-1].
The reference stays near the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kltest.checks.beyond import VOCABULARY, biases, prompts, right_row, tokens_of
from kltest.checks.check import Found, shared
from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.moments.tolerances import TOLERANCES

# |log π/μ| of the first token and of the second, an entry for each prompt. Training reaches 5 a token and 10 a rollout;
# a clamp at 20 is out of reach.
REACHED = ((1.0, 1.0), (2.5, 2.5), (5.0, 0.0), (5.0, 5.0))
BEYOND = ((7.0, 0.0), (10.0, 0.0), (14.0, 0.0), (19.0, 0.0))
HALVINGS = 6

Pair = tuple[float, float]


@dataclass(frozen=True, eq=False)
class FarSamplers:
    """The declared gradient of one row, and the loss's, if the sampler is far from the policy."""

    findings: Findings
    row: Row

    @cached_property
    def tokens(self) -> int:
        return tokens_of(self.row)

    def biases(self, pairs: Sequence[Pair]) -> list[float]:
        """Relative bias at each pair of distances."""
        return biases(self.findings, self.row, pairs, self._instance)

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
        allowed = TOLERANCES[self.findings.observed.dtype].far_sampler
        return allowed is not None and bias > allowed

    def _instance(self, pairs: Sequence[Pair]) -> Instance:
        """A prompt for each pair: the first action e^d times as likely as under the sampler, the second e^−d times."""
        generator = np.random.default_rng([self.findings.seed, VOCABULARY])
        environment = prompts(len(pairs), self.tokens, generator)
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
    row = right_row(findings, "stale")
    if row is None or TOLERANCES[findings.observed.dtype].far_sampler is None:
        return None
    far = FarSamplers(findings, row)
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
