"""KL503: legal log-ratios give a value or a gradient that is not finite."""

from __future__ import annotations

import numpy as np
import torch

from kltest.checks.check import Found
from kltest.checks.demonstrations import Reading, gradient, of_calls, rollout, value
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.checks.hygiene.log_ratios import batch_of, companions
from kltest.counterexample.demonstration import Demonstration
from kltest.identify.findings import Findings
from kltest.rollout import Rollout

SIZES = (5.0, 30.0, 100.0, 1000.0)

moot = not_comparable


def examine(findings: Findings) -> Found | None:
    experiment = findings.measure.experiment()
    words = []
    for size in SIZES:
        for u in (size, -size):
            result = experiment.call(batch_of([u], companions(findings), length=1))
            total, parts = float(result.value.sum()), [g[result.live].flatten() for g in result.gradients.values()]
            bad = [f"the value is {total}"] if not np.isfinite(total) else []
            flat = torch.cat(parts) if parts else torch.zeros(1)
            if not torch.isfinite(flat).all():
                bad.append(f"the gradient is {flat[~torch.isfinite(flat)][0].item()}")
            shown = f"{u:g}".replace("-", "−")
            if bad:
                words.append(f"at u = {shown} {' and '.join(bad)}")
    if not words:
        return None
    precision = f" (in {result.outcome.dtype})" if result.outcome.dtype != "float64" else ""
    return Found(f"With u = logp − ref_logp: {'; '.join(words)}{precision}.")


def k3_with_ratio(logp, ref_logp, old_logp):
    log_ratio = logp - ref_logp
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return (logp - old_logp).exp() * k3


def k2_with_ratio(logp, ref_logp, old_logp):
    log_ratio = logp - ref_logp
    return (logp - old_logp).exp().detach() * log_ratio.square() / 2


def demonstrate() -> Demonstration:
    rows: dict[str, tuple[Rollout, Reading]] = {}
    for size in (5, 1000):
        batch = rollout((-0.5 - size,), (-0.5,))
        rows[f"value at u = −{size}"] = (batch, value)
        rows[f"gradient at u = −{size}"] = (batch, gradient(0))
    return of_calls(
        "one token, u = logp − ref_logp, the sampler is the policy",
        {"as written": k3_with_ratio, "fixed": k2_with_ratio},
        rows,
    )
