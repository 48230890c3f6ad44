"""What a group's normalised advantages follow where rewards are 0 or 1: a utility of the prompt's success rate."""

import math


def group_weight(rate: float, size: int, *, deviation: int | None) -> float:
    """Return w(p) of E[1/n Σ_i A_i g_i] = w(p)·∇p for a group of n rollouts, each a success with probability p.

    A_i = (R_i − K/n) / s with K successes in the group. Given R_1, E[g_1] is ∇p/p or −∇p/(1 − p), so that
    w(p) = Σ_k Bin(n − 1, p)(k)·(A(1, k + 1) − A(0, k)). It is U'(p) of the utility whose expectation is followed.

    Args:
        rate: p, the probability of a success.
        size: n, rollouts in a group.
        deviation: None if A is not divided, (n − 1)/n then; else what is taken off n in the standard deviation s: 0, or
            1 as by `torch.std`. A group without a deviation has A = 0.

    Source: derived here; Mroueh 2025 (arXiv 2503.06639) has the limit of large groups.
    """

    def advantage(success: int, successes: int) -> float:
        centred = success - successes / size
        if deviation is None:
            return centred
        spread = math.sqrt(successes * (size - successes) / size / (size - deviation))
        return centred / spread if spread else 0.0

    chances = (math.comb(size - 1, k) * rate**k * (1 - rate) ** (size - 1 - k) for k in range(size))
    return sum(chance * (advantage(1, k + 1) - advantage(0, k)) for k, chance in enumerate(chances))
