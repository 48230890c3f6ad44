"""KL502: NaN or infinity at a padded position gets through."""

from math import inf, nan

from kltest.checks.check import Found
from kltest.checks.hygiene import kl501_padding_leak
from kltest.checks.hygiene.kl501_padding_leak import Fills, exchange
from kltest.identify.findings import Findings

HUGE = 1e4
FILLS: Fills = {
    "NaN": (nan, nan),
    "+inf": (inf, inf),
    "−inf": (-inf, -inf),
    "10000 for the policy and −10000 for the others": (HUGE, -HUGE),
    "−10000 for the policy and 10000 for the others": (-HUGE, HUGE),
}

moot = kl501_padding_leak.moot


def examine(findings: Findings) -> Found | None:
    """Fill padding with NaN, infinities, and numbers that are no log-probs."""
    return exchange(findings, FILLS)


def multiplied(logp, ref_logp, mask):
    kl = (logp - ref_logp).square() / 2
    return (kl * mask).sum(-1)
