"""KL503: legal log-ratios give a value or a gradient that is not finite.

Large ones are extreme input; 0, where the policy is the reference, is the first step of training.
"""

from kltest.checks.batches import batch_of, companions
from kltest.checks.check import Found, signed
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.identify.findings import Findings

LOG_RATIOS = (0.0, 5.0, -5.0, 30.0, -30.0, 100.0, -100.0, 1000.0, -1000.0)

moot = not_comparable


def examine(findings: Findings) -> Found | None:
    """Report values and gradients that are not finite, at large log-ratios u of one token."""
    experiment = findings.measure.experiment()
    bad: dict[float, str] = {}
    for u in LOG_RATIOS:
        result = experiment.call(batch_of([u], companions(findings), length=1))
        parts = {"value": result.value.sum().reshape(1), **result.at(result.live)}
        wrong = [(name, number) for name, part in parts.items() for number in part[~part.isfinite()].tolist()]
        if wrong:
            name, number = wrong[0]
            bad[u] = f"the {name} is {number}" if name == "value" else f"the gradient at {name} is {number}"
    if not bad:
        return None
    words = "; ".join(f"at u = {signed(u)} {what}" for u, what in bad.items())
    start = " At u = 0 the policy is the reference, as when training begins." if 0.0 in bad else ""
    precision = f" (in {result.outcome.dtype})" if result.outcome.dtype != "float64" else ""
    return Found(f"With u = logp − ref_logp: {words}{precision}.{start}", level="error" if start else None)


def k3_with_ratio(logp, ref_logp, old_logp):
    log_ratio = logp - ref_logp
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return (logp - old_logp).exp() * k3
