"""KL701: the KL of the likeliest actions is taken for the KL of all."""

from kltest.checks.approximations import sides, sizes
from kltest.checks.approximations.heads import accounts_for, beyond_the_usual_environments
from kltest.checks.check import Found
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> str | None:
    """Describe the head, or the ranks, that a loss distinguishes."""
    if row.wrong and row.identified is None and sides.rank_by_rank(findings):
        return "no named gradient; the likeliest log-probs of each side are compared by rank, whatever their tokens"
    return accounts_for(row, findings, drawn=False)


def remark(findings: Findings) -> str:
    """Say whose tokens they are if that is not said so, and what another number of them makes."""
    return " ".join(filter(None, (sides.other_side(findings), sizes.remark(findings))))


def examine(findings: Findings) -> Found | None:
    """Report a head that is larger than the usual environments, or sizes of a support that make a difference."""
    return beyond_the_usual_environments(findings, drawn=False) or sizes.examine(findings)


def over_the_head(logits, ref_logits):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_probs, head = logits.topk(2, dim=-1)
    ref_log_probs = ref_logits.gather(-1, head)
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
