"""The gradient of each rollout of a small environment with respect to the policy's logits, one row a rollout."""

from typing import Any

import numpy as np

from kltest.environments import Instance, Paths
from kltest.estimators.spec import Credit, Placement
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.differentiate import differentiate
from kltest.rollout import Rollout


def gradients(
    estimator: str,
    instance: Instance,
    paths: Paths,
    placement: Placement | None = None,
    credit: Credit | None = None,
    **arguments: Any,
) -> np.ndarray:
    """(N, C·V) what a registered estimator gives for each rollout alone, which must be the policy's own.

    `placement` and `credit` default to what the estimator says of itself. Only for estimators that treat the rows of
    a batch apart and average over them.
    """
    loss = resolve(estimator, Call(placement, credit, arguments=arguments))
    live = paths.mask if paths.padded else None
    called = differentiate(loss, Rollout.of(instance, paths), live, factor=float(len(paths)))
    return projected(instance, paths, called.logp, called.logits)


def projected(
    instance: Instance, paths: Paths, sampled: np.ndarray | None, full: np.ndarray | None = None
) -> np.ndarray:
    """(N, C·V) Σ_t sampled_t·∇log π(y_t|s_t) + Σ_t Σ_v full_tv·∇log π(v|s_t); zero where a rollout has no token."""
    policy = np.exp(instance.policy)
    rows = np.arange(len(paths))[:, None]
    table = np.zeros((len(paths), *policy.shape))
    if sampled is not None:
        np.add.at(table, (rows, paths.contexts, paths.tokens), sampled)
    if full is not None:
        np.add.at(table, (rows, paths.contexts), full)
    table -= policy * table.sum(axis=2, keepdims=True)
    return table.reshape(len(paths), -1)
