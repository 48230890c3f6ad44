"""KL602: the logged KL is multiplied by something.

Anything that moves the metric, and is neither the policy nor the reference, is a factor of it.
"""

from itertools import chain
from statistics import mode

import numpy as np
import torch

from kltest.checks.check import Found, signed
from kltest.checks.logged_values.kl603_metric_mutated import examine as mutated
from kltest.checks.logged_values.metrics import BATCH, SYMBOLS, batch, logged, metric_of, moved, no_kl, number
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.rollout import LEAVES, Rollout, elsewhere

moot = no_kl


def examine(findings: Findings) -> Found | None:
    """Report the factors of a metric."""
    # A metric that is changed in place changes with its factors, and is right once it is logged as a copy (KL603).
    if mutated(findings):
        return None
    found = _factors(findings)
    return Found(f"It is multiplied by {'; and by '.join(found)}.") if found else None


def _factors(findings: Findings) -> list[str]:
    """Factors of the metric, in words."""
    base = batch(instances(findings.environments[-1], findings.seed)[0], findings.seed, "stale")
    random = torch.Generator().manual_seed(findings.seed)
    other = {name: torch.randn(BATCH, generator=random, dtype=torch.float64) for name in ("reward", "advantage")}
    changed: dict[str, tuple[Rollout, float | None]] = {"the task's reward": (base.replace(**other), None)}
    if findings.loss.takes_beta:
        beta = findings.loss.beta(base)
        changed[f"the coefficient β, {beta:g} and then {2 * beta:g}"] = base, 2 * beta
    before, found = metric_of(findings, base), []
    for what, (rollout, coefficient) in changed.items():
        if moved(before, after := metric_of(findings, rollout, coefficient)):
            found.append(f"{what}: {_from_to(before, after)}")
    found += _by_constant(findings)
    return found or _by_sampler(findings, base)


def _from_to(before: np.ndarray, after: np.ndarray) -> str:
    return f"{BATCH} rollouts log {number(before)} and, when nothing else changes, {number(after)}"


def _by_constant(findings: Findings) -> list[str]:
    """Describe the constant: at one length the three KLs are multiples of each other, so the most frequent one."""
    known = {
        row.environment: [f"{signed(factor)} · {SYMBOLS[name]}" for name, factor in found.factors.items()]
        for row, found in logged(findings)
        if found.row.matches is None and found.factors
    }
    if not known:
        return []
    common = mode(chain(*known.values()))
    terms = (f"{common if common in each else each[0]} in {environment}" for environment, each in known.items())
    return [f"a constant: it is {', '.join(terms)}"]


def _by_sampler(findings: Findings, base: Rollout) -> list[str]:
    """Describe a ratio to the sampler: right on-policy, moved by the sampler and by the policy, and wrong off-policy.

    A metric that the policy does not move is the sampler's own KL. One that is right off-policy is weighted correctly.
    """

    def with_another(prefix: str) -> np.ndarray:
        names = [f"{prefix}{name}" for name in LEAVES]
        return metric_of(findings, base.replace(**{name: elsewhere(base.peek(name).detach()) for name in names}))

    if any(found.row.matches is None for _, found in logged(findings)):
        return []
    before, after = metric_of(findings, base), with_another("old_")
    if not moved(before, after) or not moved(before, with_another("")):
        return []
    wrong = [(row, found) for row, found in logged(findings, "stale") if found.row.matches is None and found.judged]
    if not wrong:
        return []
    bias, environment = max((found.row.relative_bias or 0.0, row.environment) for row, found in wrong)
    return [
        f"a ratio to the sampler: {_from_to(before, after)}; over rollouts of the sampler's it is no KL either (off by "
        f"{bias:.2g} of it in {environment})"
    ]


def logs_the_scaled_term(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": (beta * log_ratio).mean()}


def logs_the_bare_kl(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": log_ratio.mean()}
