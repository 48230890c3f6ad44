"""KL503: legal log-ratios give a value or a gradient that is not finite.

Large ones are extreme input; 0, where the policy is the reference, is the first step of training.
"""

import numpy as np
import torch

from kltest.checks.check import Found, signed
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.checks.hygiene.log_ratios import batch_of, companions
from kltest.identify.findings import Findings

LOG_RATIOS = (0.0, 5.0, -5.0, 30.0, -30.0, 100.0, -100.0, 1000.0, -1000.0)

moot = not_comparable


def examine(findings: Findings) -> Found | None:
    experiment = findings.measure.experiment()
    words, at_the_start = [], False
    for u in LOG_RATIOS:
        result = experiment.call(batch_of([u], companions(findings), length=1))
        total, parts = float(result.value.sum()), [part[result.live].flatten() for part in result.gradients.values()]
        flat = torch.cat([torch.zeros(1), *parts])
        bad = [] if np.isfinite(total) else [f"the value is {total}"]
        bad += [f"the gradient is {number}" for number in flat[~torch.isfinite(flat)][:1].tolist()]
        if bad:
            at_the_start |= u == 0
            where = (
                "u = 0, where the policy is the reference, as when training begins," if u == 0 else f"u = {signed(u)}"
            )
            words.append(f"at {where} {' and '.join(bad)}")
    if not words:
        return None
    precision = f" (in {result.outcome.dtype})" if result.outcome.dtype != "float64" else ""
    return Found(f"With u = logp − ref_logp: {'; '.join(words)}{precision}.", level="error" if at_the_start else None)


def k3_with_ratio(logp, ref_logp, old_logp):
    log_ratio = logp - ref_logp
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return (logp - old_logp).exp() * k3
