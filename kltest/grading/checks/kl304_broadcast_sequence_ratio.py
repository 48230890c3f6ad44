"""KL304: one ratio for the whole sequence on every token's term."""

from __future__ import annotations

from kltest.grading.checks.check import Check
from kltest.grading.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or row.identified is not None or row.length == 1:
        return False
    return findings.probes.only_through_the_sum(row.environment)


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


CHECK = Check(
    code="KL304",
    name="broadcast-sequence-ratio",
    title="One sequence-level ratio is broadcast over the tokens' terms",
    what=(
        "The sampler's log-probs enter through their sum over the sequence only, as one ratio that multiplies "
        "every token's term, and the result is not the declared gradient."
    ),
    why=(
        "A geometric mean of ratios is not an importance weight, and a differentiable sequence ratio on token "
        "terms adds derivatives of every token to every term: the result mixes two gradients and fits "
        "neither."
    ),
    example=(
        "Two tokens of two actions. Root: π = ref = (0.5, 0.5), sampler (0.8, 0.2). Then π = sampler = (0.8, "
        "0.2) against ref = (0.5, 0.5) in both contexts. With respect to the first probability there, summed "
        "over both, the truth is 1.386294; the geometric-mean ratio on k2, detached, gives (√0.4 + "
        "√0.1)·1.386294 = 1.315153."
    ),
    fix=(
        "Use the full-sequence ratio, detached, on a sequence-level term, or prefix ratios on token terms: "
        "exp(((logp − old_logp) * mask).cumsum(-1)).detach()."
    ),
    sources=(
        "Zheng et al. 2025, GSPO, arXiv 2507.18071",
        "TRL pull request #4638",
    ),
    explains=explains,
    moot=moot,
)
