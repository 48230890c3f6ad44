"""KL204: one token-mean for the whole batch."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.checks.sequences.kl203_length_normalised import divided_by_length
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if not findings.observed.coupled_by_length:
        return False
    if row.batch > 1:
        return row.identified is None
    return divided_by_length(row, findings)


def moot(findings: Findings) -> str | None:
    return "only worlds of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def mean_over_tokens(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).sum() / mask.sum()


WORLD = SmallWorld(policy=[(0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5)] * 2, length=2, ends=True)


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": mean_over_tokens, "mended": squared_sum}, batch=2)


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
        "Two actions, of which the second ends the rollout, two tokens at most; π = (0.8, 0.2) at the root and "
        "equal to ref = (0.5, 0.5) after it, batches of two. With respect to the root's first probability the truth "
        "is ln 4 = 1.386294; divided by the batch's live tokens it is 0.922615."
    ),
    fix=("Sum over live tokens and average over sequences. Where a token-mean is wanted, divide by a constant."),
    sources=("Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",),
    wrong=mean_over_tokens,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)
