"""KL502: NaN or infinity at a padded position gets through."""

from functools import partial
from math import inf, nan

from kltest.checks.check import Found
from kltest.checks.hygiene.padding import Fill, exchange, not_exchangeable
from kltest.checks.hygiene.padding import numbers as written
from kltest.identify.findings import Findings

HUGE = 1e4

moot = not_exchangeable


def examine(findings: Findings) -> Found | None:
    """Fill padding with NaN, infinities, and numbers that are no log-probs."""
    special = {"NaN": nan, "+inf": inf, "−inf": -inf}
    fills: dict[str, Fill] = {name: partial(written, policy=value, others=value) for name, value in special.items()}
    for sign, other, size in (("", "−", HUGE), ("−", "", -HUGE)):
        name = f"{sign}{HUGE:g} for the policy and {other}{HUGE:g} for the others"
        fills[name] = partial(written, policy=size, others=-size)
    return exchange(findings, fills)


def multiplied(logp, ref_logp, mask):
    kl = (logp - ref_logp).square() / 2
    return (kl * mask).sum(-1)
