"""Sampled grading against the loss's own forward and backward, and the samples that controls save."""

import numpy as np

from benchmarks.environments import forward_backward, loss
from benchmarks.measure import Row, compare
from kltest.environments import Instance, ngram, ragged, sequence
from kltest.loss.calling import Loss
from kltest.rollout import Rollout
from kltest.samples.sampled import Sampled, sampled
from kltest.truth import gradient

ENVIRONMENTS = {"V=3, T=3": sequence(3, 3), "ragged, V=8, T≤3": ragged(8, 3), "2-gram, V=4, T=50": ngram(4, 50, 2)}
# Each with what it follows; top-k-detached is none of its controls.
LOSSES = {
    "k3-loss": "local_forward_kl",
    "top-k-detached": "local_reverse_kl",
}
SAMPLES = 20_000
MARGIN = 0.05
# Far more than are drawn where the question is how many are needed.
ENOUGH = 3_000_000


def main() -> list[Row]:
    rows = []
    for case, environment in ENVIRONMENTS.items():
        instance = Instance.draw(environment, 0)
        for name, followed in LOSSES.items():
            taken, target = loss(name), gradient(followed, instance)
            rollouts = batch(instance, taken)
            for controls in (True, False):
                rows.append(
                    compare(
                        f"{SAMPLES:,} samples{' with controls' if controls else ''} / forward and backward of as many",
                        f"{case}: {name}",
                        lambda given=(taken, instance, target), controls=controls: undecided(*given, controls=controls),
                        lambda taken=taken, rollouts=rollouts: forward_backward(taken, rollouts),
                        bound=None,
                        rounds=3,
                    )
                )
            rows.append(saved(f"{case}: {name}", taken, instance, target))
    return rows


def batch(instance: Instance, taken: Loss) -> Rollout:
    """As many rollouts as are sampled, with the fields that the loss takes."""
    paths = instance.environment.sample(instance.policy, SAMPLES, np.random.default_rng(0))
    rollouts = Rollout.of(instance, paths)
    for name in {*taken.takes, "mask"}:
        rollouts.peek(name)
    return rollouts


def undecided(taken: Loss, instance: Instance, target: np.ndarray, *, controls: bool) -> Sampled:
    """SAMPLES samples of what is exactly right, to an accuracy that they cannot reach."""
    found = sampled(taken, instance, target=target, margin=1e-9, samples=SAMPLES, controls=controls)
    assert found.samples == SAMPLES
    return found


def saved(case: str, taken: Loss, instance: Instance, target: np.ndarray) -> Row:
    """Samples until the gradient is confirmed, with controls over without; counts stand where others have seconds."""
    controlled, plain = (
        float(sampled(taken, instance, target=target, margin=MARGIN, samples=ENOUGH, controls=controls).samples)
        for controls in (True, False)
    )
    ratio = controlled / plain
    claim = f"samples until confirmed within {MARGIN:.0%}, controlled / plain"
    return Row(claim, case, ratio, ratio, ratio, None, True, None, controlled, plain)
