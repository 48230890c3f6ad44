"""KL205: the log-ratios of later tokens are credited with a factor.

Every gradient Σ_t g_t Σ_{s≥t} c_ts u_s is a combination of the parts E_π[g_t u_s]. The factors c are found by fitting
the measured gradient with these parts on all instances of an environment, and then read: a discount, a window, a
discount from the start.
"""

from functools import lru_cache
from itertools import product

import numpy as np

from kltest.checks.check import Found
from kltest.checks.sequences.lengths import only_one_token
from kltest.checks.stress import credited_to_the_end, late, right_in_long_rollouts
from kltest.identify.case import Case
from kltest.identify.findings import Findings, Row
from kltest.identify.identification import solve
from kltest.truth import gradient
from kltest.truth.gradients import credit_pairs

# Factors that differ by less are one factor: the fit leaves 1e-9, or 1e-4 if the loss computes in float32.
SAME = 1e-3
# Added by a k3 in the reward: in expectation it is u for later tokens, but not for the token itself.
BESIDES = "local_forward_kl"

Factors = dict[tuple[int, int], float]


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if ∇KL was not declared or rollouts have one token, else None."""
    if "reverse_kl" not in findings.expect:
        return "the declared target is not the sum over all later log-ratios"
    return only_one_token(findings)


def examine(findings: Findings) -> Found | None:
    """A discount or a window that begins farther away than the graded rollouts are long."""
    found = late(findings, "KL205")
    return credited_to_the_end(findings) if found is None and right_in_long_rollouts(findings) else found


def explains(row: Row, findings: Findings) -> str | None:
    """Describe how a row's gradient credits later log-ratios; None if that does not account for it."""
    if row.length == 1:
        return None
    if row.identified is not None:
        return _damped(row.identified)
    gradients = row.gradients
    if not gradients:  # the row is sampled
        return None
    case = row.case
    parts, zeros = _parts(case), [np.zeros(())] * len(case.instances)
    besides = [name for name in findings.expect if name not in ("reverse_kl", "local_reverse_kl", "zero")]
    for extra, by_distance in product(([], [BESIDES]), (True, False)):
        more = {name: [gradient(name, instance) for instance in case.instances] for name in (*besides, *extra)}
        columns: dict[str, list[np.ndarray]] = {}
        names = {(t, s): str(s - t if by_distance else (t, s)) for t, s in parts}
        for pair, name in names.items():
            columns[name] = [a + b for a, b in zip(columns.get(name, zeros), parts[pair], strict=True)]
        found = solve(gradients, columns | more, dtype=findings.observed.dtype)
        if found is not None:
            return read({pair: found[name] for pair, name in names.items()})
    return None


@lru_cache(maxsize=16)
def _parts(case: Case) -> dict[tuple[int, int], list[np.ndarray]]:
    pairs = [credit_pairs(instance) for instance in case.instances]
    return {pair: [each[pair] for each in pairs] for pair in pairs[0]}


def _damped(identified: dict[str, float]) -> str | None:
    """Describe one factor for all later tokens, which is a combination of named gradients."""
    factor = identified.get("reverse_kl", 0.0)
    if set(identified) != {"reverse_kl", "local_reverse_kl"} or not 0 < factor < 1:
        return None
    whole = factor + identified["local_reverse_kl"]
    return f"every later log-ratio is credited with {factor:.4g}" if abs(whole - 1) < SAME else None


def read(factors: Factors) -> str | None:
    """Describe a (t, s) table of factors; None if all later tokens have the same one, or zero."""
    size = max(map(abs, factors.values()))
    later = {pair: factor for pair, factor in factors.items() if pair[0] < pair[1]}
    if not any(abs(factor) > SAME * size for factor in later.values()):
        return None
    first = factors[0, 0]
    if abs(first) > SAME * size:
        position, distance = factors[1, 1] / first, factors[0, 1] / first
        if all(_same(c, first * position**t * distance ** (s - t), size) for (t, s), c in factors.items()):
            powers = [f"{base:.4g}^{at}" for base, at in ((position, "t"), (distance, "k")) if not _same(base, 1.0)]
            scale = "" if _same(first, 1.0) else f", all times {first:.4g}"
            words = f"the log-ratio k tokens after token t, counted from 0, is credited with {'·'.join(powers)}{scale}"
            return words if powers else None
    by_distance = [factors[0, lag] for lag in range(1 + max(s for _, s in factors))]
    if not all(_same(c, by_distance[s - t], size) for (t, s), c in factors.items()):
        return None
    if all(_same(factor, by_distance[1], size) for factor in by_distance[1:]):
        return None
    return "by distance, log-ratios are credited with " + ", ".join(
        f"{round(factor, 6) + 0.0:.4g}" for factor in by_distance
    )


def _same(one: float, other: float, size: float = 1.0) -> bool:
    return abs(one - other) <= SAME * size


def discounted(logp, ref_logp, mask):
    to_go = (logp - ref_logp).detach().where(mask != 0, 0.0)
    for step in reversed(range(to_go.shape[1] - 1)):
        to_go[:, step] += 0.95 * to_go[:, step + 1]
    return (logp * to_go).where(mask != 0, 0.0)


def undiscounted(logp, ref_logp, mask):
    to_go = (logp - ref_logp).detach().where(mask != 0, 0.0)
    for step in reversed(range(to_go.shape[1] - 1)):
        to_go[:, step] += to_go[:, step + 1]
    return (logp * to_go).where(mask != 0, 0.0)
