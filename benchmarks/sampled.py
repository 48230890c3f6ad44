"""Sampled grading against the loss's own forward and backward, and the samples that controls save."""

from functools import partial
from itertools import product

import numpy as np

from benchmarks.environments import built, forward_backward, loss
from benchmarks.measure import Row, compare, from_pairs
from kltest.environments import Instance, ngram, ragged, sequence
from kltest.samples.sampled import Sampled, sampled
from kltest.truth import gradient

ENVIRONMENTS = {"V=3, T=3": sequence(3, 3), "ragged, V=8, T≤3": ragged(8, 3), "2-gram, V=4, T=50": ngram(4, 50, 2)}
# Each with what it follows; top-k-detached is none of its controls.
LOSSES = {"k3-loss": "local_forward_kl", "top-k-detached": "local_reverse_kl"}
SAMPLES = 20_000
MARGIN = 0.05
# Far more than are drawn where the question is how many are needed.
ENOUGH = 3_000_000


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    rows = []
    for (where, environment), (name, followed) in product(ENVIRONMENTS.items(), LOSSES.items()):
        instance, taken, case = Instance.draw(environment, 0), loss(name), f"{where}: {name}"
        drawn = partial(sampled, taken, instance, target=gradient(followed, instance))
        # As many rollouts as are sampled, with the fields that the loss takes.
        rollouts = built(instance, taken, environment.sample(instance.policy, SAMPLES, np.random.default_rng(0)))
        for controls in (True, False):
            claim = f"{SAMPLES:,} samples{' with controls' if controls else ''} / forward and backward of as many"
            # Of what is exactly right, to an accuracy that they cannot reach.
            ours = partial(drawn, margin=1e-9, samples=SAMPLES, controls=controls)
            rows.append(compare(claim, case, ours, partial(forward_backward, taken, rollouts), bound=None, rounds=3))
        found: list[Sampled] = [drawn(margin=MARGIN, samples=ENOUGH, controls=controls) for controls in (True, False)]
        claim = f"samples until confirmed within {MARGIN:.0%}, controlled / plain"
        # Counts stand where others have seconds.
        rows.append(from_pairs(claim, case, [(found[0].samples, found[1].samples)], bound=None))
    return rows
