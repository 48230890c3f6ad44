"""The parts of ∇KL(π‖ref) by who is credited with whose log-ratio: E_π[g_t u_s] for every pair of positions t ≤ s."""

from __future__ import annotations

import numpy as np

from kltest.environments import Instance
from kltest.truth.gradients import from_signal
from kltest.truth.recursions import onward, visits


def credit_pairs(instance: Instance) -> dict[tuple[int, int], np.ndarray]:
    """{(t, s): (C, V) E_π[g_t u_s]} with respect to the policy's logits, for 0 ≤ t ≤ s < horizon.

    A token that is never drawn adds nothing. All together they add up to `reverse_kl`, those with t = s to
    `local_reverse_kl`, the others to `future_reverse_kl`; a later token's log-ratio has no part in an earlier score:
    for t > s the expectation is zero.
    """
    environment, policy = instance.environment, instance.policy
    chances, log_ratio = np.exp(policy), policy - instance.reference
    brought = [log_ratio]  # what a token brings after so many steps, expected
    for _ in range(environment.horizon - 1):
        brought.append(onward(environment, (chances * brought[-1]).sum(axis=1)))
    return {
        (t, t + lag): from_signal(visit[:, None] * brought[lag], policy)
        for t, visit in enumerate(visits(environment, chances))
        for lag in range(environment.horizon - t)
    }
