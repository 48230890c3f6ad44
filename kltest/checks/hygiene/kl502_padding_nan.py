"""KL502: NaN or infinity at a padded position gets through."""

from functools import partial
from math import inf, nan

from kltest.checks.check import Found
from kltest.checks.hygiene.padding import Fill, apart, exchange, not_exchangeable
from kltest.identify.findings import Findings

HUGE = 1e4

moot = not_exchangeable


def examine(findings: Findings) -> Found | None:
    """Fill padding with NaN, infinities, and numbers that are no log-probs."""
    numbers = {"NaN": nan, "+inf": inf, "−inf": -inf}
    fills: dict[str, Fill] = {name: partial(apart, policy=value, others=value) for name, value in numbers.items()}
    for sign, other, size in (("", "−", HUGE), ("−", "", -HUGE)):
        name = f"{sign}{HUGE:g} for the policy and {other}{HUGE:g} for the others"
        fills[name] = partial(apart, policy=size, others=-size)
    return exchange(findings, fills)


def multiplied(logp, ref_logp, mask):
    kl = (logp - ref_logp).square() / 2
    return (kl * mask).sum(-1)
