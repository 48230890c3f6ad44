"""KL701: the KL of the likeliest actions is taken for the KL of all."""

from functools import partial

from kltest.checks.approximations import sizes
from kltest.checks.approximations.heads import accounts_for, beyond_the_usual_environments
from kltest.checks.check import Found
from kltest.identify.findings import Findings

explains = partial(accounts_for, drawn=False)
remark = sizes.remark


def examine(findings: Findings) -> Found | None:
    """Report a head that is larger than the usual environments, or sizes of a support that make a difference."""
    return beyond_the_usual_environments(findings, drawn=False) or sizes.examine(findings)


def over_the_head(logits, ref_logits):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_probs, head = logits.topk(2, dim=-1)
    ref_log_probs = ref_logits.gather(-1, head)
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
