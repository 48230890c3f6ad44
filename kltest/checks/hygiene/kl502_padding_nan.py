"""KL502: NaN or infinity at a padded position gets through."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, nan

import torch
from torch import Tensor

from kltest.checks.check import Found
from kltest.checks.demonstrations import gradient, of_calls, rollout, value
from kltest.checks.hygiene.padding import exchange, no_padding
from kltest.counterexample.demonstration import Demonstration
from kltest.identify.findings import Findings

moot = no_padding


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


def demonstrate() -> Demonstration:
    calm, broken = (rollout((log(0.8), log(0.5)), (log(0.5), padded), mask=(1.0, 0.0)) for padded in (log(0.5), nan))
    return of_calls(
        "one live token, π = 0.8, ref = 0.5, and one of padding, π = 0.5",
        {"as written": multiplied, "fixed": cut_out},
        {
            "value, ref = 0.5 in the padding": (calm, value),
            "value, NaN in the padding": (broken, value),
            "gradient at the padding": (broken, gradient(1)),
        },
    )
