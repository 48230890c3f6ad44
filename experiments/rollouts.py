"""The gradient of each rollout of a small environment with respect to the policy's logits, one row a rollout."""

import numpy as np

from kltest.environments import Instance, Paths
from kltest.estimators.spec import Credit, Placement
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.differentiate import differentiate
from kltest.moments.projection import each_gradient
from kltest.rollout import Rollout


def gradients(
    estimator: str, instance: Instance, paths: Paths, placement: Placement | None = None, credit: Credit | None = None
) -> np.ndarray:
    """(N, C·V) what a registered estimator gives for each rollout alone, which must be the policy's own.

    `placement` and `credit` default to what the estimator says of itself. Only for estimators that treat the rows of
    a batch apart and average over them.
    """
    live = paths.mask if paths.padded else None
    loss = resolve(estimator, Call(placement, credit))
    called = differentiate(loss, Rollout.of(instance, paths), live, factor=float(len(paths)))
    return each_gradient(paths, instance.policy, called.logp, called.logits).reshape(len(paths), -1)


def projected(instance: Instance, sampled: np.ndarray, full: np.ndarray | None = None) -> np.ndarray:
    """(N, C·V) Σ_t sampled_t·∇log π(y_t|s_t) + Σ_t Σ_v full_tv·∇log π(v|s_t) of every rollout."""
    return each_gradient(instance.paths, instance.policy, sampled, full).reshape(len(instance.paths), -1)


def moments(weights: np.ndarray, each: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean (D,) and total variance of rows (N, D) with chances (N,)."""
    mean = weights @ each
    return mean, float(weights @ ((each - mean) ** 2).sum(axis=1))


def to_go(costs: np.ndarray) -> np.ndarray:
    """(N, T) sums of a token's cost and all later ones."""
    return costs[:, ::-1].cumsum(axis=1)[:, ::-1]
