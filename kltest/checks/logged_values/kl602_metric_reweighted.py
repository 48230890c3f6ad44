"""KL602: the logged KL is multiplied by something.

Anything that moves the metric, and is neither the policy nor the reference, is a factor of it.
"""

from dataclasses import replace
from itertools import chain
from statistics import mode

import numpy as np
import torch

from kltest.checks.check import Found, signed
from kltest.checks.logged_values.kl603_metric_mutated import examine as mutated
from kltest.checks.logged_values.metrics import BATCH, SYMBOLS, batch, logged, metric_of, moved, no_kl, number
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.rollout import Rollout

moot = no_kl


def examine(findings: Findings) -> Found | None:
    # A metric that is changed in place changes with its factors, and is right once it is logged as a copy (KL603).
    if mutated(findings):
        return None
    found = _factors(findings)
    return Found(f"It is multiplied by {'; and by '.join(found)}.") if found else None


def _factors(findings: Findings) -> list[str]:
    """Factors of the metric, in words."""
    instance = instances(findings.environments[-1], findings.seed)[0]
    base = batch(instance, findings.seed, "stale")
    random = torch.Generator().manual_seed(findings.seed)
    other = {name: torch.randn(BATCH, generator=random, dtype=torch.float64) for name in ("reward", "advantage")}
    before, after = metric_of(findings, base), metric_of(findings, base.replace(**other))
    found, logs = [], f"{BATCH} rollouts log {number(before)}"
    if moved(before, after):
        found.append(f"the task's reward: {logs} with one reward and {number(after)} with another")
    if findings.loss.takes_beta:
        beta = findings.loss.beta(base)
        after = metric_of(findings, base, 2 * beta)
        if moved(before, after):
            found.append(f"the coefficient β: {logs} at β = {beta:g}, {number(after)} at {2 * beta:g}")
    found += _by_constant(findings)
    return found or _by_sampler(findings, instance, base)


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


def _by_sampler(findings: Findings, instance: Instance, base: Rollout) -> list[str]:
    """Describe a ratio to the sampler: right on-policy, moved by the sampler and by the policy, and wrong off-policy.

    A metric that the policy does not move is the sampler's own KL. One that is right off-policy is weighted correctly.
    """
    if any(found.row.matches is None for _, found in logged(findings)):
        return []
    noise = np.random.default_rng(findings.seed).standard_normal((2, *instance.policy.shape))
    sampler = replace(instance, sampler=table(instance.sampler + 0.3 * noise[0]))
    policy = replace(instance, policy=table(instance.policy + 0.3 * noise[1]))
    before = metric_of(findings, base)
    after = metric_of(findings, _with(base, sampler, findings.seed, "old_"))
    if not moved(before, after) or not moved(before, metric_of(findings, _with(base, policy, findings.seed, ""))):
        return []
    wrong = [(row, found) for row, found in logged(findings, "stale") if found.row.matches is None and found.judged]
    if not wrong:
        return []
    bias, environment = max((found.row.relative_bias or 0.0, row.environment) for row, found in wrong)
    return [
        f"a ratio to the sampler: {BATCH} rollouts log {number(before)} and, when nothing but the sampler's log-probs "
        f"changes, {number(after)}; over rollouts of the sampler's it is no KL either (off by {bias:.2g} of it in "
        f"{environment})"
    ]


def _with(base: Rollout, instance: Instance, padding: int, prefix: str) -> Rollout:
    """The same batch with the log-probs of one policy (`prefix` of fields) from another instance."""
    other = batch(instance, padding, "stale")
    return base.replace(**{f"{prefix}{name}": other.peek(f"{prefix}{name}").detach() for name in ("logp", "logits")})


def logs_the_scaled_term(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": (beta * log_ratio).mean()}


def logs_the_bare_kl(logp, ref_logp, mask, beta):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = beta * log_ratio.square() / 2
    return penalty, {"kl": log_ratio.mean()}
