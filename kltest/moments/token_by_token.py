"""Exact moments of a token-by-token loss over every rollout, from one call for each context and token.

Such a loss has the gradient h(c, v) at each token of a rollout. P(c, v) is the probability that a rollout passes
through a context and token. If no two tokens of a rollout share a context,

    E[A(c, v)] = P·h    and    E‖ĝ‖² = Σ_(c,v) P·h²·‖∇log π(v|c)‖².

If some do, dynamic programming adds their inner products. Reported values are summed along every rollout. Only
estimators that are registered as token by token come here, and whole rollouts, drawn at random, are compared.
"""

from __future__ import annotations

import numpy as np

from kltest.environments import Instance
from kltest.environments.policies import softmax_gradient
from kltest.loss.calling import Loss
from kltest.moments.dynamic_programming import call_on_pairs, compare
from kltest.moments.horizon import Horizon
from kltest.moments.moments import Expectation, Moments
from kltest.moments.projection import Projection

# Contexts of an environment in which rollouts may come back to one: the visits between all pairs are a table.
FEW_CONTEXTS = 200


def applies(loss: Loss, instance: Instance) -> bool:
    """True if the loss is declared token by token, is placed in the loss, and its tables are small."""
    declared = getattr(loss, "spec", None)
    return (
        declared is not None
        and declared.per_token
        and loss.placement == "loss"
        and "logits" not in loss.takes
        and (instance.environment.tree or instance.environment.n_contexts <= FEW_CONTEXTS)
    )


def from_tables(loss: Loss, instance: Instance, sampler: str, padding: int, seed: int) -> Moments:
    """E[ĝ] and E‖ĝ‖² of a batch of one rollout; arguments as for `exact`.

    Raises:
        UsageError: The loss depends on more than each token's own fields.
    """
    pairs = call_on_pairs(loss, instance, sampler, padding, seed)
    compare(loss, instance, sampler, pairs, padding, seed)
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    if instance.environment.tree:
        passing = np.zeros(instance.policy.shape)
        each = np.broadcast_to(weights[:, None], paths.shape)
        paths.collect(np.where(paths.mask, each, 0.0) if paths.padded else each, passing)
        projection = Projection(instance.policy, distinct=True)
        projection.table = passing * pairs.sampled
        projection.squares = projection.table * pairs.sampled
        gradient, second_moment = projection.gradient, projection.second_moment
    else:
        horizon = Horizon(instance.environment, np.exp(instance.behaviour(sampler)))
        table = horizon.visits[:, None] * horizon.chances * pairs.sampled
        gradient = softmax_gradient(table, instance.policy)
        second_moment = horizon.second_moment(pairs.sampled, instance.policy)
    return Moments(
        gradient=gradient,
        second_moment=second_moment,
        rollouts=len(paths),
        reduction=pairs.reduction,
        dtype=pairs.dtype,
        leaves=pairs.leaves,
        value=Expectation.of(paths.along(pairs.cost), weights),
    )
