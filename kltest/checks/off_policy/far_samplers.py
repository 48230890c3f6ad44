"""Samplers that are far from the policy: is the gradient still the declared one there?

The graded samplers are mild, so that no cap, window or mask on the ratio of policy to sampler acts. Here some tokens
are e^d times as likely under the policy as under the sampler, and others e^−d times, with d up to that of BEYOND[-1].
The reference stays near the policy.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kltest.checks.beyond import VOCABULARY, biases, prompts, right_row, tokens_of
from kltest.checks.check import Found, shared
from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.moments.tolerances import TOLERANCES
from kltest.report import Level

# |log π/μ| of the first token and of the second, an entry for each prompt. Training reaches 5 a token and 10 a rollout;
# a clamp at 20 is out of reach.
REACHED = ((1.0, 1.0), (2.5, 2.5), (5.0, 0.0), (5.0, 5.0))
BEYOND = ((7.0, 0.0), (10.0, 0.0), (14.0, 0.0), (19.0, 0.0))
HALVINGS = 6

Pair = tuple[float, float]


Biases = Callable[[Sequence[Pair]], list[float]]


@shared
def examine_far(findings: Findings) -> Found | None:
    """Compare the gradient with the declared one, if that is what it is in all graded environments."""
    row, allowed = right_row(findings, "stale"), TOLERANCES[findings.observed.dtype].far_sampler
    if row is None or allowed is None:
        return None
    tokens = tokens_of(row)
    biases_at: Biases = partial(biases, findings, row, instance_of=partial(_instance, findings.seed, tokens))
    reached = REACHED[: 2 + tokens]
    stages: tuple[tuple[Pair, tuple[Pair, ...], Level], ...] = (
        ((0.0, 0.0), reached, "error"),
        (REACHED[2], BEYOND, "warning"),
    )
    for start, pairs, level in stages:
        try:
            found = biases_at(pairs)
        except KltestError as error:
            if level == "error":
                raise
            return Found(f"log-ratios up to {BEYOND[-1][0]:g} could not be tried: {error}", "inconclusive", level)
        for near, pair, bias in zip((start, *pairs), pairs, found, strict=False):
            if bias > allowed:
                begins, of = _begins(biases_at, allowed, tokens, near, pair)
                return Found(
                    f"Rollouts come from a sampler farther from the policy than in the graded environments: from "
                    f"log-ratios of policy to sampler of about ±{begins:.2g} {of} the expected gradient is not the "
                    f"declared one; at ±{sum(pair[:tokens]):g} it is off by {bias:.2g} of it. It is right with less.",
                    level=level,
                )
    return None


def _begins(biases_at: Biases, allowed: float, tokens: int, agrees: Pair, differs: Pair) -> tuple[float, str]:
    """Return the log-ratio from which on the gradient differs, by bisection, and whether of one token or summed."""

    def wrong(pair: Pair) -> bool:
        return biases_at((pair,))[0] > allowed

    of, alone = "of one token", (differs[0], 0.0)
    if tokens == 1 or alone == differs or wrong(alone):
        agrees, differs = (agrees[0], 0.0), alone
    else:
        agrees, of = alone, "summed over a rollout"
    near, far = np.array(agrees), np.array(differs)
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (near, middle) if wrong((float(middle[0]), float(middle[1]))) else (middle, far)
    return float(far[:tokens].sum()), of


def _instance(seed: int, tokens: int, pairs: Sequence[Pair]) -> Instance:
    """A prompt for each pair: the first action e^d times as likely as under the sampler, the second e^−d times."""
    generator = np.random.default_rng([seed, VOCABULARY])
    environment = prompts(len(pairs), tokens, generator)
    later = environment.n_contexts // len(pairs) - 1
    distances = np.concatenate([[first, *[second] * later] for first, second in pairs])
    often, seldom = generator.uniform(0.3, 0.45, size=(2, len(distances))), np.exp(-distances)
    first = np.stack([often[0], often[0] * seldom])
    second = np.stack([often[1] * seldom, often[1]])
    policy, sampler = np.log(np.stack([first, second, 1 - first - second], axis=2))
    reference = policy + generator.uniform(-0.6, 0.6, size=policy.shape)
    return Instance.of(environment, policy, reference, sampler)
