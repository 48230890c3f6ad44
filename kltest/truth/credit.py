"""The parts E_π[g_t u_s] of ∇KL(π‖ref), for every pair of positions t ≤ s."""

from __future__ import annotations

import numpy as np

from kltest.environments import Instance
from kltest.truth.gradients import from_signal
from kltest.truth.recursions import onward, visits


def credit_pairs(instance: Instance) -> dict[tuple[int, int], np.ndarray]:
    """Return E_π[g_t u_s] for each pair of positions, with g_t the score of token t and u_s the log-ratio of token s.

    All pairs together sum to `reverse_kl`, those with t = s to `local_reverse_kl`, the others to `future_reverse_kl`.
    For t > s the expectation is zero: earlier log-ratios do not depend on a later token.

    Returns:
        {(t, s): gradient (C, V) with respect to the policy's logits} for 0 ≤ t ≤ s < horizon; pairs beyond the end of
        every rollout may be missing.
    """
    environment, policy = instance.environment, instance.policy
    chances, log_ratio = np.exp(policy), policy - instance.reference
    brought = [log_ratio]  # expected log-ratio after 0, 1, … further steps
    for _ in range(environment.horizon - 1):
        brought.append(onward(environment, (chances * brought[-1]).sum(axis=1)))
    return {
        (t, t + lag): from_signal(visit[:, None] * brought[lag], policy)
        for t, visit in enumerate(visits(environment, chances))
        for lag in range(environment.horizon - t)
    }
