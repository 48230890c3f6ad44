"""KL203: each sequence is divided by its own length."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return not findings.observed.coupled_by_length and divided_by_length(row, findings)


def divided_by_length(row: Row, findings: Findings) -> bool:
    """At fixed length T the coefficients are 1/T of those at length one; where lengths vary, nothing is identified."""
    if row.length == 1:
        return False
    fixed, varying = (findings.measure.alone(world, row.sampler, row.batch) for world in ("sequence", "ragged"))
    if row.length is not None:
        fixed = row
    if varying is None or varying.identified is not None or fixed is None or fixed.identified is None:
        return False
    single = findings.measure.alone("bandit", row.sampler, row.batch)
    unit = sum(map(abs, single.identified.values())) if single and single.identified else 1.0
    size = sum(map(abs, fixed.identified.values()))
    return "zero" not in fixed.identified and abs(size * (fixed.length or 1) - unit) < 1e-3 * unit


def moot(findings: Findings) -> str | None:
    return "only worlds of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def per_token(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2 / mask.sum(-1)


WORLD = SmallWorld(policy=[(0.8, 0.2), (0.5, 0.5), (0.5, 0.5)], reference=[(0.5, 0.5)] * 3, length=2)


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": per_token, "mended": squared_sum})


CHECK = Check(
    code="KL203",
    name="length-normalised",
    title="Every sequence's term is divided by that sequence's length",
    what=(
        "At a fixed length T the gradient is 1/T of the un-normalised one; where lengths vary it is not a "
        "multiple of any named gradient."
    ),
    why=(
        "The penalty that is applied is β/L, weaker for longer sequences: the policy is paid for length, and "
        "β does not transfer between settings. Per-token terms over L follow no objective at all."
    ),
    example=(
        "Two tokens of two actions, π = (0.8, 0.2) at the root and equal to ref = (0.5, 0.5) afterwards. With "
        "respect to the root's first probability the truth is ln 4 = 1.386294; the term divided by its length "
        "2 gives 0.693147."
    ),
    fix=(
        "Sum over live tokens and average over sequences. Where a scale is "
        "wanted, divide by a constant such as the maximal length."
    ),
    sources=(
        "Tang & Munos 2025, arXiv 2506.09477",
        "Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",
    ),
    wrong=per_token,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)
