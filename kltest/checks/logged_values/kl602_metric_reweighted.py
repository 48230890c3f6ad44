"""KL602: the logged KL is multiplied by something.

Anything that moves the metric, and is neither the policy nor the reference, is a factor of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import numpy as np
import torch

from kltest.checks.check import Found
from kltest.checks.logged_values.kl603_metric_mutated import mutation
from kltest.checks.logged_values.metrics import (
    BATCH,
    SYMBOLS,
    batch,
    logged_rows,
    metric_of,
    moved,
    no_kl,
    number,
    reported,
)
from kltest.checks.logged_values.metrics import demonstrate as demonstrate_metrics
from kltest.counterexample.demonstration import Demonstration
from kltest.counterexample.environment import SmallEnvironment
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.values import TOLERANCE
from kltest.rollout import Rollout

moot = no_kl


def examine(findings: Findings) -> Found | None:
    # A metric that is changed in place changes with its factors, and is right once it is logged as a copy (KL603).
    if findings.once(mutation):
        return None
    found = _factors(findings)
    return Found(f"It is multiplied by {'; and by '.join(found)}.") if found else None


def _factors(findings: Findings) -> list[str]:
    """Factors of the metric, in words."""
    instance = instances(findings.environments[-1], findings.seed)[0]
    base = batch(instance, findings.seed, "stale")
    found = [_by_reward(findings, base), _by_coefficient(findings, base), _by_constant(findings)]
    if not any(found):
        found = [_by_sampler(findings, instance, base)]
    return [factor for factor in found if factor is not None]


def _by_reward(findings: Findings, base: Rollout) -> str | None:
    random = torch.Generator().manual_seed(findings.seed)
    other = {name: torch.randn(BATCH, generator=random, dtype=torch.float64) for name in ("reward", "advantage")}
    before, after = metric_of(findings, base), metric_of(findings, base.replace(**other))
    if not moved(before, after):
        return None
    return f"the task's reward: {BATCH} rollouts log {number(before)} with one reward and {number(after)} with another"


def _by_coefficient(findings: Findings, base: Rollout) -> str | None:
    if not findings.loss.takes_beta:
        return None
    beta = findings.loss.beta(base)
    before, after = metric_of(findings, base), metric_of(findings, base, 2 * beta)
    if not moved(before, after):
        return None
    return f"the coefficient β: {BATCH} rollouts log {number(before)} at β = {beta:g}, {number(after)} at {2 * beta:g}"


def _by_constant(findings: Findings) -> str | None:
    rows = [row for row in logged_rows(findings) if reported(row).row.matches is None]
    known = {row.environment: found for row in rows if (found := reported(row).factors)}
    if not known:
        return None
    # At one length the three KLs are multiples of each other: take the factor that fits most environments.
    candidates = [(name, factor) for found in known.values() for name, factor in found.items()]
    name, factor = max(candidates, key=lambda pair: sum(_has(found, *pair) for found in known.values()))
    fitting = [environment for environment, found in known.items() if _has(found, name, factor)]
    where = ", ".join(fitting)
    if isclose(factor, -1.0, rel_tol=10 * TOLERANCE):
        words = f"−1: it is minus the KL, −{SYMBOLS[name]}, in {where}; the sign of the log-ratio is turned"
    else:
        turned = " that turns its sign" if factor < 0 else ""
        words = f"a constant{turned}: it is {_signed(factor)} · {SYMBOLS[name]} in {where}"
    for environment, found in known.items():
        if environment not in fitting:
            other, times = next(iter(found.items()))
            words += f", and {_signed(times)} · {SYMBOLS[other]} in {environment}"
    return words


def _has(found: dict[str, float], name: str, factor: float) -> bool:
    return name in found and isclose(found[name], factor, rel_tol=10 * TOLERANCE)


def _by_sampler(findings: Findings, instance: Instance, base: Rollout) -> str | None:
    """Describe a ratio to the sampler: right on-policy, moved by the sampler and by the policy, and wrong off-policy.

    A metric that the policy does not move is the sampler's own KL. One that is right off-policy is weighted correctly.
    """
    if any(reported(row).row.matches is None for row in logged_rows(findings)):
        return None
    noise = np.random.default_rng(findings.seed).standard_normal((2, *instance.policy.shape))
    sampler = replace(instance, sampler=table(instance.sampler + 0.3 * noise[0]))
    policy = replace(instance, policy=table(instance.policy + 0.3 * noise[1]))
    before = metric_of(findings, base)
    after = metric_of(findings, _with(base, sampler, findings.seed, "old_"))
    if not moved(before, after) or not moved(before, metric_of(findings, _with(base, policy, findings.seed, ""))):
        return None
    wrong = [
        row for row in logged_rows(findings, "stale") if reported(row).row.matches is None and reported(row).judged
    ]
    if not wrong:
        return None
    worst = max(wrong, key=lambda row: reported(row).row.relative_bias or 0.0)
    return (
        f"a ratio to the sampler: {BATCH} rollouts log {number(before)} and, when nothing but the sampler's log-probs "
        f"changes, {number(after)}; over rollouts of the sampler's it is no KL either (off by "
        f"{reported(worst).row.relative_bias:.2g} of it in {worst.environment})"
    )


def _with(base: Rollout, instance: Instance, padding: int, prefix: str) -> Rollout:
    """The same batch with the log-probs of one policy (`prefix` of fields) from another instance."""
    other = batch(instance, padding, "stale")
    return base.replace(**{f"{prefix}{name}": other.peek(f"{prefix}{name}").detach() for name in ("logp", "logits")})


def _signed(number: float) -> str:
    return f"{number:.6g}".replace("-", "−")


def logs_the_scaled_term(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": (beta * log_ratio).mean()}


def logs_the_bare_kl(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": log_ratio.mean()}


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    losses = {"as written": logs_the_scaled_term, "fixed": logs_the_bare_kl}
    return demonstrate_metrics(ENVIRONMENT, losses, beta=0.1)
