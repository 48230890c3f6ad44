"""Exact gradient and variance over all rollouts, against the loss's own forward and backward over the same rows."""

from functools import partial

import torch

from benchmarks.environments import FIXED, OTHERS, built, drawn, forward_backward, in_own_process, least, loss, peak
from benchmarks.measure import Row, compare
from kltest.moments import exact

CLAIM = "exact moments / the loss's own forward and backward"
ENVIRONMENTS = (("fixed length", FIXED, 1.5), ("ragged or shared contexts", OTHERS, 3.0))


def main() -> list[Row]:
    rows = []
    for kind, environments, bound in ENVIRONMENTS:
        for case, environment in environments.items():
            instance = drawn(environment)
            for name in ("k3-loss", "k2-loss"):
                for declared in (True, False):
                    taken = loss(name, declared=declared)
                    rollout = built(instance, taken)
                    weights = torch.from_numpy(instance.rollout_weights("current"))
                    # A registered estimator is called on contexts and tokens alone, and need not be called so often.
                    floor = None if declared else partial(least, taken, rollout, weights)
                    rows.append(
                        compare(
                            f"{CLAIM}, {kind}",
                            f"{case}: {name}{'' if declared else ' as a stranger’s function'}",
                            partial(exact, taken, instance),
                            partial(forward_backward, taken, rollout),
                            bound=bound,
                            floor=floor,
                            rounds=7,
                        )
                    )
    rows += [_memory(case, declared) for case in FIXED for declared in (True, False)]
    return rows


def _memory(case: str, declared: bool) -> Row:
    ratio = in_own_process(peak_memory, case, declared)
    name = f"{case}: k3-loss{'' if declared else ' as a stranger’s function'}"
    return Row(
        "peak memory of exact moments / fields of the loss", name, ratio, ratio, ratio, 6.0, True, None, 0.0, 0.0
    )


def peak_memory(case: str, declared: bool) -> float:
    """Peak growth of the process, in units of the bytes of logp, ref_logp and mask."""
    instance = drawn(FIXED[case])
    taken = loss("k3-loss", declared=declared)
    rows, steps = instance.paths.shape
    return peak(lambda: exact(taken, instance)) / (3 * 8 * rows * steps)
