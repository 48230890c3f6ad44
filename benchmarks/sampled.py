"""Sampled grading against the loss's own forward and backward, and the samples that pairing saves."""

import numpy as np

from benchmarks.environments import forward_backward, loss
from benchmarks.measure import Row, compare
from kltest.environments import Instance, ngram, ragged, sequence
from kltest.loss.calling import Loss
from kltest.moments import Sampled, sampled
from kltest.rollout import Rollout
from kltest.truth import gradient

ENVIRONMENTS = {"V=3, T=3": sequence(3, 3), "ragged, V=8, T≤3": ragged(8, 3), "2-gram, V=4, T=50": ngram(4, 50, 2)}
# Each with what it follows; top-k-detached is none of the estimators that it is paired with.
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
            for pair in (True, False):
                rows.append(
                    compare(
                        f"{SAMPLES:,} samples{' with pairing' if pair else ''} / forward and backward on as many rows",
                        f"{case}: {name}",
                        lambda given=(taken, instance, target), pair=pair: undecided(*given, pair=pair),
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


def undecided(taken: Loss, instance: Instance, target: np.ndarray, *, pair: bool) -> Sampled:
    """SAMPLES samples of what is exactly right, to an accuracy that they cannot reach."""
    accuracy = 1e-9 * float(np.linalg.norm(target))
    found = sampled(taken, instance, target=target, accuracy=accuracy, samples=SAMPLES, pair=pair)
    assert found.samples == SAMPLES
    return found


def saved(case: str, taken: Loss, instance: Instance, target: np.ndarray) -> Row:
    """Samples until the gradient is confirmed, with pairing over without; counts stand where others have seconds."""
    accuracy = MARGIN * float(np.linalg.norm(target))
    paired, plain = (
        float(sampled(taken, instance, target=target, accuracy=accuracy, samples=ENOUGH, pair=pair).samples)
        for pair in (True, False)
    )
    ratio = paired / plain
    claim = f"samples until confirmed within {MARGIN:.0%}, paired / plain"
    return Row(claim, case, ratio, ratio, ratio, None, True, None, paired, plain)
