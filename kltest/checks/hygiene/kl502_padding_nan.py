"""KL502: NaN or infinity at a padded position gets through."""

from collections.abc import Callable
from math import inf, nan

import torch
from torch import Tensor

from kltest.checks.check import Found
from kltest.checks.hygiene.padding import exchange, not_exchangeable
from kltest.identify.findings import Findings

moot = not_exchangeable


def examine(findings: Findings) -> Found | None:
    """Fill padding with NaN and infinities."""
    return exchange(findings, {"NaN": _constant(nan), "+inf": _constant(inf), "−inf": _constant(-inf)})


def _constant(value: float) -> Callable[[str, Tensor], Tensor]:
    return lambda name, dead: dead if name == "tokens" else torch.full_like(dead, value)


def multiplied(logp, ref_logp, mask):
    kl = (logp - ref_logp).square() / 2
    return (kl * mask).sum(-1)


def cut_out(logp, ref_logp, mask):
    kl = (logp - ref_logp).where(mask != 0, 0.0).square() / 2
    return kl.sum(-1)
