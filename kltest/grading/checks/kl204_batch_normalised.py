"""KL204: one token-mean for the whole batch."""

from __future__ import annotations

from kltest.grading.checks.check import Check
from kltest.grading.checks.kl203_length_normalised import divided_by_length
from kltest.grading.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if not findings.coupled_by_length:
        return False
    if row.batch > 1:
        return row.identified is None
    return divided_by_length(row, findings)


def moot(findings: Findings) -> str | None:
    return "only worlds of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


CHECK = Check(
    code="KL204",
    name="batch-normalised",
    title="A rollout's gradient depends on the lengths of the others in its batch",
    what=(
        "The loss couples the rows of a batch: it is divided by something that the whole batch decides, such "
        "as its number of live tokens."
    ),
    why=(
        "The weight of a rollout then depends on which others it happens to be batched with, on the number of "
        "micro-batches and on the number of ranks. Its expectation is a biased, length-weighted gradient, "
        "which tends to the declared one over E[L] only as batches grow."
    ),
    example=(
        "A rollout of one token has weight 1/2 next to another of one token and 1/4 next to one of three "
        "tokens; averaged over sequences it has weight 1/2 in both."
    ),
    fix=(
        "Sum over live tokens and average over sequences: (term * mask).sum(-1).mean(). Where a token-mean is "
        "wanted, divide by a constant."
    ),
    sources=("Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",),
    explains=explains,
    moot=moot,
)
