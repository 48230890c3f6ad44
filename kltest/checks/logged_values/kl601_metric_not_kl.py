"""KL601: the number that is logged as the KL is none."""

from kltest.checks.check import Found
from kltest.checks.logged_values.further import after_earlier_calls, elsewhere
from kltest.checks.logged_values.metrics import OF_EARLIER_CALLS, SYMBOLS, logged, no_kl
from kltest.identify.findings import Findings, Row
from kltest.identify.values import NAMES, Reported


def moot(findings: Findings) -> str:
    """Return a reason to skip the check if the loss logs no KL."""
    why = no_kl(findings)
    return "" if why == OF_EARLIER_CALLS else why


def examine(findings: Findings) -> Found | None:
    """Compare the metric with the KLs under a current sampler, whatever the cause of a difference; then further out."""
    if no_kl(findings):
        return after_earlier_calls(findings)
    known = [(row, found) for row, found in logged(findings) if found.judged]
    if not known:
        why = "draws random numbers" if findings.noisy else "takes larger batches, or there are too many rollouts"
        return Found(f"the metric of single rollouts is unknown: the loss {why}", "inconclusive")
    wrong = [_sentence(row, found) for row, found in known if found.row.matches is None]
    return Found(" ".join(wrong)) if wrong else elsewhere(findings)


def _sentence(row: Row, found: Reported) -> str:
    truths = ", ".join(f"{SYMBOLS[name]} = {found.truths[0][name]:.6g}" for name in NAMES)
    bias = found.row.relative_bias or 0.0
    return f"In {row.environment} it is {found.means[0]:.6g} where {truths} (off by {bias:.2g} of the nearest)."


def logs_its_penalty(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = log_ratio.square() / 2
    return penalty, {"kl": penalty.mean()}
