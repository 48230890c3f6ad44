"""KL601: the number that is logged as the KL is none."""

from math import isclose

import numpy as np

from kltest.checks.check import Found
from kltest.checks.logged_values.metrics import SYMBOLS, logged, no_kl
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import instances
from kltest.identify.values import NAMES, TOLERANCE, Reported
from kltest.moments.tolerances import Tolerances
from kltest.truth import VALUES, value

moot = no_kl


def examine(findings: Findings) -> Found | None:
    """Compare the metric with the KLs under a current sampler, whatever the cause of a difference."""
    known = [(row, found) for row, found in logged(findings) if found.judged]
    if not known:
        return Found(
            "the metric of single rollouts is unknown: the loss takes larger batches, or there are too many rollouts",
            "inconclusive",
        )
    wrong = [_sentence(row, found, findings.seed) for row, found in known if found.row.matches is None]
    return Found(" ".join(wrong)) if wrong else None


def _sentence(row: Row, found: Reported, seed: int) -> str:
    truths = ", ".join(f"{SYMBOLS[name]} = {found.truths[0][name]:.6g}" for name in NAMES)
    bias = found.row.relative_bias or 0.0
    words = f"In {row.environment} it is {found.means[0]:.6g} where {truths} (off by {bias:.2g} of the nearest)"
    if name := row.batch == 1 and _named(found, row.environment, seed):
        return f"{words}: it is {VALUES[name]}."
    minus = [name for name, factor in found.factors.items() if isclose(factor, -1.0, rel_tol=Tolerances.factor)]
    return f"{words}: it is minus {SYMBOLS[minus[0]]}." if minus else f"{words}."


def _named(found: Reported, environment: str, seed: int) -> str | None:
    """Name of another known number that the metric equals on every instance, None if there is none."""
    drawn = instances(environment, seed)
    for name in VALUES:
        if name in NAMES or name.endswith("@sampler"):
            continue
        known = [value(name, instance) for instance in drawn]
        if np.allclose(found.means, known, rtol=TOLERANCE, atol=1e-12):
            return name
    return None


def logs_its_penalty(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = log_ratio.square() / 2
    return penalty, {"kl": penalty.mean()}
