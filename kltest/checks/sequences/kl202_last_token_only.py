"""KL202: only the final token is penalised."""

from kltest.checks.sequences.lengths import only_one_token
from kltest.identify.findings import Findings, Row, when_current


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a multiple of the last token's gradient."""
    return set(when_current(row.identified)) == {"last_token_reverse_kl"}


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if the last token was declared or rollouts have one token, else None."""
    if "last_token_reverse_kl" in findings.expect:
        return "the last token was declared"
    return only_one_token(findings)


def at_the_end(logp, ref_logp, mask):
    left = mask.flip(-1).cumsum(-1).flip(-1)
    last = (mask != 0) & (left == 1)
    return (logp - ref_logp).where(last, 0.0).square() / 2
